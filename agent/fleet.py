"""All Go processes of a node under watch: births and deaths, probes per executable, totals per series.

Births come from sched_process_exec through BPF, and from a look through /proc now and then, in case an event was lost
or a process never executes (a fork). Deaths come from pidfds. Everything runs in one thread, :meth:`Fleet.run`, but for
:meth:`Fleet.view`, which scrapes call.

If only some processes are selected, each of those gets probes of its own, so that the others don't pay. With a limit on
what watching may cost, processes are only counted in windows (:mod:`schedtrace.windows`), and known in between.
"""

from __future__ import annotations

import os
import select
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic

from schedtrace import target
from schedtrace.accounts import Accounts, Owner
from schedtrace.attachments import Attachments
from schedtrace.binaries import Binaries, GoBinary, file_key
from schedtrace.books import Books, Watched
from schedtrace.cgroups import Membership, container_of, read_at_once, read_membership, read_mounts
from schedtrace.errors import AttachFailed, NotTraceable, PermissionDenied, SchedtraceError
from schedtrace.governor import Governor, Level
from schedtrace.logs import EventLog
from schedtrace.malloc import give_back_memory
from schedtrace.passive_level import PassiveLevel
from schedtrace.plan import ProbePlan
from schedtrace.pods import PodIndex
from schedtrace.procfs import Process, open_process, read_stat, running_pids
from schedtrace.selection import Selection
from schedtrace.series import Labels, NodeView, SeriesTotals, TargetInfo, WatchedProcess
from schedtrace.session import Session
from schedtrace.window import FULL_LEVEL, PASSIVE_LEVEL, SAMPLED_LEVEL, WINDOWS_LEVEL
from schedtrace.windows import Windows

_LEVELS: Mapping[str, Sequence[Level]] = {
    PASSIVE_LEVEL: (),
    SAMPLED_LEVEL: ("sampled",),
    FULL_LEVEL: ("sampled", "full"),
}
"""What may be done with probes, by the most that may be done; the most last."""
OTHER_PROCESSES = "(other)"
"""What processes go by whose container has too many names already."""
_SCAN_SECONDS = 30.0
_SCANS_OF_ALL = 10
"""So seldom those that are watched are looked at, too: they are known from events."""
_TICK_SECONDS = 1.0
_MOVES_SECONDS = 5.0
"""How often to look whether processes are in another cgroup: that reads a file of each."""
_SWITCHES_SECONDS = 15.0
"""How often to look how much the threads have switched: that reads a map's entry of each process."""
_NAMES_SECONDS = 0.2
"""How often to look for pods' names while some are missing: a process that isn't watched before may live for less."""
_PATIENCE_SECONDS = 60.0
"""How long a container may go without the link that names its pod, before it goes by its id."""
_MOST_BYTES = 1 << 16
_AHEAD = 128
"""Of so many processes in the queue the executables are read ahead."""


class Fleet:
    """Watches what ``selection`` names, through ``session``, which must have been made with all programs, process
    events and room for one more target than there will be (the cost of a hit is measured with it)."""

    def __init__(
        self,
        session: Session,
        pods: PodIndex,
        selection: Selection,
        events: EventLog,
        binaries: Binaries,
        governor: Governor | None = None,
        level: str = FULL_LEVEL,
    ) -> None:
        """``level``: the most that may be done. ``governor``: with one, processes are watched in windows."""
        self._session, self._pods, self._selection, self._events = session, pods, selection, events
        self._lock = threading.Lock()
        self._mounts = read_mounts()
        self._binaries = binaries
        self._level = WINDOWS_LEVEL if governor else level
        levels = _LEVELS[level]
        always = levels[-1] if levels and not governor else None
        self._attachments = Attachments(session, confined=not selection.everything, always=always)
        self._accounts = Accounts()
        self._passive = PassiveLevel(lambda pid, reason: events.info("passive", reason, pid=pid))
        self._calibration = target.calibration(session, ("casgstatus", "record"), (True, False))
        self._most = session.room
        self._watched: dict[int, Watched] = {}
        self._governor, self._windows = governor, None
        if governor:
            on_failure = partial(self._fail, "attach_failed")
            self._windows = Windows(
                session, self._attachments, governor, self._calibration, self._watched, levels, on_failure
            )
        self._books = Books(session, self._accounts, self._passive, self._calibration, governor)
        self._unnamed: dict[int, float] = {}  # PID -> when to give up waiting for its pod's name
        self._lost = Counter[str]()
        self._lost_before = self._scans = 0
        self._failures = Counter[str]()
        self._executed: deque[int] = deque()
        self._poll = select.epoll()
        for descriptor in session.executed(self._executed.append, self._events_lost):
            self._poll.register(descriptor, select.EPOLLIN)
        self._exits: dict[int, int] = {}  # pidfd -> PID
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.EPOLLIN)
        self.ready = threading.Event()

    def _events_lost(self, count: int) -> None:
        self._lost["process_events"] += count

    def wake(self) -> None:
        """Have :meth:`run` look at its ``stop`` now, and not within a second. For signal handlers."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set. Sets :attr:`ready` once what ran at the start is watched."""
        next_scan = next_tick = next_names = next_moves = next_switches = 0.0
        while not stop.is_set():
            if scanned := monotonic() >= next_scan:
                self._executed.extend(self._to_look_at())
                next_scan = monotonic() + _SCAN_SECONDS
            self._consider_executed(stop)
            if scanned:
                give_back_memory()  # to read many executables takes 5 MB
            self.ready.set()
            ready = self._poll.poll(_NAMES_SECONDS if self._unnamed else _TICK_SECONDS)
            self._bury([self._exits[descriptor] for descriptor, _ in ready if descriptor in self._exits])
            self._session.poll()
            if monotonic() >= next_names:
                self._retry_names()
                next_names = monotonic() + _NAMES_SECONDS
            if monotonic() >= next_moves:
                self._follow_moves()
                next_moves = monotonic() + _MOVES_SECONDS
            if self._governor and monotonic() >= next_switches:
                with self._lock:
                    self._books.charge_switches(self._watched.values())
                next_switches = monotonic() + _SWITCHES_SECONDS
            if monotonic() >= next_tick:
                self._govern()
                self._attachments.remove_idle()
                self._binaries.tick()
                self._events.tick()
                next_tick = monotonic() + _TICK_SECONDS

    # Births

    def _to_look_at(self) -> list[int]:
        """All processes; without those that are watched at most times, unless an event was lost that told what they
        execute now."""
        lost, self._lost_before = self._lost["process_events"] - self._lost_before, self._lost["process_events"]
        self._scans += 1
        everything = lost or self._scans % _SCANS_OF_ALL == 0
        return [pid for pid in running_pids() if everything or pid not in self._watched]

    def _consider_executed(self, stop: threading.Event) -> None:
        ahead = 0
        while self._executed and not stop.is_set():
            if not ahead and len(self._executed) > 1:
                reading = self._binaries.look_ahead(islice(self._executed, _AHEAD))
                ahead = _AHEAD // 8 if reading else _AHEAD
            ahead = max(ahead - 1, 0)
            self._consider(self._executed.popleft())

    def _consider(self, pid: int, *, name_until: float | None = None) -> None:
        """A process has executed a program, or has been found: watch it if it is Go and selected. ``name_until``: when
        to give up waiting for the name that decides whether it is, if that has begun already."""
        try:
            status = Path(f"/proc/{pid}/exe").stat()
            if self._binaries.known_not_go(file_key(status)):
                self._bury([pid])
                return
            if self._is_known(pid):
                return  # seen by the look through /proc
            self._bury([pid])
            self._take_up(pid, name_until or monotonic() + _PATIENCE_SECONDS)
        except (FileNotFoundError, ProcessLookupError):
            self._gone(pid)
        except PermissionError:
            self._fail("permission", pid, f"the kernel doesn't let us look into process {pid}, CAP_SYS_PTRACE or not")
        except SchedtraceError as error:
            self._fail(_reason_of(error), pid, str(error))
        except OSError as error:  # whatever a file system says that a container has mounted
            self._fail("attach_failed", pid, f"process {pid} can't be looked into: {error}")

    def _is_known(self, pid: int) -> bool:
        """Does it still run the program that it ran when it was found?"""
        watched = self._watched.get(pid)
        if watched is None:
            return False
        return self._session.is_watched(pid) if self._session.counts(pid) else watched.process.still_same()

    def _gone(self, pid: int) -> None:
        """There is no executable to look at: a kernel thread, or a process that has ended. If it has ended before it
        was ever looked at, nobody knows whether it was Go: that is said."""
        if pid not in self._watched:
            try:
                ended = read_stat(pid).state in "ZX"
            except OSError:
                ended = True
            self._lost["process_ended_unseen"] += ended
        self._bury([pid])

    def _take_up(self, pid: int, name_until: float) -> None:
        process = open_process(pid)
        keep = False
        try:
            executable_fd = process.open_executable()
            try:
                binary = self._binaries.look(executable_fd)
                if binary is None:
                    return
                if binary.plan is None:
                    self._fail("unsupported_binary", pid, f"{process.exe} (PID {pid}): {binary.refusal}")
                    return
                keep = self._watch(process, binary, binary.plan, executable_fd, name_until)
            finally:
                os.close(executable_fd)
        finally:
            if not keep:
                process.close()

    def _watch(
        self, process: Process, binary: GoBinary, plan: ProbePlan, executable_fd: int, name_until: float
    ) -> bool:
        cgroup_text = _cgroup_text(process.pid)
        membership = read_membership(process.pid, self._mounts)
        if membership.main and not membership.main.levels and process.still_same():
            self._events.warning(
                "cgroup",
                f"cgroup {membership.main.path!r} shows nowhere below /sys/fs/cgroup, so its CPU limit and throttling "
                "aren't known: mount the node's /sys/fs/cgroup there",
                pid=process.pid,
            )
        labels = self._labels(process, membership, patient=monotonic() < name_until)
        if not self._selection.everything:
            if labels is None:
                self._unnamed[process.pid] = name_until
                return False
            if labels not in self._selection:
                return False
        if len(self._watched) >= self._most:
            raise AttachFailed(f"no room for process {process.pid} ({process.name}): see --max-targets")
        probed = self._attachments.probe(process, binary, plan, executable_fd)
        bias = process.load_bias()  # raises if it executes another program meanwhile
        threads = target.process_of(process, plan, bias, by_function=False)
        record = target.record_of(probed.plan, bias)
        with self._lock:
            self._session.threads.watch(process.pid, threads)
            probed.pids.add(process.pid)
            self._watched[process.pid] = watched = Watched(process, probed, cgroup_text, membership, None)
            self._exits[process.pidfd.fileno()] = process.pid
            self._poll.register(process.pidfd.fileno(), select.EPOLLIN)
            if self._windows:
                self._windows.add(watched)
            elif probed.attachment:
                sampler = target.sampler_of(probed.plan, bias)
                self._session.watch(process.pid, record, sampler=sampler, time_before=False)
            self._name(watched, labels)
        self._read_passively(process, plan, bias)
        self._events.info("watching", "watching a Go process", pid=process.pid, exe=process.exe, go=plan.go_version)
        return True

    def _read_passively(self, process: Process, plan: ProbePlan, load_bias: int) -> None:
        """Besides, read what the runtime counts itself, where that can be found."""
        try:
            if isinstance(plan.runtime, str):
                raise NotTraceable(plan.runtime)
            self._passive.watch(process, plan.runtime, load_bias)
        except SchedtraceError as error:
            self._events.info("passive", f"what its runtime counts isn't read: {error}", pid=process.pid)

    def _labels(self, process: Process, membership: Membership, *, patient: bool = True) -> Labels | None:
        """Whose a process is; None if its pod's name may still come and one is patient."""
        owner = self._pods.owner_of_process(membership, fresh=not patient)
        if owner.problem:
            self._events.warning("pod_name", owner.problem, pid=process.pid)
        if owner.pending and patient:
            return None
        labels = Labels(owner.namespace, owner.pod, owner.container, process.name)
        if self._accounts.has_room_for(labels):
            return labels
        return replace(labels, process=OTHER_PROCESSES)

    def _name(self, watched: Watched, labels: Labels | None) -> None:
        if labels is None:
            self._unnamed.setdefault(watched.process.pid, monotonic() + _PATIENCE_SECONDS)
            return
        watched.labels = labels
        self._unnamed.pop(watched.process.pid, None)
        level = self._level if self._windows or watched.probed.attachment else PASSIVE_LEVEL
        info = TargetInfo(watched.probed.plan.go_version, level, watched.probed.plan.symbols)
        self._accounts.open(labels, _owner(watched.membership), info)

    def _fail(self, reason: str, pid: int, message: str) -> None:
        self._failures[reason] += 1
        self._events.warning(reason, message, pid=pid)

    # Deaths and what else changes

    def _bury(self, pids: Collection[int]) -> None:
        """Processes have exited, or execute another program: keep what they did, and make room."""
        for pid in pids:
            self._unnamed.pop(pid, None)
        buried = [self._watched[pid] for pid in pids if pid in self._watched]
        if not buried:
            return
        with self._lock:
            counted = [watched.process.pid for watched in buried if self._session.counts(watched.process.pid)]
            snapshots = self._session.retire(counted) if counted else {}
            threads = self._session.threads.retire([watched.process.pid for watched in buried])
            for watched in buried:
                pid = watched.process.pid
                self._pay(watched, self._books.totals(watched, threads[pid], snapshots.get(pid)))
                if self._windows:
                    self._windows.remove(watched.process.pid)
                self._passive.drop(watched.process.pid)
                del self._watched[watched.process.pid]
                watched.probed.leave(watched.process.pid)
                self._poll.unregister(watched.process.pidfd.fileno())
                del self._exits[watched.process.pidfd.fileno()]
                watched.process.close()

    def _pay(self, watched: Watched, totals: SeriesTotals) -> None:
        if watched.labels is None:
            self._name(watched, self._labels(watched.process, watched.membership, patient=False))
        assert watched.labels  # they are there at once if one isn't patient
        self._accounts.pay_in(watched.labels, totals)

    def _govern(self) -> None:
        """Take in what was counted in windows that have ended, and open others."""
        if self._calibration and not self._windows and self._watched:
            self._calibration.measure(seldom=self._level == PASSIVE_LEVEL)  # only switches of threads are charged then
        if self._windows:
            with self._lock:
                for pid, snapshot in self._windows.collect().items():
                    totals = self._books.counted(self._watched[pid], snapshot)
                    self._watched[pid].paid += totals
                    self._pay(self._watched[pid], totals)
                self._windows.open_some()

    def _retry_names(self) -> None:
        for pid, until in list(self._unnamed.items()):
            watched = self._watched.get(pid)
            if watched is None:  # not selected until its name is known
                self._consider(pid, name_until=until)
                continue
            labels = self._labels(watched.process, watched.membership, patient=monotonic() < until)
            with self._lock:
                if labels is not None:
                    self._name(watched, labels)

    def _follow_moves(self) -> None:
        """Processes that were moved to another cgroup count into its labels from now on."""
        for pid, watched in list(self._watched.items()):
            with suppress(OSError):
                if _cgroup_text(pid) != watched.cgroup_text:
                    self._bury([pid])
                    self._executed.append(pid)

    # Scrapes

    def view(self) -> NodeView:
        """What there is to export now. May be called from another thread than :meth:`run`'s, one call at a time."""
        self._passive.read()
        with self._lock:
            series = self._books.series(self._watched.values())
            ends = self._governor.ends.items() if self._governor else ()
            windows = {(str(level), str(end)): n for (level, end), n in ends}
            return NodeView(series, dict(self._failures), dict(self._lost), windows)

    def processes(self) -> tuple[WatchedProcess, ...]:
        """What is done with each process, by PID. May be called from any thread."""
        with self._lock:
            return self._books.processes(self._watched.values())

    def close(self) -> None:
        """Let go of the processes."""
        for watched in self._watched.values():
            watched.process.close()
        self._watched.clear()
        self._passive.close()
        self._poll.close()
        wake, self._wake = self._wake, -1  # a signal may still come
        os.close(wake)


def _reason_of(error: SchedtraceError) -> str:
    """A word of a bounded set for why a process can't be watched."""
    if isinstance(error, PermissionDenied):
        return "permission"
    return "vanished" if isinstance(error, NotTraceable) else "attach_failed"


def _owner(membership: Membership) -> Owner:
    """The cgroup directories that stand for a process's container and for its pod. A container's parent is its pod's;
    outside of containers the cgroup itself stands for both, and the root cgroup, which always exists, for none."""
    main = membership.main
    if main is None or not main.levels or main.path == "/":
        return Owner("", "")
    in_pod = bool(container_of(main.path).pod_uid) and len(main.levels) > 1
    return Owner(main.levels[0], main.levels[1] if in_pod else main.levels[0])


def _cgroup_text(pid: int) -> bytes:
    return read_at_once(f"/proc/{pid}/cgroup", _MOST_BYTES)  # of every process, every few seconds
