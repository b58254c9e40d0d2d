"""Probes by executable: put in when the first process that runs it is watched, out some time after the last; or in
windows only, which :mod:`schedtrace.windows` opens.

One executable is probed once, whatever number of processes runs it: with probes for each, every hit would count for
all. Or each of the processes gets probes of its own, confined to its memory, if the others are not to pay.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import monotonic

from schedtrace import target
from schedtrace.binaries import GoBinary
from schedtrace.governor import Level
from schedtrace.plan import ProbePlan
from schedtrace.procfs import Process
from schedtrace.session import Attachment, Session, Window
from schedtrace.uprobe_pmu import ANY_PROCESS

# What the kernel puts in place of the probed instruction: int3, and brk with its own number (BRK64_OPCODE_UPROBES).
_BREAKPOINTS = {"x86_64": b"\xcc", "aarch64": (0xD42000A0).to_bytes(4, "little")}
_IDLE_SECONDS = 30.0
"""How long the probes of an executable stay after its last process: a crashing container comes back."""


@dataclass(eq=False)
class Probed:
    """Probes in the kernel, and the processes that count through them. ``attachment``: None if they are put in for
    windows only. ``plans``: by level, those that may be; ``plan``: the one that is in, or was last."""

    binary: GoBinary
    plans: Mapping[Level, ProbePlan]
    plan: ProbePlan
    attachment: Attachment | None
    only: tuple[int, int] | None
    """PID and start time of the one process they are confined to."""
    pids: set[int] = field(default_factory=set)
    window: Window | None = None
    idle_since: float = field(default_factory=monotonic)

    @property
    def level(self) -> Level:
        """Of :attr:`plan`."""
        return next(level for level, plan in self.plans.items() if plan is self.plan)

    def leave(self, pid: int) -> None:
        """A process counts through them no longer."""
        self.pids.discard(pid)
        self.idle_since = monotonic()


class Attachments:
    """All probes of a session. ``confined``: each process has its own; ``always``: the level whose probes are put in at
    once, where it is possible, and not in windows."""

    def __init__(self, session: Session, *, confined: bool, always: Level | None) -> None:
        self._session, self._confined, self._always = session, confined, always
        self._probed: dict[tuple[int, ...], list[Probed]] = {}
        """By :attr:`GoBinary.key_without_device`; confined probes by PID and start time."""

    def probe(self, process: Process, binary: GoBinary, plan: ProbePlan, executable_fd: int) -> Probed:
        """The probes on the process's executable: those that are there, or new ones. Raises AttachFailed."""
        only = (process.pid, process.start_time_ticks) if self._confined else None
        key = only or binary.key_without_device
        for probed in self._probed.get(key, ()):
            inside = probed.attachment or probed.window
            if probed.binary.key == binary.key or (not only and inside and has_breakpoint(process, probed.plan)):
                return probed
        plans: dict[Level, ProbePlan] = {"full": plan}
        if plan.sampled:
            plans["sampled"] = plan.at_sampled_level()
        attachment = None
        if self._always in plans:
            plan = plans[self._always]
            attachment = self._session.attach(
                executable_fd, target.sites_of(plan), process.pid if only else ANY_PROCESS
            )
        probed = Probed(binary, plans, plan, attachment, only)
        self._probed.setdefault(key, []).append(probed)
        return probed

    def all(self) -> Iterator[Probed]:
        """All there are."""
        return chain.from_iterable(self._probed.values())

    def alike(self, probed: Probed) -> Sequence[Probed]:
        """Others whose file may be the same to the kernel, so that only one of them may have probes at a time."""
        return [] if probed.only else [one for one in self._probed[probed.binary.key[1:]] if one is not probed]

    def merge(self, probed: Probed, other: Probed) -> None:
        """Their file has turned out to be the same: all processes are the first one's from now on."""
        self._probed[probed.binary.key[1:]].remove(other)
        probed.pids |= other.pids
        other.pids = set()

    def remove_idle(self) -> None:
        """Take out the probes that no process has counted through for a while; at once if they were one process's."""
        now = monotonic()
        idle = [
            probed
            for alike in self._probed.values()
            for probed in alike
            if not (probed.pids or probed.window) and (probed.only or now - probed.idle_since > _IDLE_SECONDS)
        ]
        if idle:
            gone = set(idle)
            left = {key: [one for one in alike if one not in gone] for key, alike in self._probed.items()}
            self._probed = {key: alike for key, alike in left.items() if alike}
            self._session.detach([probed.attachment for probed in idle if probed.attachment])


def has_breakpoint(process: Process, plan: ProbePlan) -> bool:
    """Is there a breakpoint at the plan's first probe in this process's memory? Then its executable is the inode that
    is probed already, whatever stat(2) says of it."""
    breakpoint_code = _BREAKPOINTS[platform.machine()]
    address = process.load_bias() + plan.probes[0].vaddr
    with suppress(OSError), Path(f"/proc/{process.pid}/mem").open("rb") as memory:
        return os.pread(memory.fileno(), len(breakpoint_code), address) == breakpoint_code
    return False
