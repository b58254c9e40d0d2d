"""Windows: for a while the probes of an executable are in and its processes are counted, as the governor decides.

A window opens for all processes of an executable at once, since a breakpoint is in all of them. Its end doesn't wait
for this process: BPF counts nothing after it, and the child that holds the probes takes them out. So it is enough to
look once a second which have ended, to read what they counted, and to charge what they cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from time import clock_gettime_ns, monotonic_ns, thread_time_ns
from typing import Protocol

from schedtrace import target
from schedtrace.attachments import Attachments, Probed, has_breakpoint
from schedtrace.calibrate import Calibration
from schedtrace.errors import AttachFailed, SchedtraceError
from schedtrace.governor import End, Governor, Level, Opening
from schedtrace.procfs import Process, cpu_clock
from schedtrace.session import Session, Snapshot
from schedtrace.target import Bill
from schedtrace.uprobe_pmu import ANY_PROCESS

_TICKS = 5
"""Each group is considered every so many ticks: that reads the CPU time of its processes."""


class Member(Protocol):
    """A process that is counted in windows, and the probes it shares with others of its executable."""

    process: Process
    probed: Probed
    bill: Bill
    """Of the window it is in."""


class Windows:
    """The windows of a session. ``members``: all processes by PID, kept up by the caller; ``on_failure`` is called with
    the PID of a process whose executable can't be probed, and why. For use by one thread at a time."""

    def __init__(
        self,
        session: Session,
        attachments: Attachments,
        governor: Governor,
        calibration: Calibration | None,
        members: Mapping[int, Member],
        levels: Collection[Level],
        on_failure: Callable[[int, str], None],
    ) -> None:
        """``levels``: that windows may have, where they are possible."""
        self._session, self._attachments, self._governor = session, attachments, governor
        self._calibration, self._members, self._on_failure = calibration, members, on_failure
        self._levels = levels
        self._open: list[Probed] = []
        self._ticks = 0
        self._keeper_clock = cpu_clock(session.keeper_pid)
        self._keeper_ns = clock_gettime_ns(self._keeper_clock)
        self._spent_ns = 0

    def add(self, member: Member) -> None:
        """A process has been found: it takes part in windows from now on, also in one that is open."""
        process, probed = member.process, member.probed
        self._governor.add(process.pid, monotonic_ns(), process.cpu_ns())
        if probed.window:
            self._count(member, self._governor.limit_ns(process.pid))

    def remove(self, pid: int) -> None:
        """A process has ended."""
        self._governor.remove(pid)

    def collect(self) -> dict[int, Snapshot]:
        """What processes did in windows that have ended since the last call."""
        began_ns = thread_time_ns()
        if self._open and self._calibration:
            self._calibration.measure()
        over = self._over()
        snapshots = self._session.retire([pid for each in over for pid in self._counted(each)]) if over else {}
        self._spent_ns += thread_time_ns() - began_ns
        keeper_ns = clock_gettime_ns(self._keeper_clock)
        if over:
            opening_ns = (self._spent_ns + keeper_ns - self._keeper_ns) / len(over)
            self._spent_ns, self._keeper_ns = 0, keeper_ns
            for probed in over:
                self._finish(probed, snapshots, opening_ns)
        return snapshots

    def _over(self) -> list[Probed]:
        """Those that have ended, with their probes out."""
        deserted = [each.window for each in self._open if each.window and not self._counted(each)]
        if deserted:
            self._session.end_windows(deserted)
        now_ns = monotonic_ns()
        ended = [each for each in self._open if each.window and self._session.end_of(each.window) <= now_ns]
        probed_windows = self._session.probed_windows() if ended else set()
        return [each for each in ended if each.window and each.window.number not in probed_windows]

    def _counted(self, probed: Probed) -> list[int]:
        return [pid for pid in probed.pids if self._session.counts(pid)]

    def _finish(self, probed: Probed, snapshots: Mapping[int, Snapshot], opening_ns: float) -> None:
        assert probed.window
        pids = [pid for pid in probed.pids if pid in snapshots]
        level, costs = probed.level, target.costs_of(self._calibration, probed.plan)
        for pid in pids:
            bill = self._members[pid].bill
            bill.add(probed.plan, snapshots[pid].hits, snapshots[pid].timed, costs)
            self._governor.charge(pid, level, snapshots[pid].seen_ns, bill.ns)
        end: End = "exit"
        if pids:
            end = "budget" if self._session.end_of(probed.window) < probed.window.until_ns else "complete"
        shares_ns = self._governor.ended(probed, level, end, monotonic_ns(), opening_ns, pids)
        for pid in pids:
            self._members[pid].bill.agent_ns += shares_ns[pid]
        self._session.free_window(probed.window)
        probed.window = None
        self._open.remove(probed)

    def open_some(self) -> None:
        """Open the windows whose turn it is."""
        groups = list(self._attachments.all())
        self._governor.keep_groups(groups)
        now_ns = monotonic_ns()
        waiting: dict[Probed, set[int]] = {}
        self._ticks += 1
        for probed in groups[self._ticks % _TICKS :: _TICKS]:
            for pid in probed.pids:
                with suppress(SchedtraceError):  # its end will be seen
                    self._governor.earn(pid, now_ns, self._members[pid].process.cpu_ns())
            if probed.pids and not probed.window and len(probed.pids) <= self._session.room:
                waiting[probed] = probed.pids
        began_ns = thread_time_ns()
        for opening in self._governor.choose(waiting, self._levels_of, now_ns, len(self._open), len(groups)):
            self._open_window(opening)
        self._spent_ns += thread_time_ns() - began_ns

    def _levels_of(self, probed: Probed) -> list[Level]:
        return [level for level in self._levels if level in probed.plans]

    def _open_window(self, opening: Opening) -> None:
        probed = opening.group
        assert isinstance(probed, Probed)
        alike = self._attachments.alike(probed)
        if not probed.pids or any(other.window for other in alike) or len(probed.pids) > self._session.room:
            return
        first = self._members[min(probed.pids)].process
        try:
            executable_fd = first.open_executable()
        except SchedtraceError:
            return  # its end will be seen
        probed.plan = probed.plans[opening.level]
        try:
            sites, confined_to = target.sites_of(probed.plan), first.pid if probed.only else ANY_PROCESS
            probed.window = self._session.open_window(executable_fd, sites, opening.duration_ns, confined_to)
        except AttachFailed as error:
            self._governor.postpone(probed, monotonic_ns())
            self._on_failure(first.pid, str(error))
            return
        finally:
            os.close(executable_fd)
        self._open.append(probed)
        for pid in probed.pids:
            self._count(self._members[pid], opening.limits_ns.get(pid, 0))
        for other in alike:
            self._merge_if_same(probed, other)

    def _merge_if_same(self, probed: Probed, other: Probed) -> None:
        """On overlayfs each container has a file of its own that may be the same one to the kernel: then its processes
        have the breakpoints, too."""
        with suppress(SchedtraceError):
            if other.pids and has_breakpoint(self._members[min(other.pids)].process, probed.plan):
                pids = set(other.pids)
                self._attachments.merge(probed, other)
                for pid in pids:
                    self._members[pid].probed = probed
                    self._count(self._members[pid], self._governor.limit_ns(pid))

    def _count(self, member: Member, limit_ns: float) -> None:
        """Count a process in its group's window, until its hits have cost it so much. One that has ended or executes
        another program will be seen to."""
        if not self._session.room:
            return
        plan = member.probed.plan
        hit_ns, cold_ns = target.costs_of(self._calibration, plan).hit_ns, member.bill.cold_ns
        hits_limit = max(int(limit_ns / (cold_ns + max(hit_ns[probe.emulated] for probe in plan.probes))), 1)
        member.bill = Bill(cold_ns=cold_ns)
        with suppress(SchedtraceError):
            bias, window = member.process.load_bias(), member.probed.window
            record, sampler = target.record_of(plan, bias), target.sampler_of(plan, bias)
            self._session.watch(member.process.pid, record, window, hits_limit, sampler=sampler, time_before=False)
