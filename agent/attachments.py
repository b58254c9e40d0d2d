"""Probes by executable: put in when the first process that runs it is watched, out some time after the last.

One executable is probed once, whatever number of processes runs it: with probes for each, every hit would count for
all. Or each of the processes gets probes of its own, confined to its memory, if the others are not to pay.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from schedtrace import target
from schedtrace.binaries import GoBinary
from schedtrace.plan import ProbePlan
from schedtrace.procfs import Process
from schedtrace.session import Attachment, Session
from schedtrace.uprobe_pmu import ANY_PROCESS

# What the kernel puts in place of the probed instruction: int3, and brk with its own number (BRK64_OPCODE_UPROBES).
_BREAKPOINTS = {"x86_64": b"\xcc", "aarch64": (0xD42000A0).to_bytes(4, "little")}
_IDLE_SECONDS = 30.0
"""How long the probes of an executable stay after its last process: a crashing container comes back."""


@dataclass(eq=False)
class Probed:
    """Probes in the kernel, and the processes that count through them."""

    binary: GoBinary
    plan: ProbePlan
    attachment: Attachment
    only: tuple[int, int] | None
    """PID and start time of the one process they are confined to."""
    pids: set[int] = field(default_factory=set)
    idle_since: float = field(default_factory=monotonic)

    def leave(self, pid: int) -> None:
        """A process counts through them no longer."""
        self.pids.discard(pid)
        self.idle_since = monotonic()


class Attachments:
    """All probes of a session. ``confined``: each process has its own."""

    def __init__(self, session: Session, *, confined: bool) -> None:
        self._session, self._confined = session, confined
        self._probed: dict[tuple[int, ...], list[Probed]] = {}
        """By :attr:`GoBinary.key_without_device`; confined probes by PID and start time."""

    def probe(self, process: Process, binary: GoBinary, plan: ProbePlan, executable_fd: int) -> Probed:
        """The probes on the process's executable: those that are there, or new ones. Raises AttachFailed."""
        only = (process.pid, process.start_time_ticks) if self._confined else None
        key = only or binary.key_without_device
        for probed in self._probed.get(key, ()):
            if probed.binary.key == binary.key or (not only and _has_breakpoint(process, plan)):
                return probed
        pid = process.pid if only else ANY_PROCESS
        probed = Probed(binary, plan, self._session.attach(executable_fd, target.sites_of(plan), pid), only)
        self._probed.setdefault(key, []).append(probed)
        return probed

    def remove_idle(self) -> None:
        """Take out the probes that no process has counted through for a while; at once if they were one process's."""
        now = monotonic()
        idle = [
            probed
            for alike in self._probed.values()
            for probed in alike
            if not probed.pids and (probed.only or now - probed.idle_since > _IDLE_SECONDS)
        ]
        if idle:
            gone = set(idle)
            left = {key: [one for one in alike if one not in gone] for key, alike in self._probed.items()}
            self._probed = {key: alike for key, alike in left.items() if alike}
            self._session.detach([probed.attachment for probed in idle])


def _has_breakpoint(process: Process, plan: ProbePlan) -> bool:
    """Is there a breakpoint at the plan's first probe in this process's memory? Then its executable is the inode that
    is probed already, whatever stat(2) says of it."""
    breakpoint_code = _BREAKPOINTS[platform.machine()]
    address = process.load_bias() + plan.probes[0].vaddr
    with suppress(OSError), Path(f"/proc/{process.pid}/mem").open("rb") as memory:
        return os.pread(memory.fileno(), len(breakpoint_code), address) == breakpoint_code
    return False
