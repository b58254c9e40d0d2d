"""What of a Go runtime's own state can be read from its memory, and where: binary -> :class:`RuntimePlan`.

Made for :mod:`schedtrace.plan`: needs no function to be probed, only data to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.buildinfo import GoVersion
from schedtrace.symbols.layout import NEWEST_MINOR, Layout
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.runtime_data import PAUSES, RuntimeData

_WORD = 8
_OLD_BUCKETS = 720
# What the histograms are called here, by the field of the runtime's that each one is.
_NAMES: Mapping[str, str] = {
    "schedt.timeToRun": "sched_latency",
    "schedt.stwStoppingTimeGC": "stopping_gc",
    "schedt.stwStoppingTimeOther": "stopping_other",
    "schedt.stwTotalTimeGC": "stopped_gc",
    "schedt.stwTotalTimeOther": "stopped_other",
    PAUSES: "stopped_gc",
}
_HEAP_GOAL = tuple(
    f"gcControllerState.{name}"
    for name in (
        *("memoryLimit", "gcPercentHeapGoal", "sweepDistMinTrigger", "triggered", "heapMarked", "heapFree"),
        *("totalAlloc", "totalFree", "mappedReady"),
    )
)


GOROUTINE_OF_THREAD = (
    *("m.procid", "m.curg", "m.alllink", "g.m", "g.atomicstatus", "g.waitreason", "g.startpc"),
)
"""What leads from a thread to its goroutine."""


@dataclass(frozen=True)
class RuntimePlan:
    """Where the runtime's state is. Addresses are as linked, ``offsets`` as a layout has them ("p.id").

    ``histograms`` has the addresses of the runtime's histograms: "sched_latency", always; of the time that the world
    was stopped "stopped_gc" and, from Go 1.22, "stopped_other"; of the time that stopping it took, from Go 1.22,
    "stopping_gc" and "stopping_other". ``buckets`` is how many buckets they have; ``underflow_offset`` and
    ``overflow_offset`` (None up to Go 1.19) are in them. ``gc_controller_vaddr`` is None also where the heap goal can't
    be computed from it; ``allm_vaddr`` where the list of the runtime's ms can't be found or its form isn't known:
    ``goroutines_of_threads_unseen`` then says why.
    ``code_vaddr`` is an address in the code of the same file. ``source``: "symtab" or "code".
    """

    path: str
    arch: str
    go_version: str
    minor: int
    layout_source: str
    source: str
    offsets: Mapping[str, int]
    sched_vaddr: int
    allp_vaddr: int
    gomaxprocs_vaddr: int
    allgs_vaddr: int
    memstats_vaddr: int | None
    gc_controller_vaddr: int | None
    allm_vaddr: int | None
    goroutines_of_threads_unseen: str
    histograms: Mapping[str, int]
    buckets: int
    underflow_offset: int
    overflow_offset: int | None
    code_vaddr: int


def make_runtime_plan(
    binary: Binary,
    table: Pclntab,
    version: GoVersion | None,
    layout: Layout | None,
    find_data: Callable[[], RuntimeData],
) -> RuntimePlan:
    """``version``, ``layout``: as far as they are known; ``find_data`` is asked if both are.

    Raises NotTraceable, saying why, if its Go version isn't known, or the places can't be told for certain.
    """
    if layout is None or version is None:
        text = version.text if version else "its Go version is unknown"
        raise NotTraceable(f"{binary.path}: {text}: only Go up to 1.{NEWEST_MINOR} is known, and it has no DWARF")
    data = find_data()
    offsets = dict(layout.offsets)
    if data.alllink_offset is not None:
        offsets["m.alllink"] = data.alllink_offset
    unseen = _threads_unseen(data, offsets)
    return RuntimePlan(
        path=binary.path,
        arch=binary.arch.value,
        go_version=version.text,
        minor=layout.minor,
        layout_source=layout.source,
        source=data.source,
        offsets=offsets,
        sched_vaddr=data.sched_vaddr,
        allp_vaddr=data.allp_vaddr,
        gomaxprocs_vaddr=data.gomaxprocs_vaddr,
        allgs_vaddr=data.allgs_vaddr,
        memstats_vaddr=data.memstats_vaddr,
        gc_controller_vaddr=_with_heap_goal(data, offsets),
        allm_vaddr=None if unseen else data.allm_vaddr,
        goroutines_of_threads_unseen=unseen,
        histograms={_NAMES[field]: vaddr for field, vaddr in data.histograms.items()},
        buckets=_buckets(binary.path, offsets),
        underflow_offset=offsets["timeHistogram.underflow"],
        overflow_offset=offsets.get("timeHistogram.overflow"),
        code_vaddr=table.text_vaddr,
    )


def _threads_unseen(data: RuntimeData, offsets: Mapping[str, int]) -> str:
    """Why it can't be told which goroutine a thread runs; nothing if it can."""
    if data.allm_vaddr is None:
        return "its code doesn't show where the runtime's list of threads is"
    missing = [field for field in GOROUTINE_OF_THREAD if field not in offsets]
    return f"the layout of its runtime has no {missing[0]}" if missing else ""


def _with_heap_goal(data: RuntimeData, offsets: Mapping[str, int]) -> int | None:
    return data.gc_controller_vaddr if all(field in offsets for field in _HEAP_GOAL) else None


def _buckets(path: str, offsets: Mapping[str, int]) -> int:
    """How many counts a histogram has: they are its first field, and ``underflow`` comes right behind."""
    buckets = (offsets["timeHistogram.underflow"] - offsets["timeHistogram.counts"]) // _WORD
    expected = 160 if "timeHistogram.overflow" in offsets else _OLD_BUCKETS
    if offsets["timeHistogram.counts"] != 0 or buckets != expected:
        raise NotTraceable(f"{path}: its latency histograms have {buckets} buckets: a form that isn't known")
    return buckets
