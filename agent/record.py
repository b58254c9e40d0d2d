"""``schedtrace record``: several processes under watch in one session, and what it sends, on its way to a file.

Ctrl-C, SIGTERM, the end of the duration, of all targets and of the room there is all lead to a whole file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from io import FileIO
from time import clock_gettime_ns, monotonic, monotonic_ns, sleep
from typing import TYPE_CHECKING, Any, Self

from schedtrace import target
from schedtrace.attach import Look, Watched, explained_by_check
from schedtrace.compilation import Compilation, Sizes
from schedtrace.condition import Condition
from schedtrace.errors import SchedtraceError
from schedtrace.recorder import Everything, Last, Recorder, Sink
from schedtrace.recording import Writer
from schedtrace.recording_frames import (
    Footer,
    Header,
    KernelCounts,
    RecordedProbe,
    RecordedTarget,
    TargetEnd,
)
from schedtrace.session import Session
from schedtrace.throttle_watch import ThrottleWatch

if TYPE_CHECKING:
    from schedtrace.window import Window

NO_LIMIT = 1 << 62
MAX_GOROUTINES = 1 << 17
BUFFER_PAGES = 1 << 14  # 64 MiB: more than a second of a million transitions a second
_LOOK_SECONDS = 0.02
_TARGETS_LOOK_SECONDS = 0.05
_CLOCK_REALTIME = 0
_QUIET_ATTEMPTS = 10
_DEFAULT_KEPT_SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """What is to be recorded of the processes. 0 seconds of a duration: no end; of ``kept_seconds``: everything, or
    five seconds with a condition; of a pause: as much as is kept."""

    path: str
    duration_seconds: float = 0.0
    most_bytes: int = NO_LIMIT
    kept_seconds: float = 0.0
    when: Condition | None = None
    pause_seconds: float = 0.0
    syscalls: bool = False


@dataclass(frozen=True)
class Recorded:
    """What has been done."""

    ended: str
    events: int
    """In the file."""
    bytes_written: int
    lost: int
    """Events that could not be sent."""
    triggers: int
    windows: tuple[Window, ...]
    """What the kernel counted meanwhile, a window a target."""


@dataclass(frozen=True)
class _End:
    """Of a target: why it is counted no longer, and its threads then. ``time_ns``: when it was seen to have ended by
    itself."""

    why: str
    threads: int
    time_ns: int


class _Output:
    """The file. One that is there is emptied when there is something to write."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._is_new = not os.path.exists(path)  # noqa: PTH110
            if not self._is_new and not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
                raise SchedtraceError(f"{path}: not a file")
            self._file = open(path, "ab", buffering=0)  # noqa: PTH123, SIM115 (closed by close)
        except OSError as error:
            raise SchedtraceError(f"{path}: {error.strerror}") from None
        self._begun = False

    def begin(self) -> FileIO:
        self._file.truncate(0)
        self._begun = True
        return self._file

    def close(self) -> None:
        self._file.close()
        if self._is_new and not self._begun:
            os.unlink(self._path)  # noqa: PTH108


class RecordingSession:
    """Processes that are recorded, from attach to the file's end. Close it, or use it in ``with``."""

    def __init__(self, pids: Sequence[int], compilation: Compilation, options: Options) -> None:
        """Attach, and begin the file. ``compilation``: with room for one more target than ``pids``, and for events; it
        is closed with this. Raises the SchedtraceError that says why it can't be done."""
        self._options = options
        with ExitStack() as stack:
            stack.enter_context(compilation)
            output = _Output(options.path)
            stack.callback(output.close)
            self._targets = [stack.enter_context(Watched(pid, syscalls=options.syscalls, stops=True)) for pid in pids]
            programs = set().union(*(target.programs_of(watched.plan) for watched in self._targets))
            with explained_by_check():
                self._session = stack.enter_context(Session(compilation, programs))
                self._ring = self._session.events()
                # Not measured again: the hits of this process would be events like others.
                calibration = target.calibration(
                    self._session,
                    sorted({watched.plan.mode for watched in self._targets}),
                    set().union(*(watched.instructions for watched in self._targets)),
                )
                self._ring.skip()
                started_ns = monotonic_ns()
                for watched in self._targets:
                    watched.calibration = calibration
                    watched.attach(self._session)
            self._writer = Writer(output.begin(), self._header(started_ns))
            for watched in self._targets:
                self._writer.frame(_about(watched, len(self._targets) > 1))
            self._sink = self._make_sink()
            slots = [watched.slot for watched in self._targets]
            self._recorder = Recorder(self._ring, self._writer, self._sink, slots)
            limits = {watched.slot: watched.cpu_limit() for watched in self._targets}
            self._throttling = ThrottleWatch({slot: limit for slot, limit in limits.items() if limit})
            self._ended: dict[int, _End] = {}  # by slot
            self._stack = stack.pop_all()

    def _header(self, started_ns: int) -> Header:
        system = os.uname()
        return Header(
            schedtrace=version("schedtrace"),
            kernel=system.release,
            machine=system.machine,
            cpus=os.cpu_count() or 0,
            started_ns=started_ns,
            started_wall_ns=clock_gettime_ns(_CLOCK_REALTIME) - (monotonic_ns() - started_ns),
            ring_seconds=self._kept_seconds,
            when=self._options.when.text if self._options.when else "",
        )

    @property
    def _kept_seconds(self) -> float:
        return self._options.kept_seconds or (_DEFAULT_KEPT_SECONDS if self._options.when else 0.0)

    def _make_sink(self) -> Sink:
        if not self._kept_seconds:
            return Everything(self._writer, self._options.most_bytes)
        return Last(
            self._writer,
            self._options.most_bytes,
            round(self._kept_seconds * 1e9),
            self._options.when,
            round((self._options.pause_seconds or self._kept_seconds) * 1e9),
        )

    def until_end(self, goes_on: Callable[[], bool]) -> str:
        """Record until something ends it, or it does not go on any more; what that was."""
        start = monotonic()
        next_look = start
        while goes_on():
            now = monotonic()
            if self._options.duration_seconds and now - start >= self._options.duration_seconds:
                return "the duration is over"
            self._drain()
            if self._sink.full:
                return "the file has reached its limit"
            if now >= next_look:
                next_look = now + _TARGETS_LOOK_SECONDS
                if ended := self._look_at_targets():
                    return ended
            sleep(_LOOK_SECONDS)
        return "interrupted"

    def _drain(self) -> int:
        """Take what there is; how many events the kernel had sent."""
        self._recorder.add(self._throttling.look())  # first: what was held back may be what is waited for
        return self._recorder.drain()

    def _look_at_targets(self) -> str:
        """Count those that have ended no longer: their PIDs may be others' soon. Why all have, if so."""
        for watched in self._targets:
            if watched.slot not in self._ended and (ended := watched.ended(0)):
                self._end(watched, ended, monotonic_ns())
        if len(self._ended) < len(self._targets):
            return ""
        return next(iter(self._ended.values())).why if len(self._targets) == 1 else "all targets have ended"

    def _end(self, watched: Watched, why: str, time_ns: int = NO_LIMIT) -> None:
        threads = watched.thread_count()
        watched.stop()
        self._ended[watched.slot] = _End(why, threads, time_ns)

    def finish(self, ended: str) -> Recorded:
        """Count no more, write what is left, and end the file."""
        for watched in self._targets:
            if watched.slot not in self._ended:
                self._end(watched, ended)
        # Programs that had begun before count and send for a moment still.
        for _ in range(_QUIET_ATTEMPTS):
            self._drain()
            looks = [self._look(watched) for watched in self._targets]
            if not self._drain():
                break
        self._recorder.end()
        windows = []
        for watched, look in zip(self._targets, looks, strict=True):
            window = watched.window_of(look, self._ended[watched.slot].why)
            windows.append(window)
            names = {pc: watched.function_name(pc) for pc in self._recorder.functions[watched.slot] if pc}
            self._writer.symbols(watched.slot, {pc: name for pc, name in names.items() if name})
            self._writer.frame(self._target_end(watched, look, window))
        written, lost = self._writer.events_written, self._recorder.lost
        self._writer.frame(Footer(monotonic_ns(), ended, self._ring.sent, lost, written))
        triggers = self._sink.triggers if isinstance(self._sink, Last) else 0
        return Recorded(ended, written, self._writer.bytes_written, lost, triggers, tuple(windows))

    def _look(self, watched: Watched) -> Look:
        """Of one that has ended before the others until then: what a goroutine was in did not go on."""
        look, end_ns = watched.look(), self._ended[watched.slot].time_ns
        return replace(look, snapshot=replace(look.snapshot, time_ns=min(look.snapshot.time_ns, end_ns)))

    def _target_end(self, watched: Watched, look: Look, window: Window) -> TargetEnd:
        end = self._ended[watched.slot]
        alone = len(self._targets) == 1
        return TargetEnd(
            slot=watched.slot,
            time_ns=look.snapshot.time_ns,
            ended=end.why,
            threads=end.threads,
            goroutines=window.goroutines,
            hits=tuple(probe.hits for probe in window.probes),
            foreign_hits=window.foreign_hits if alone else 0,
            lost=window.lost,
            throttling=window.throttling,
            overhead_ns=window.overhead_ns,
            cgroup_id=window.target.cgroup_id,
            kernel=_kernel_counts(look),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the probes out, and close the file. May be called twice."""
        self._stack.close()


def compilation(
    targets: int, max_goroutines: int = MAX_GOROUTINES, buffer_pages: int = BUFFER_PAGES
) -> Compilation:
    """What :class:`RecordingSession` needs for so many targets, begun. ``buffer_pages``: a power of two."""
    return Compilation(Sizes(targets=targets + 1, goroutines=max_goroutines), recording_pages=buffer_pages)


def _about(watched: Watched, of_many: bool) -> RecordedTarget:
    stops = None if isinstance(watched.plan.stops, str) else watched.plan.stops
    more = ("hits by other processes of the same executable: with several targets they are not counted",)
    return RecordedTarget(
        slot=watched.slot,
        target=watched.about(),
        started_ns=watched.started_ns,
        reasons=target.reasons_of(watched.plan),
        probes=tuple(RecordedProbe(p.function, p.site, p.emulated) for p in watched.plan.probes),
        unseen=watched.unseen + (more if of_many else ()),
        waits_divided=True,
        goroutines_of_threads=watched.goroutines_known,
        limit_watched=True,
        stops_seen=stops is not None,
        stop_reasons=stops.reasons if stops else (),
    )


def _kernel_counts(look: Look) -> KernelCounts:
    stats = look.snapshot.stats
    return KernelCounts(
        transitions={i: int(n) for i, n in enumerate(stats["transitions"]) if n},
        sched_latency=_histograms(stats["sched_latency"]),
        wait=_histograms(stats["wait"]),
        run_queue=_histogram(look.threads.stats["run_queue"]),
    )


def _histograms(records: Any) -> dict[int, tuple[int, ...]]:
    return {i: _histogram(record) for i, record in enumerate(records) if record["slots"].any()}


def _histogram(record: Any) -> tuple[int, ...]:
    return (*record["slots"].tolist(), int(record["sum_ns"]), int(record["max_ns"]))


