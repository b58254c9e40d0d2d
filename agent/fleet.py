"""All Go processes of a node under watch: births and deaths, probes per executable, totals per series.

Births come from sched_process_exec through BPF, and from a look through /proc now and then, in case an event was lost
or a process never executes (a fork). Deaths come from pidfds. Everything runs in one thread, :meth:`Fleet.run`, but for
:meth:`Fleet.view`, which scrapes call.

One executable is probed once, whatever number of processes runs it: with probes for each, every hit would count for
all. If only some processes are selected, each of those gets probes of its own, confined to its memory, so that the
others don't pay.
"""

from __future__ import annotations

import os
import platform
import select
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from schedtrace import join, target
from schedtrace.accounts import Accounts, Owner
from schedtrace.binaries import Binaries, GoBinary, file_key
from schedtrace.cgroups import Membership, container_of, read_cpu_stat, read_membership, read_mounts
from schedtrace.errors import AttachFailed, NotTraceable, PermissionDenied, SchedtraceError
from schedtrace.logs import EventLog
from schedtrace.pods import PodIndex
from schedtrace.procfs import Process, open_process
from schedtrace.selection import Selection
from schedtrace.series import Labels, NodeView, Series, SeriesTotals, TargetInfo
from schedtrace.session import Attachment, Session, Snapshot

LEVEL = "full"
OTHER_PROCESSES = "(other)"
"""What processes go by whose container has too many names already."""
# What the kernel puts in place of the probed instruction: int3, and brk with its own number (BRK64_OPCODE_UPROBES).
_BREAKPOINTS = {"x86_64": b"\xcc", "aarch64": (0xD42000A0).to_bytes(4, "little")}
_SCAN_SECONDS = 30.0
_TICK_SECONDS = 1.0
_NAMES_SECONDS = 0.2
"""How often to look for pods' names while some are missing: a process that isn't watched before may live for less."""
_PATIENCE_SECONDS = 60.0
"""How long a container may go without the link that names its pod, before it goes by its id."""
_IDLE_PROBES_SECONDS = 30.0
"""How long the probes of an executable stay after its last process: a crashing container comes back."""


@dataclass(eq=False)
class _Probed:
    """Probes in the kernel, and the processes that count through them."""

    binary: GoBinary
    attachment: Attachment
    only: tuple[int, int] | None
    """PID and start time of the one process they are confined to."""
    pids: set[int] = field(default_factory=set)
    idle_since: float = 0.0


@dataclass(eq=False)
class _Watched:
    """A process that is counted. ``labels`` is None until its pod's name is known."""

    process: Process
    probed: _Probed
    cgroup_text: bytes
    membership: Membership
    labels: Labels | None


class Fleet:
    """Watches what ``selection`` names, through ``session``, which must have been made with all programs, process
    events and room for one more target than there will be (the cost of a hit is measured with it)."""

    def __init__(self, session: Session, pods: PodIndex, selection: Selection, events: EventLog) -> None:
        self._session, self._pods, self._selection, self._events = session, pods, selection, events
        self._lock = threading.Lock()
        self._mounts = read_mounts()
        self._binaries = Binaries()
        self._accounts = Accounts()
        self._costs = target.measure_costs(session, "casgstatus", (True, False))
        self._watched: dict[int, _Watched] = {}
        self._probed: list[_Probed] = []
        self._unnamed: dict[int, float] = {}  # PID -> when to give up waiting for its pod's name
        self._lost = Counter[str]()
        self._failures = Counter[str]()
        self._executed: deque[int] = deque()
        self._poll = select.epoll()
        for descriptor in session.executed(self._executed.append, self._events_lost):
            self._poll.register(descriptor, select.EPOLLIN)
        self._exits: dict[int, int] = {}  # pidfd -> PID
        self.ready = threading.Event()

    def _events_lost(self, count: int) -> None:
        self._lost["process_events"] += count

    def run(self, stop: threading.Event) -> None:
        """Watch until ``stop`` is set. Sets :attr:`ready` once what ran at the start is watched."""
        next_scan = next_tick = next_names = 0.0
        while not stop.is_set():
            if monotonic() >= next_scan:
                self._executed.extend(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
                next_scan = monotonic() + _SCAN_SECONDS
            while self._executed and not stop.is_set():
                self._consider(self._executed.popleft())
            self.ready.set()
            for descriptor, _ in self._poll.poll(_NAMES_SECONDS if self._unnamed else _TICK_SECONDS):
                if descriptor in self._exits:
                    self._bury(self._exits[descriptor])
            self._session.poll()
            if monotonic() >= next_names:
                self._retry_names()
                next_names = monotonic() + _NAMES_SECONDS
            if monotonic() >= next_tick:
                self._tick()
                next_tick = monotonic() + _TICK_SECONDS

    # Births

    def _consider(self, pid: int, *, name_until: float | None = None) -> None:
        """A process has executed a program, or has been found: watch it if it is Go and selected. ``name_until``: when
        to give up waiting for the name that decides whether it is, if that has begun already."""
        try:
            status = Path(f"/proc/{pid}/exe").stat()
            if self._binaries.known_not_go(file_key(status)):
                self._bury(pid)
                return
            if pid in self._watched and self._session.is_watched(pid):
                return  # seen by the look through /proc
            self._bury(pid)
            self._take_up(pid, name_until or monotonic() + _PATIENCE_SECONDS)
        except (FileNotFoundError, ProcessLookupError):
            self._bury(pid)  # a kernel thread, or gone already
        except PermissionError:
            self._fail("permission", pid, f"the kernel doesn't let us look into process {pid}, CAP_SYS_PTRACE or not")
        except SchedtraceError as error:
            self._fail(_reason_of(error), pid, str(error))

    def _take_up(self, pid: int, name_until: float) -> None:
        process = open_process(pid)
        keep = False
        try:
            executable_fd = process.open_executable()
            try:
                binary = self._binaries.look(executable_fd, f"{process.exe} (PID {pid})")
                if binary is None:
                    return
                if binary.plan is None:
                    self._fail("unsupported_binary", pid, binary.refusal)
                    return
                keep = self._watch(process, binary, executable_fd, name_until)
            finally:
                os.close(executable_fd)
        finally:
            if not keep:
                process.close()

    def _watch(self, process: Process, binary: GoBinary, executable_fd: int, name_until: float) -> bool:
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
        if not self._session.has_room:
            raise AttachFailed(f"no room for process {process.pid} ({process.name}): see --max-targets")
        probed = self._probes_for(process, binary, executable_fd)
        assert binary.plan
        record = target.record_of(binary.plan, process.load_bias())  # raises if it executes another program meanwhile
        with self._lock:
            probed.pids.add(process.pid)
            self._watched[process.pid] = watched = _Watched(process, probed, cgroup_text, membership, None)
            self._exits[process.pidfd.fileno()] = process.pid
            self._poll.register(process.pidfd.fileno(), select.EPOLLIN)
            self._session.watch(process.pid, record)
            self._name(watched, labels)
        self._events.info(
            "watching", "watching a Go process", pid=process.pid, exe=process.exe, go=binary.plan.go_version
        )
        return True

    def _probes_for(self, process: Process, binary: GoBinary, executable_fd: int) -> _Probed:
        """The probes on the process's executable: those that are there, or new ones."""
        assert binary.plan
        only = None if self._selection.everything else (process.pid, process.start_time_ticks)
        for probed in self._probed:
            same_file = probed.binary.key == binary.key or (
                probed.binary.may_be_same_file(binary.key) and _has_breakpoint(process, binary)
            )
            if probed.only == only and same_file:
                return probed
        pid = -1 if only is None else process.pid
        probed = _Probed(binary, self._session.attach(executable_fd, target.sites_of(binary.plan), pid), only)
        self._probed.append(probed)
        return probed

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

    def _name(self, watched: _Watched, labels: Labels | None) -> None:
        if labels is None:
            self._unnamed.setdefault(watched.process.pid, monotonic() + _PATIENCE_SECONDS)
            return
        watched.labels = labels
        self._unnamed.pop(watched.process.pid, None)
        plan = watched.probed.binary.plan
        assert plan
        info = TargetInfo(plan.go_version, LEVEL, plan.symbols)
        self._accounts.open(labels, _owner(watched.membership), info)

    def _fail(self, reason: str, pid: int, message: str) -> None:
        self._failures[reason] += 1
        self._events.warning(reason, message, pid=pid)

    # Deaths and what else changes

    def _tick(self) -> None:
        self._follow_moves()
        self._remove_idle_probes()
        self._events.tick()

    def _bury(self, pid: int) -> None:
        """A process has exited, or executes another program: keep what it did, and make room."""
        watched = self._watched.get(pid)
        if watched is None:
            self._unnamed.pop(pid, None)
            return
        with self._lock:
            self._settle(watched)
            del self._watched[pid]
            self._unnamed.pop(pid, None)
            watched.probed.pids.discard(pid)
            watched.probed.idle_since = monotonic()
            self._poll.unregister(watched.process.pidfd.fileno())
            del self._exits[watched.process.pidfd.fileno()]
            watched.process.close()

    def _settle(self, watched: _Watched) -> None:
        """Pay what a process did into its account."""
        pid = watched.process.pid
        self._session.unwatch(pid)
        totals = self._totals(watched, self._session.snapshot(pid))
        if watched.labels is None:
            self._name(watched, self._labels(watched.process, watched.membership, patient=False))
        assert watched.labels
        self._accounts.pay_in(watched.labels, totals)
        self._session.release(pid)

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
                    self._bury(pid)
                    self._executed.append(pid)

    def _remove_idle_probes(self) -> None:
        idle = [
            probed
            for probed in self._probed
            if not probed.pids
            and (monotonic() - probed.idle_since > _IDLE_PROBES_SECONDS or not self._selection.everything)
        ]
        if idle:
            self._probed = [probed for probed in self._probed if probed not in idle]
            self._session.detach([probed.attachment for probed in idle])

    # Scrapes

    def view(self) -> NodeView:
        """What there is to export now. May be called from another thread than :meth:`run`'s, one call at a time."""
        with self._lock:
            living = self._living_totals()
            series = []
            for labels, account in self._accounts.for_scrape(living.keys()):
                processes = [w for w in self._watched.values() if w.labels == labels]
                totals, throttled_ns = account.totals, account.refresh_throttling(_throttled_ns)
                for more in living.get(labels, ()):
                    totals = totals + more
                limits = [limit.cores for w in processes if (limit := w.membership.cpu_limit())]
                series.append(
                    Series(
                        labels=labels,
                        totals=totals,
                        infos=tuple(sorted(account.infos)),
                        threads=_sum_of(processes, lambda process: len(process.thread_ids())),
                        open_fds=_sum_of(processes, lambda process: process.open_fd_count()),
                        quota_cores=min(limits, default=None),
                        throttled_ns=throttled_ns,
                    )
                )
            return NodeView(tuple(series), dict(self._failures), dict(self._lost))

    def _living_totals(self) -> dict[Labels, list[SeriesTotals]]:
        totals: dict[Labels, list[SeriesTotals]] = {}
        for pid, snapshot in self._session.snapshots().items():
            watched = self._watched.get(pid)
            if watched and watched.labels:
                totals.setdefault(watched.labels, []).append(self._totals(watched, snapshot))
        return totals

    def _totals(self, watched: _Watched, snapshot: Snapshot) -> SeriesTotals:
        plan = watched.probed.binary.plan
        assert plan
        counts = join.counts(snapshot, target.reasons_of(plan), lambda _: None)
        state_ns = Counter[str]()
        for time in counts.states:
            state_ns[time.state] += time.time_ns
        return SeriesTotals(
            transitions=counts.transitions,
            sched_latency=counts.sched_latency,
            wait=counts.wait,
            state_ns=state_ns,
            run_queue=counts.run_queue,
            lost=counts.lost,
            overhead_ns=target.overhead_ns(plan, counts.hits, self._costs) or 0,
        )

    def close(self) -> None:
        """Let go of the processes."""
        for watched in self._watched.values():
            watched.process.close()
        self._watched.clear()


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
    return Path(f"/proc/{pid}/cgroup").read_bytes()


def _throttled_ns(directory: str) -> int | None:
    stat = read_cpu_stat(directory)
    return stat.throttled_ns if stat else None


def _sum_of(watched: Sequence[_Watched], count: Callable[[Process], int]) -> int:
    """Add up over processes, without those that have gone meanwhile."""
    total = 0
    for one in watched:
        with suppress(SchedtraceError):
            total += count(one.process)
    return total


def _has_breakpoint(process: Process, binary: GoBinary) -> bool:
    """Is there a breakpoint at the binary's first probe in this process's memory? Then its executable is the inode that
    is probed already, whatever stat(2) says of it."""
    assert binary.plan
    breakpoint_code = _BREAKPOINTS[platform.machine()]
    address = process.load_bias() + binary.plan.probes[0].vaddr
    with suppress(OSError), Path(f"/proc/{process.pid}/mem").open("rb") as memory:
        return os.pread(memory.fileno(), len(breakpoint_code), address) == breakpoint_code
    return False
