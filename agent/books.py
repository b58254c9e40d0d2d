"""What watched processes have done, as series, and what watching has cost them.

Not for use by several threads at once: :class:`schedtrace.fleet.Fleet` has a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from time import monotonic

from schedtrace import target
from schedtrace.accounts import Accounts
from schedtrace.attachments import Probed
from schedtrace.calibrate import Calibration
from schedtrace.cgroups import Membership, read_cpu_stat, read_quota_cores
from schedtrace.errors import SchedtraceError
from schedtrace.governor import Governor
from schedtrace.passive_level import PassiveLevel
from schedtrace.procfs import Process
from schedtrace.runtime_state import RuntimeTotals
from schedtrace.series import NOTHING, Labels, Series, SeriesTotals, WatchedProcess
from schedtrace.session import Session, Snapshot
from schedtrace.target import Bill
from schedtrace.thread_watch import ThreadSnapshot
from schedtrace.totals import probe_totals, thread_totals
from schedtrace.window import PASSIVE_LEVEL

_MOST_FOR_GOROUTINES, _LEAST_FOR_GOROUTINES = 0.4, 0.3
"""Of a target's budget: if to look for goroutines at switches would take more, that is left out until it would take
less."""
_QUOTAS_SECONDS = 60.0
"""How often to read CPU limits, which hardly ever change."""


@dataclass(eq=False)
class Watched:
    """A process that is counted. ``labels`` is None until its pod's name is known."""

    process: Process
    probed: Probed
    cgroup_text: bytes
    membership: Membership
    labels: Labels | None
    bill: Bill = field(default_factory=Bill)
    """For what it is counted now."""
    switches: int = 0
    switches_ns: float = 0.0
    """Switches of its threads, and what it has cost to count them."""
    looked_at: bool = True
    """It is looked which goroutine a thread runs that is switched out."""
    not_looked_at: int = 0
    """Switches at which that was too dear."""
    decided_at: tuple[int, int] | None = None
    """CPU time it had used and switches there had been when that was decided."""
    paid: SeriesTotals = NOTHING
    """What it did in windows that have ended, which is in its account."""
    seen: tuple[ThreadSnapshot, RuntimeTotals | None, SeriesTotals] | None = None
    """What was last counted without windows, and what that comes to."""


class Books:
    """Of the processes of one session. What they have paid in when they ended is in ``accounts``."""

    def __init__(
        self,
        session: Session,
        accounts: Accounts,
        passive: PassiveLevel,
        calibration: Calibration | None,
        governor: Governor | None,
    ) -> None:
        self._session, self._accounts, self._passive = session, accounts, passive
        self._calibration, self._governor = calibration, governor
        self._quota_of, self._read_quotas_at = cache(read_quota_cores), 0.0

    def totals(self, watched: Watched, threads: ThreadSnapshot, snapshot: Snapshot | None) -> SeriesTotals:
        """All that a process did that isn't in its account yet. ``snapshot``: None outside of windows."""
        own = self._without_windows(watched, threads)
        return own + self.counted(watched, snapshot) if snapshot else own

    def _without_windows(self, watched: Watched, threads: ThreadSnapshot) -> SeriesTotals:
        """The same object as last time where nothing has been counted since: most processes are idle at most times."""
        runtime, seen = self._passive.totals(watched.process.pid), watched.seen
        if seen is None or seen[0] is not threads or seen[1] is not runtime:
            seen = watched.seen = threads, runtime, replace(self._of_threads(watched, threads), runtime=runtime)
        return seen[2]

    def counted(self, watched: Watched, snapshot: Snapshot) -> SeriesTotals:
        """What it did in the window that it is in, or was in last."""
        probed = watched.probed
        costs = target.costs_of(self._calibration, probed.plan)
        watched.bill.add(probed.plan, snapshot.hits, snapshot.timed, costs)
        return probe_totals(snapshot, probed.plan, probed.level, watched.bill)

    def charge_switches(self, processes: Collection[Watched]) -> None:
        """What counts a target's threads costs it also between windows, and comes out of the same budget. To be called
        every few seconds: where it would take too much of the budget to look for goroutines, that is left out."""
        threads = self._session.threads.snapshots()
        for watched in processes:
            self._charge_switches(watched, threads[watched.process.pid])
            if self._governor:
                with suppress(SchedtraceError):  # its end will be seen
                    self._decide(watched, watched.process.cpu_ns(), self._governor.policy.fraction)

    def _decide(self, watched: Watched, cpu_ns: int, fraction: float) -> None:
        cpu_before_ns, switches_before = watched.decided_at or (cpu_ns, watched.switches)
        watched.decided_at = cpu_ns, watched.switches
        if cpu_ns <= cpu_before_ns:
            return
        cost_ns = (watched.switches - switches_before) * self._switch_ns(watched, looked_at=True)
        limit = _MOST_FOR_GOROUTINES if watched.looked_at else _LEAST_FOR_GOROUTINES
        if (cost_ns <= limit * fraction * (cpu_ns - cpu_before_ns)) != watched.looked_at:
            watched.looked_at = not watched.looked_at
            self._session.threads.look_for_goroutines(watched.process.pid, wanted=watched.looked_at)

    def _switch_ns(self, watched: Watched, *, looked_at: bool) -> float:
        hit_ns = target.costs_of(self._calibration, watched.probed.plan).hit_ns[True]
        return target.SWITCH_PARTS[looked_at] * hit_ns

    def _charge_switches(self, watched: Watched, threads: ThreadSnapshot) -> None:
        switches = threads.switches - watched.switches
        ns = switches * self._switch_ns(watched, looked_at=watched.looked_at)
        watched.switches, watched.switches_ns = threads.switches, watched.switches_ns + ns
        if not watched.looked_at:
            watched.not_looked_at += switches
        if self._governor:
            self._governor.spend(watched.process.pid, ns)

    def _of_threads(self, watched: Watched, threads: ThreadSnapshot) -> SeriesTotals:
        self._charge_switches(watched, threads)
        totals = thread_totals(threads, watched.switches_ns)
        if watched.not_looked_at:
            totals += SeriesTotals(lost={"goroutine_of_thread_too_dear": watched.not_looked_at})
        return totals

    def series(self, processes: Collection[Watched]) -> tuple[Series, ...]:
        """Of all labels that there are, for a scrape."""
        snapshots, threads = self._snapshots(processes), self._session.threads.snapshots()
        living: dict[Labels, list[Watched]] = {}
        for watched in processes:
            if watched.labels:
                living.setdefault(watched.labels, []).append(watched)
        if monotonic() >= self._read_quotas_at:
            self._quota_of = cache(read_quota_cores)
            self._read_quotas_at = monotonic() + _QUOTAS_SECONDS
        series = []
        for labels, account in self._accounts.for_scrape(living.keys()):
            own, totals = living.get(labels, []), account.totals
            for watched in own:
                pid = watched.process.pid
                totals = totals + self.totals(watched, threads[pid], snapshots.get(pid))
            states = (self._passive.state(watched.process.pid) for watched in own)
            limits = [limit.cores for w in own if (limit := w.membership.cpu_limit(self._quota_of))]
            series.append(
                Series(
                    labels=labels,
                    totals=totals,
                    infos=tuple(sorted(account.infos)),
                    threads=_sum_of(own, lambda process: process.thread_count()),
                    open_fds=_sum_of(own, lambda process: process.open_fd_count()),
                    quota_cores=min(limits, default=None),
                    throttled_ns=account.refresh_throttling(_throttled_ns),
                    runtimes=tuple(state for state in states if state),
                )
            )
        return tuple(series)

    def processes(self, processes: Collection[Watched]) -> tuple[WatchedProcess, ...]:
        """What is done with each process, by PID."""
        snapshots, threads = self._snapshots(processes), self._session.threads.snapshots()
        found = []
        for watched in sorted(processes, key=lambda each: each.process.pid):
            pid = watched.process.pid
            totals, level = watched.paid + self._of_threads(watched, threads[pid]), PASSIVE_LEVEL
            if pid in snapshots:
                totals, level = totals + self.counted(watched, snapshots[pid]), watched.probed.level
            budget_ns = self._governor.tokens_ns(pid) if self._governor else None
            found.append(WatchedProcess(pid, watched.process.name, level, totals, budget_ns))
        return tuple(found)

    def _snapshots(self, processes: Collection[Watched]) -> dict[int, Snapshot]:
        return self._session.snapshots(watched.process.pid for watched in processes)


def _throttled_ns(directory: str) -> int | None:
    stat = read_cpu_stat(directory)
    return stat.throttled_ns if stat else None


def _sum_of(watched: Sequence[Watched], count: Callable[[Process], int]) -> int:
    """Add up over processes, without those that have gone meanwhile."""
    total = 0
    for one in watched:
        with suppress(SchedtraceError):
            total += count(one.process)
    return total
