"""One process under watch: find, resolve, plan, load, read and join, wired together for ``schedtrace attach``.

:class:`Watch` has a BPF session of its own, a :class:`Watched` is in one that others may share. They hold everything
that belongs to the target: the pidfd, and an open descriptor of the file with its Go runtime (so that a deleted or
replaced file, or another mount namespace, makes no difference).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Self

from schedtrace import cgroups, join, target
from schedtrace.bpf_text import RECORD
from schedtrace.calibrate import Calibration
from schedtrace.compilation import Compilation
from schedtrace.errors import AttachFailed, NodeUnsupported, NotTraceable, PermissionDenied
from schedtrace.image import Image, open_image
from schedtrace.node import prepare_node
from schedtrace.plan import FunctionNames, ProbePlan, make_plan
from schedtrace.procfs import ExecutableIdentity, Process, open_process, running_pids
from schedtrace.session import Session, Snapshot
from schedtrace.thread_watch import ThreadSnapshot
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL, ProbeHits, Target, Throttling, Window

_EXEC_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Look:
    """What the maps held of a target."""

    snapshot: Snapshot
    threads: ThreadSnapshot


class Watched:
    """A target from the first look at it until its probes are out. Close it, or use it in ``with``."""

    def __init__(self, pid: int, *, level: str = FULL_LEVEL, syscalls: bool = False, stops: bool = False) -> None:
        """Look at process ``pid``: all but loading anything. ``level``: FULL_LEVEL or SAMPLED_LEVEL. ``stops``: whether
        also to see stops of the world, for a recording.

        Raises the SchedtraceError that says why it can't be watched.
        """
        with ExitStack() as stack:
            self.process = stack.enter_context(open_process(pid))
            prepare_node()
            self._image = open_image(self.process, syscalls=syscalls, stops=stops)
            stack.callback(os.close, self._image.descriptor)
            plan = self._image.plan
            self.plan = plan.at_sampled_level() if level == SAMPLED_LEVEL else plan.with_stops() if stops else plan
            self._level = level
            self._names = FunctionNames(self._image.path)
            stack.callback(self._names.close)
            self._bias = self._image.load_bias
            self.unseen = (*self.plan.unseen, *_threads_unseen(plan))
            """What can't be seen of it, in words."""
            self._cgroups = _cgroups_of(self.process)
            self.calibration: Calibration | None = None
            """Of the session, if there is one, once it has been made."""
            self._bill = target.Bill()
            self._stack = stack.pop_all()

    @property
    def instructions(self) -> set[bool]:
        """Whether its probes are on instructions that the kernel emulates, or on others, or both."""
        return {probe.emulated for probe in self.plan.probes}

    def attach(self, session: Session) -> None:
        """Begin to count, in a session that has the plan's programs. Raises SchedtraceError."""
        self._session = session
        self._attach(self._image)

    def _attach(self, image: Image) -> None:
        # Who else maps a shared object is not looked for.
        shared = image.shared_object or _others_run(self.process.identity, self.process.pid)
        try:
            self._session.attach(image.descriptor, target.sites_of(self.plan), self.process.pid if shared else -1)
        except AttachFailed:
            self._refuse_another_program()  # the kernel says only that there is no such process
            raise
        record = target.record_of(self.plan, self._bias)
        self._throttled_before = self._cgroups.cpu_stat()
        process = target.process_of(self.process, self.plan, self._bias, by_function=True)
        self.goroutines_known = bool(process.allm)
        """Can it be told which goroutine a thread runs?"""
        process.is_recorded, process.event_slot = self._session.records, self._session.next_slot
        # First the threads: of what a goroutine waited for is known what its thread has done since then.
        self._session.threads.watch(self.process.pid, process)
        self._session.watch(self.process.pid, record, sampler=target.sampler_of(self.plan, self._bias))
        self.slot = record.slot
        self.started_ns = record.attached_ns
        # From here on the session itself notices when the process executes another program.
        self._refuse_another_program()

    def _refuse_another_program(self) -> None:
        if not self.process.still_same():
            raise NotTraceable(
                f"process {self.process.pid} ({self.process.name}) exited or executed another program "
                "while it was being attached to"
            )

    def ended(self, timeout_seconds: float) -> str:
        """Wait at most so long for the target to end; why it has, or nothing."""
        deadline = monotonic() + timeout_seconds
        while True:
            left = max(deadline - monotonic(), 0)
            if self.process.wait(min(left, _EXEC_LOOK_SECONDS)):
                return f"the target (PID {self.process.pid}) exited"
            if not self._session.is_watched(self.process.pid):
                return f"the target (PID {self.process.pid}) executed another program"
            self._meanwhile()
            if left <= _EXEC_LOOK_SECONDS:
                return ""

    def _meanwhile(self) -> None:
        """What is done while the target goes on."""

    def stop(self) -> None:
        """Count no longer, so that what is read from now on stands still."""
        self._session.unwatch(self.process.pid)
        self._session.threads.unwatch([self.process.pid])

    def window(self, ended: str = "") -> Window:
        """All that was seen since attach."""
        return self.window_of(self.look(), ended)

    def look(self) -> Look:
        """What has been counted since attach."""
        snapshot = self._session.snapshot(self.process.pid)
        return Look(snapshot, self._session.threads.snapshot(self.process.pid))

    def window_of(self, look: Look, ended: str) -> Window:
        """The window that ended when it was looked."""
        snapshot = look.snapshot
        places = join.standing_out(snapshot.goroutines, snapshot.time_ns)
        again = [] if snapshot.keys is None else self._session.look_again(snapshot.keys[places])
        sampled = self._level == SAMPLED_LEVEL
        counts = join.counts(snapshot, target.reasons_of(self.plan), self.function_name)
        samples = join.samples(snapshot.samples, target.stops_of(self.plan)) if sampled else None
        threads = join.thread_counts(look.threads, self.function_name)
        return Window(
            target=self.about(counts.cgroup_id),
            duration_ns=counts.time_ns - self.started_ns,
            transitions=counts.transitions,
            sched_latency=counts.sched_latency,
            wait=counts.wait,
            states=counts.states,
            functions=counts.functions,
            run_queue=threads.run_queue,
            off_cpu=threads.off_cpu,
            off_cpu_functions=threads.functions,
            threads=self.thread_count(),
            goroutines=counts.goroutines,
            probes=tuple(
                ProbeHits(p.function, p.site, p.emulated, n)
                for p, n in zip(self.plan.probes, counts.hits, strict=False)
            ),
            foreign_hits=counts.foreign_hits,
            unseen=self.unseen,
            lost=join.lost_in_all(counts.lost, threads.lost),
            throttling=self._throttling(),
            overhead_ns=self._overhead_ns(snapshot),
            ended=ended,
            worst=join.living_goroutines(snapshot, places, again, target.reasons_of(self.plan), self.function_name),
            wait_parts=None if sampled else counts.wait_parts,
            samples=samples,
        )

    def _overhead_ns(self, snapshot: Snapshot) -> int | None:
        if self.calibration is None:
            return None
        self._bill.add(self.plan, snapshot.hits, snapshot.timed, target.costs_of(self.calibration, self.plan))
        return round(self._bill.ns)

    def function_name(self, start_pc: int) -> str | None:
        """Name of the function at an address in the process, if any."""
        return self._names.name(start_pc - self._bias)

    def thread_count(self) -> int:
        """Threads it has now; 0 if it has ended."""
        with suppress(NotTraceable):
            threads = self.process.thread_count()
            return threads if self.process.still_same() else 0
        return 0

    def cpu_limit(self) -> cgroups.CpuLimit | None:
        """The quota that holds for it now, if any."""
        return self._cgroups.cpu_limit()

    def about(self, seen_cgroup_id: int = 0) -> Target:
        """Who it is; ``seen_cgroup_id``: the cgroup its threads were in when they hit a probe."""
        main, limit = self._cgroups.main, self.cpu_limit()
        unified = self._cgroups.unified
        # Where cgroup2 is in use, the id that BPF saw at the last event is the join key; a process that is only in v1
        # hierarchies has the id of cgroup2's root there.
        use_seen = bool(seen_cgroup_id and main and unified and main.hierarchy == unified.hierarchy)
        return Target(
            pid=self.process.pid,
            exe=self.process.exe,
            name=self.process.name,
            go_version=self.plan.go_version,
            level=self._level,
            mode=self.plan.mode,
            symbols=self.plan.symbols,
            cgroup_path=main.path if main else "",
            cgroup_hierarchy=main.hierarchy if main else "",
            cgroup_id=seen_cgroup_id if use_seen else (main.id if main else 0),
            quota_cores=limit.cores if limit else None,
        )

    def _throttling(self) -> Throttling | None:
        before, now = self._throttled_before, self._cgroups.cpu_stat()
        if before is None or now is None:
            return None
        grown = now - before
        return Throttling(grown.periods, grown.throttled_periods, grown.throttled_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what belongs to the target. May be called twice."""
        self._stack.close()


class Watch(Watched):
    """A target from attach to detach, with a session of its own."""

    def __init__(
        self,
        pid: int,
        compilation: Compilation | None = None,
        *,
        level: str = FULL_LEVEL,
        syscalls: bool = False,
    ) -> None:
        """Attach to process ``pid``. ``compilation``: one that has begun already, if any; it is closed with the watch.
        ``level``: as for :class:`Watched`.

        Raises the SchedtraceError that says why it can't be done.
        """
        with ExitStack() as stack:
            programs = {RECORD} if level == SAMPLED_LEVEL else set()
            compilation = stack.enter_context(compilation or Compilation(programs=programs))
            super().__init__(pid, level=level, syscalls=syscalls)
            stack.callback(super().close)
            with explained_by_check():
                session = stack.enter_context(Session(compilation, target.programs_of(self.plan)))
                self.attach(session)
            self.calibration = target.calibration(session, [self.plan.mode], self.instructions)
            self._all = stack.pop_all()

    def _meanwhile(self) -> None:
        if self.calibration:
            self.calibration.measure()

    def close(self) -> None:
        """Take the probes out, too. May be called twice."""
        self._all.close()


def plan_of(target: str, *, syscalls: bool) -> ProbePlan:
    """The plan for a PID (digits) or a file. Raises what :func:`open_process` and :func:`make_plan` raise."""
    if not target.isdigit():
        return make_plan(target, syscalls=syscalls)
    with open_process(int(target)) as process:
        image = open_image(process, syscalls=syscalls)
        os.close(image.descriptor)
        return image.plan


@contextmanager
def explained_by_check() -> Iterator[None]:
    """If loading or attaching fails and `schedtrace check` finds what is missing, say that: BCC names no capability."""
    try:
        yield
    except (NodeUnsupported, AttachFailed):
        from schedtrace.check import check_node  # much to import, and seldom needed

        report = check_node()
        kind = PermissionDenied if report.exit_code == PermissionDenied.exit_code else NodeUnsupported
        for finding in report.findings:
            if finding.status == "missing" and finding.by_permission == (kind is PermissionDenied):
                raise kind(f"{finding.name}: {finding.detail}; {finding.fix}") from None
        raise


def _threads_unseen(plan: ProbePlan) -> tuple[str, ...]:
    """What isn't seen if it can't be found where the target's runtime keeps its list of threads."""
    if isinstance(plan.runtime, str):
        reason = f"{plan.path}: {plan.runtime}"
    else:
        reason = plan.runtime.goroutines_of_threads_unseen
    return (f"goroutines that run while their thread is off the CPU: {reason}",) if reason else ()


def _cgroups_of(process: Process) -> cgroups.Membership:
    try:
        return cgroups.read_membership(process.pid, cgroups.read_mounts())
    except (FileNotFoundError, ProcessLookupError):
        raise NotTraceable(f"process {process.pid} ({process.name}) has exited") from None


def _others_run(identity: ExecutableIdentity, pid: int) -> bool:
    """Does another process run the same executable? Then the breakpoints are confined to the target's memory. That
    costs the target 20-30 % more a hit, and the others nothing."""
    for other in running_pids():
        if other != pid:
            with suppress(OSError):
                status = Path(f"/proc/{other}/exe").stat()
                if (status.st_dev, status.st_ino) == (identity.device, identity.inode):
                    return True
    return False
