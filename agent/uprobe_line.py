"""Uprobes through a line in tracefs' uprobe_events: the way that is left where BPF links and perf's PMU are refused.

The line makes a tracepoint of the instruction, which a perf event then runs the program at. It has a name that
:func:`schedtrace.tracefs.dead_lines` knows, with the PID of the session: a process that is killed takes the probe with
it, but not the line. Sources: Documentation/trace/uprobetracer.rst, perf_event_open(2).
"""

import os
from contextlib import suppress
from pathlib import Path
from time import sleep

from schedtrace import tracefs, uprobe_pmu

_GROUP = "uprobes"
_TRIES = 40
_TRY_AGAIN_SECONDS = 0.05


def attach(program_fd: int, path: str, file_offset: int, pid: int, name: str) -> int:
    """Run a BPF program of the kprobe kind at an instruction of the file at ``path``; with a ``pid`` other than
    :data:`uprobe_pmu.ANY_PROCESS`, only in that process. ``name`` is the line's. Returns the event's descriptor; the
    probe is out when that is closed and :func:`remove` has been called. Raises OSError.
    """
    folder = tracefs.ensure_mounted()
    _write(folder, f"p:{_GROUP}/{name} {path}:{file_offset:#x}")
    try:
        number = int(Path(folder, "events", _GROUP, name, "id").read_text())
        return uprobe_pmu.open_event(program_fd, uprobe_pmu.TRACEPOINT, number, pid)
    except OSError:
        remove(name)
        raise


def line_name(inode: int, file_offset: int, serial: int, session_pid: int) -> str:
    """A name that no other line has. ``serial`` tells the probes of one session apart."""
    return f"p_schedtrace_{inode:x}_{file_offset:x}_{serial}_bcc_{session_pid}"


def remove(name: str) -> None:
    """Remove the line. If something still uses it, that is a session on its way out: it is given some time."""
    folder = tracefs.ensure_mounted()
    for _ in range(_TRIES):
        with suppress(OSError):
            if tracefs.remove_lines(folder, [f"{_GROUP}/{name}"]) or not Path(folder, "events", _GROUP, name).exists():
                return
        sleep(_TRY_AGAIN_SECONDS)


def _write(folder: str, line: str) -> None:
    # Never truncate: opening uprobe_events with O_TRUNC removes everybody's probes.
    file = os.open(f"{folder}/{tracefs.UPROBE_EVENTS}", os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)
