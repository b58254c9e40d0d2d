"""What has to be so on the node before anything is attached there."""

from __future__ import annotations

from contextlib import suppress

from schedtrace import tracefs
from schedtrace.errors import NodeUnsupported
from schedtrace.procfs import in_initial_pid_namespace


def prepare_node() -> None:
    """Mount tracefs if it isn't, and remove the lines in uprobe_events that killed sessions left.

    Raises NodeUnsupported where BPF and we would mean different processes by a PID, and what
    :func:`tracefs.ensure_mounted` raises.
    """
    if not in_initial_pid_namespace():
        raise NodeUnsupported(
            "this PID namespace is not the node's, so that BPF would see other PIDs than the ones given here: "
            "run on the node itself, or in a pod with hostPID: true (docker run --pid=host)"
        )
    folder = tracefs.ensure_mounted()
    with suppress(OSError):  # they harm nobody, so that they may stay where we can't remove them
        tracefs.remove_lines(folder, tracefs.read_dead_lines(folder))
