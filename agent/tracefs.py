"""tracefs: where it is mounted, mounting it, the tracepoints in it, and the probes that dead sessions left
there.

The kernel tells the number of a tracepoint only through tracefs, so it must be mounted; and where the
uprobe PMU can't be used, uprobes are lines in its file uprobe_events. Sources:
Documentation/trace/ftrace.rst, uprobetracer.rst; BCC looks in the two places named here.
"""

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from schedtrace.errors import AttachFailed, NodeUnsupported, PermissionDenied, SchedtraceError

TRACING = "/sys/kernel/tracing"
DEBUGFS = "/sys/kernel/debug"
TRACING_IN_DEBUGFS = f"{DEBUGFS}/tracing"
UPROBE_EVENTS = "uprobe_events"

TRACEPOINTS = (
    "sched/sched_process_exec",
    "sched/sched_process_exit",
    "sched/sched_switch",
    "sched/sched_wakeup",
    "sched/sched_wakeup_new",
    "task/task_newtask",
)
"""What bpf/ attaches to, as category/name."""

_OUR_LINE = re.compile(r"^[pr][0-9]*:(uprobes/p_schedtrace_\w+_bcc_(\d+)) ", re.MULTILINE)


def mount_point(mountinfo: str) -> str | None:
    """Where the text of /proc/self/mountinfo has tracefs, of the places that BCC looks in; None if nowhere.
    A mounted debugfs mounts it by itself at the first access."""
    mounted = set()
    for line in mountinfo.split("\n"):
        ours, separator, theirs = line.partition(" - ")
        if separator:
            mounted.add((theirs.split(" ")[0], ours.split(" ")[4]))
    if ("tracefs", TRACING) in mounted:
        return TRACING
    if mounted & {("tracefs", TRACING_IN_DEBUGFS), ("debugfs", DEBUGFS)}:
        return TRACING_IN_DEBUGFS
    return None


def ensure_mounted() -> str:
    """Where tracefs is mounted; if nowhere, mount it at /sys/kernel/tracing, where it stays.

    Raises PermissionDenied if it isn't mounted and we may not, NodeUnsupported if the kernel has none.
    """
    found = mount_point(_mountinfo())
    if found is not None:
        return found
    failure = _mount()
    if failure == 0:
        return TRACING
    found = mount_point(_mountinfo())  # another session may have been faster
    if found is not None:
        return found
    raise _mount_refusal(failure)


def missing_tracepoints(tracefs: str) -> tuple[str, ...]:
    """Those of :data:`TRACEPOINTS` that the kernel doesn't have. Raises PermissionError if tracefs can't be
    read."""
    return tuple(name for name in TRACEPOINTS if not Path(tracefs, "events", name, "id").exists())


def dead_lines(uprobe_events: str, lives: Callable[[int], bool]) -> tuple[str, ...]:
    """Names ("uprobes/p_...") of the probes in the text of uprobe_events that sessions left there which are
    no more. ``lives`` says whether a PID is that of a running session."""
    return tuple(name for name, pid in _OUR_LINE.findall(uprobe_events) if not lives(int(pid)))


def read_dead_lines(tracefs: str) -> tuple[str, ...]:
    """Names of the probes that dead sessions left. Raises OSError."""
    return dead_lines(Path(tracefs, UPROBE_EVENTS).read_text(), session_lives)


def remove_lines(tracefs: str, names: Iterable[str]) -> int:
    """Remove probes by name from uprobe_events; returns how many went. One that is in use after all stays:
    the kernel refuses. Raises OSError if the file can't be written at all."""
    # Never truncate: opening uprobe_events with O_TRUNC removes everybody's probes.
    file = os.open(f"{tracefs}/{UPROBE_EVENTS}", os.O_WRONLY | os.O_APPEND)
    removed = 0
    try:
        for name in names:
            try:
                os.write(file, f"-:{name}\n".encode())
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOENT):
                    raise
            else:
                removed += 1
    finally:
        os.close(file)
    return removed


def session_lives(pid: int) -> bool:
    """Could process ``pid`` be a running session? It is if it has BCC's library in memory; when in doubt,
    yes."""
    try:
        return b"/libbcc.so" in Path(f"/proc/{pid}/maps").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def _mountinfo() -> str:
    return os.fsdecode(Path("/proc/self/mountinfo").read_bytes())


def _mount() -> int:
    """mount(2) of tracefs; 0 or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mount(b"tracefs", TRACING.encode(), b"tracefs", ctypes.c_ulong(0), None)
    return ctypes.get_errno() if failed else 0


def _mount_refusal(error_number: int) -> SchedtraceError:
    why = os.strerror(error_number)
    if error_number in (errno.EPERM, errno.EACCES):
        return PermissionDenied(
            "tracefs is not mounted, and mounting it needs CAP_SYS_ADMIN; let the node's root do it once:"
            f" mount -t tracefs tracefs {TRACING}"
        )
    if error_number == errno.ENODEV:
        return NodeUnsupported(
            "this kernel has no tracefs (CONFIG_TRACING): schedtrace can't see threads without it"
        )
    if error_number == errno.ENOENT:
        return NodeUnsupported(
            f"there is no {TRACING} to mount tracefs at: is sysfs mounted, and CONFIG_TRACING set?"
        )
    return AttachFailed(f"mounting tracefs at {TRACING} failed: {why}")
