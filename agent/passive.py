"""The passive level: what a Go runtime keeps of itself, read from its memory. No probe, no stop, no write.

The runtime counts how long goroutines wait to run, how long it stops the world, its goroutines, threads and
collections; /sched/latencies:seconds and others of runtime/metrics print these numbers. They are read here as they are,
while the program runs on. So numbers that belong together may be a few apart, as they may be when the program itself
reads them. Each read checks what must hold between them; where it doesn't, also not a moment later, there are no
numbers but a reason.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping

from schedtrace.errors import NodeUnsupported, NotTraceable, PermissionDenied, SchedtraceError
from schedtrace.heap_goal import heap_goal_bytes
from schedtrace.process_memory import Places, unsafe_places
from schedtrace.procfs import Process
from schedtrace.runtime_histogram import RuntimeHistogram
from schedtrace.runtime_plan import RuntimePlan
from schedtrace.runtime_state import PROCESSOR_STATES, Processor, RuntimeState

_WORD, _HALF = 8, 4
_SLICE = 3 * _WORD
_MOST_PROCESSORS = 8192
_MOST_GOROUTINES = 1 << 30
_RUN_QUEUE = 256  # room in a P's own queue
_LARGEST_COUNT = 1 << 56
_GOROUTINE_STATES = range(12)
_SCAN = 0x1000  # a bit that is set while a goroutine's stack is scanned
_ATTEMPTS = 4
_PAUSE_SECONDS = 0.002
_ENDING_SECONDS = 0.1
# Numbers in schedt; those of the queue and of unused goroutines have names that depend on the version.
_SCHED_FIELDS = (
    *("schedt.nmidle", "schedt.mnext", "schedt.maxmcount", "schedt.nmfreed", "schedt.ngsys", "schedt.npidle"),
)
_GLOBAL_QUEUE = ("schedt.runq.size", "schedt.runqsize")
_FREE = (("schedt.gFree.n",), ("schedt.gFree.stack.size", "schedt.gFree.noStack.size"))


class _InconsistentError(Exception):
    """What was read can't be the state of a Go runtime, as it is or at that moment."""


class PassiveReader:
    """Reads one process. Not for use by several threads at once."""

    def __init__(self, process: Process, plan: RuntimePlan, load_bias: int) -> None:
        """``load_bias`` plus an address of the plan is the address in the process, which stays the caller's.

        Raises NotTraceable if the plan's layout can't be read.
        """
        self._process = process
        self._plan = plan
        self._bias = load_bias
        self._offsets = offsets = plan.offsets
        sched_fields = [*_SCHED_FIELDS, next((f for f in _GLOBAL_QUEUE if f in offsets), _GLOBAL_QUEUE[0])]
        self._free = next((fields for fields in _FREE if all(f in offsets for f in fields)), _FREE[0])
        sched_fields += self._free
        self._processor_free = "p.gFree.n" if "p.gFree.n" in offsets else "p.gFree.size"
        if missing := [f for f in (*sched_fields, self._processor_free) if f not in offsets]:
            raise NotTraceable(f"{plan.path}: the layout of {plan.go_version} has no {missing[0]}")
        pairs = (("p.id", "p.status"), ("p.runqhead", "p.runqtail"))
        if any(offsets[second] != offsets[first] + _HALF for first, second in pairs):
            raise NotTraceable(f"{plan.path}: the layout of {plan.go_version} has Ps of a form that isn't known")
        self._queue_field = sched_fields[len(_SCHED_FIELDS)]
        self._sched_end = max(offsets[f] for f in sched_fields) + _WORD
        self._pacer_fields = {f.partition(".")[2]: o for f, o in offsets.items() if f.startswith("gcControllerState.")}
        self._processors: tuple[int, ...] = ()  # their addresses
        self._slice = (0, 0, 0)  # allp as it was last
        self._places: Places | None = None
        self._last: RuntimeState | None = None
        self._pieces: list[bytes] = []  # what it was read from
        self._histograms: dict[str, tuple[bytes, RuntimeHistogram]] = {}  # as they were read last

    def read(self) -> RuntimeState | None:
        """The runtime's state now; None if the process has exited.

        Raises NotTraceable, with the reason, if its memory doesn't hold together as a Go runtime's (a state that was
        read before must have become this one), or if it executed another program; PermissionDenied if it may not be
        read; NodeUnsupported if the kernel can't.
        """
        reason = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS)  # for what was only being changed
            try:
                state = self._attempt()
            except _InconsistentError as error:
                self._places, reason = None, str(error)
                continue
            except SchedtraceError:
                if self._ends():
                    return None
                raise
            except OSError as error:
                self._places = None
                if error.errno == errno.ESRCH:  # its memory is gone, and so will it be
                    return None
                reason = self._failure(error)
                continue
            if self._process.exited():
                return None
            if not self._process.still_same():
                if self._ends():
                    return None
                raise NotTraceable(f"{self._who()} has executed another program")
            self._last = state
            return state
        if self._ends():
            return None
        raise NotTraceable(f"{self._who()}: its memory is not that of a {self._plan.go_version} runtime: {reason}")

    def _ends(self) -> bool:
        """Whether the process has exited, or is about to: its memory goes first."""
        return self._process.wait(_ENDING_SECONDS)

    def _who(self) -> str:
        return f"process {self._process.pid} ({self._process.name})"

    def _failure(self, error: OSError) -> str:
        if error.errno == errno.EPERM:
            raise PermissionDenied(f"{self._who()}: reading its memory needs CAP_SYS_PTRACE; run as root or grant it")
        if error.errno == errno.ENOSYS:
            raise NodeUnsupported("the kernel has no process_vm_readv (CONFIG_CROSS_MEMORY_ATTACH)")
        return "not mapped where it should be"

    def _attempt(self) -> RuntimeState:
        if self._places is None:
            self._look_for_processors()
        if self._places is None:  # it has just been set
            raise _InconsistentError("nothing to read")
        pieces = self._places.read(self._process.pid)
        if self._last and pieces == self._pieces:  # it has done nothing since
            return self._last
        values = dict(zip(self._names, pieces, strict=False))
        processors = pieces[len(self._names) :]
        if _words(values["allp"]) != self._slice or _words(values["array"]) != self._processors:
            self._look_for_processors()
            raise _InconsistentError("its list of Ps changes")
        state = self._state(values, processors)
        self._check_progress(state)
        self._pieces = pieces
        return state

    def _look_for_processors(self) -> None:
        """Where all is that is to be read, which changes only when GOMAXPROCS does."""
        at = {name: vaddr + self._bias for name, vaddr in self._variables().items()}
        globals_ = [(at[name], size) for name, size in self._sizes().items()]
        self._check_mapped(globals_)
        pid = self._process.pid
        values = Places([(at["allp"], _SLICE), (at["gomaxprocs"], _HALF)]).read(pid)
        address, length, capacity = _words(values[0])
        gomaxprocs = _signed(values[1])
        if length == gomaxprocs == 0:
            raise _InconsistentError("it has not started yet")
        if not 0 < length == gomaxprocs <= _MOST_PROCESSORS or capacity < length or not address or address % _WORD:
            raise _InconsistentError(f"GOMAXPROCS is {gomaxprocs}, and there are {length} Ps")
        array = (address, length * _WORD)
        self._check_mapped([array])
        (content,) = Places([array]).read(pid)
        processors = _words(content)
        if not all(processors) or len(set(processors)) != length or any(p % _WORD for p in processors):
            raise _InconsistentError("its list of Ps is none")
        offsets = self._offsets
        fields = (
            *((offsets["p.id"], _WORD), (offsets["p.runqhead"], _WORD), (offsets["p.runnext"], _WORD)),
            (offsets[self._processor_free], _HALF),
        )
        ranges = [(p + offset, size) for p in processors for offset, size in fields]
        self._check_mapped(ranges)
        self._check_goroutines(at["allgs"])
        self._names = (*self._sizes(), "array")
        self._places = Places([*globals_, array, *ranges])
        self._processors, self._slice = processors, (address, length, capacity)

    def _check_goroutines(self, allgs: int) -> None:
        """Whether the first and the last of all goroutines are some."""
        pid, status = self._process.pid, self._offsets["g.atomicstatus"]
        (content,) = Places([(allgs, _SLICE)]).read(pid)
        array, length, capacity = _words(content)
        _require(0 < length <= capacity < _MOST_GOROUTINES, f"{length} goroutines in a list of {capacity}")
        ends = [(array, _WORD), (array + (length - 1) * _WORD, _WORD)]
        self._check_mapped(ends)
        goroutines = [address for piece in Places(ends).read(pid) for address in _words(piece)]
        _require(not any(address % _WORD for address in goroutines), "a goroutine that is none")
        ranges = [(address + status, _HALF) for address in goroutines]
        self._check_mapped(ranges)
        for piece in Places(ranges).read(pid):
            _require(_signed(piece) & ~_SCAN in _GOROUTINE_STATES, f"a goroutine in state {_signed(piece)}")

    def _variables(self) -> dict[str, int]:
        """Addresses of all variables, as linked."""
        plan = self._plan
        found = {
            "sched": plan.sched_vaddr,
            "allp": plan.allp_vaddr,
            "gomaxprocs": plan.gomaxprocs_vaddr,
            "allgs": plan.allgs_vaddr,
            **plan.histograms,
        }
        if plan.memstats_vaddr is not None:
            found["numgc"] = plan.memstats_vaddr + plan.offsets["mstats.numgc"]
            found["enablegc"] = plan.memstats_vaddr + plan.offsets["mstats.enablegc"]
        if plan.gc_controller_vaddr is not None:
            found["gc_controller"] = plan.gc_controller_vaddr
        return found

    def _sizes(self) -> dict[str, int]:
        """How much to read of each, in bytes."""
        plan = self._plan
        last = plan.overflow_offset if plan.overflow_offset is not None else plan.underflow_offset
        sizes = {
            "sched": self._sched_end,
            "allp": _SLICE,
            "gomaxprocs": _HALF,
            "allgs": _SLICE,
            "numgc": _HALF,
            "enablegc": 1,
            "gc_controller": plan.offsets.get("gcControllerState.mappedReady", 0) + _WORD,
            **dict.fromkeys(plan.histograms, last + _WORD),
        }
        return {name: size for name, size in sizes.items() if name in self._variables()}

    def _check_mapped(self, ranges: list[tuple[int, int]]) -> None:
        code = self._plan.code_vaddr + self._bias
        for address, _ in unsafe_places(ranges, self._process.mappings(), code):
            raise _InconsistentError(f"what is at {address:#x} is no data of its own")

    def _state(self, values: Mapping[str, bytes], processors: list[bytes]) -> RuntimeState:
        sched = values["sched"]

        def scalar(field: str) -> int:
            return _signed(sched[self._offsets[field] :][:_HALF])

        gomaxprocs = _signed(values["gomaxprocs"])
        _require(gomaxprocs == self._slice[1], f"GOMAXPROCS is {gomaxprocs}, and there are {self._slice[1]} Ps")
        four = zip(*(processors[n::4] for n in range(4)), strict=True)
        ps, free = [], 0
        for index, (identity, queue, following, unused) in enumerate(four):
            ps.append(_processor(index, identity, queue, following))
            free += _count(_signed(unused), _MOST_GOROUTINES, "unused goroutines")
        _, length, capacity = _words(values["allgs"])
        _require(0 < length <= capacity < _MOST_GOROUTINES, f"{length} goroutines in a list of {capacity}")
        free += sum(_count(scalar(field), length, "unused goroutines") for field in self._free)
        # As gcount in runtime/proc.go: the runtime's own are not counted, and one there is always.
        goroutines = max(length - free - _count(scalar("schedt.ngsys"), length, "goroutines of the runtime"), 1)
        threads = self._threads(sched)
        gc_cycles = None
        if "numgc" in values:
            _require(values["enablegc"][0] <= 1, "a flag of the collector is neither true nor false")
            gc_cycles = int.from_bytes(values["numgc"], "little")
        histograms = {name: self._histogram(name, values[name]) for name in self._plan.histograms}
        return RuntimeState(
            sched_latency=histograms.pop("sched_latency"),
            stop_the_world=histograms,
            gomaxprocs=gomaxprocs,
            goroutines=goroutines,
            threads=threads,
            idle_threads=_count(scalar("schedt.nmidle"), threads, "idle threads"),
            processors=tuple(ps),
            idle_processors=_count(scalar("schedt.npidle"), gomaxprocs, "idle Ps"),
            run_queue=_count(scalar(self._queue_field), length, "goroutines in the global queue"),
            gc_cycles=gc_cycles,
            heap_goal_bytes=self._heap_goal(values.get("gc_controller")),
        )

    def _threads(self, sched: bytes) -> int:
        """As mcount in runtime/proc.go. How many there may be is a field between the two that this is made of."""
        most = _signed(sched[self._offsets["schedt.maxmcount"] :][:_HALF])
        made, ended = (_signed(sched[self._offsets[f] :][:_WORD]) for f in ("schedt.mnext", "schedt.nmfreed"))
        _require(0 <= ended < made < _MOST_GOROUTINES, f"{made} threads made and {ended} ended")
        _require(made - ended <= most, f"{made - ended} threads of at most {most}")
        return made - ended

    def _histogram(self, name: str, content: bytes) -> RuntimeHistogram:
        """One of them; the same object as last time if nothing of it has changed, as is so for most at most times."""
        known = self._histograms.get(name)
        if known and known[0] == content:
            return known[1]
        plan = self._plan
        words = _words(content)
        if max(words) > _LARGEST_COUNT:
            raise _InconsistentError("a histogram holds more than can be counted")
        underflow = words[plan.underflow_offset // _WORD]
        overflow = words[plan.overflow_offset // _WORD] if plan.overflow_offset is not None else 0
        histogram = RuntimeHistogram(words[: plan.buckets], underflow, overflow)
        self._histograms[name] = (content, histogram)
        return histogram

    def _heap_goal(self, content: bytes | None) -> int | None:
        if content is None:
            return None
        fields = {
            name: int.from_bytes(content[offset : offset + _WORD], "little")
            for name, offset in self._pacer_fields.items()
        }
        return heap_goal_bytes(fields, self._plan.minor)

    def _check_progress(self, state: RuntimeState) -> None:
        """Counters of one program's life never go back."""
        before = self._last
        if before is None:
            return
        _require(state.sched_latency.grown_from(before.sched_latency), "its count of latencies went back")
        for name, histogram in state.stop_the_world.items():
            _require(histogram.grown_from(before.stop_the_world[name]), "its count of stops of the world went back")
        if state.gc_cycles is not None and before.gc_cycles is not None:
            _require(state.gc_cycles >= before.gc_cycles, "its count of collections went back")


def _processor(index: int, identity: bytes, queue: bytes, following: bytes) -> Processor:
    number, status = _signed(identity[:_HALF]), _signed(identity[_HALF:])
    _require(number == index, f"P {index} has the number {number}")
    _require(0 <= status < len(PROCESSOR_STATES), f"P {index} is in state {status}")
    head, tail = (int.from_bytes(part, "little") for part in (queue[:_HALF], queue[_HALF:]))
    length = _count((tail - head) % (1 << 32), _RUN_QUEUE, f"goroutines in the queue of P {index}")
    return Processor(index, PROCESSOR_STATES[status], length + any(following))


def _count(value: int, most: int, what: str) -> int:
    _require(0 <= value <= most, f"{value} {what}")
    return value


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _InconsistentError(otherwise)


def _words(content: bytes) -> tuple[int, ...]:
    return tuple(memoryview(content).cast("Q")) if content else ()


def _signed(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)
