"""The errors a user sees: one root that carries the process's exit code, and a child per kind.

Raised where a thing is found to be wrong, caught once in :func:`schedtrace.cli.main`, which prints the message as
one line. A message names the thing at hand, why it can't be used, and what to do about it.
"""


class SchedtraceError(Exception):
    """Root of all errors meant for a user. ``exit_code`` is what the process exits with."""

    exit_code = 1

    def __str__(self) -> str:
        # Names of files, sections and symbols come from strangers' binaries: an error stays one printable line.
        return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in super().__str__())


class NotTraceable(SchedtraceError):
    """The file or process is not a Go program that can be traced."""

    exit_code = 3


class NodeUnsupported(SchedtraceError):
    """The kernel or the node lacks something that is needed."""

    exit_code = 4


class AttachFailed(SchedtraceError):
    """Loading or attaching the probes failed although the node and the target looked right."""

    exit_code = 5


class PermissionDenied(SchedtraceError):
    """A capability or an access right is missing; the message says which."""

    exit_code = 77


class UnreadableRecording(SchedtraceError):
    """The file is no recording, is damaged, or of a version that is not known."""
