"""What the sampled level needs of a binary: one probe, on (*timeHistogram).record, and how to read what it is hit with.

The runtime itself takes a sample of its scheduling latencies, and hands each to record, as it does with every stop of
the world. So that one probe tells the latency of the goroutine that is about to run, on the thread that is to run it,
and where that goroutine had stopped, which is the cause of its wake. Made for :mod:`schedtrace.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schedtrace.abi import STOP_LIMIT, Duration, StopPlace
from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import Site, cheapest_site
from schedtrace.symbols.durations import Stop, find_record, find_stops
from schedtrace.symbols.function import Function
from schedtrace.symbols.layout import Layout
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.runtime_data import PAUSES, TIME_TO_RUN, RuntimeData
from schedtrace.symbols.status import StatusWrites
from schedtrace.transitions import OWN_SWAPS, RUNNING, SYSCALLS

DURATIONS: Mapping[str, Duration] = {
    TIME_TO_RUN: Duration.RUN,
    "schedt.stwStoppingTimeGC": Duration.STOPPING_GC,
    "schedt.stwStoppingTimeOther": Duration.STOPPING_OTHER,
    "schedt.stwTotalTimeGC": Duration.STOPPED_GC,
    "schedt.stwTotalTimeOther": Duration.STOPPED_OTHER,
    PAUSES: Duration.STOPPED_GC,
}
_PLACES: Mapping[str, StopPlace] = {
    "park_m": StopPlace.PARK,
    "gosched_m": StopPlace.YIELD,
    "goschedguarded_m": StopPlace.YIELD,
    "goyield_m": StopPlace.YIELD,
    "exitsyscall0": StopPlace.SYSCALL,
    "exitsyscallNoP": StopPlace.SYSCALL,
    "gopreempt_m": StopPlace.PREEMPT,
    "preemptPark": StopPlace.PREEMPT,
    "asyncPreempt2.func1": StopPlace.PREEMPT,
}
# Who comes here runs on by other ways, or never again. (After coroswitch_m also, but for where its swap fails.)
_NO_STOPS = frozenset({"goexit0", "recovery"})
_NEEDED = ("g.m", "m.curg", "g.atomicstatus", "g.sched.pc", "g.startpc", "g.waitreason", "timeHistogram.overflow")


@dataclass(frozen=True)
class SampledPlan:
    """``function`` and ``site``: where the probe goes. ``histograms``: addresses of the runtime's histograms, as
    linked, by which duration they hold. ``stops``: the addresses at which goroutines go on, as linked, and what stopped
    them there; more frequent ones first. ``other_place``: what stopped them behind calls of mcall, at ``mcall_vaddr``,
    that are not among these. ``unseen``: what even this level can't see in this binary."""

    function: str
    site: Site
    histograms: Mapping[Duration, int]
    stops: tuple[tuple[int, StopPlace], ...]
    mcall_vaddr: int
    other_place: StopPlace
    unseen: tuple[str, ...]


def make_sampled_plan(
    binary: Binary, table: Pclntab, layout: Layout | None, writes: StatusWrites, find_data: Callable[[], RuntimeData]
) -> SampledPlan:
    """``find_data`` is asked if the layout is known. Raises NotTraceable, saying why, if the level isn't possible for
    that binary."""
    if layout is None:
        raise NotTraceable(f"{binary.path}: the runtime's structs are not known")
    if "timeHistogram.overflow" not in layout.offsets:
        raise NotTraceable(f"{binary.path}: up to Go 1.19 the compiler copies what would be probed into its callers")
    if missing := [field for field in _NEEDED if field not in layout.offsets]:
        raise NotTraceable(f"{binary.path}: the layout of {layout.toolchain} has no {missing[0]}")
    data = find_data()
    record, sound = find_record(binary, table, data, layout, _runners(writes))
    site = cheapest_site(binary, record, 2, goroutine=True)
    if site is None:
        raise NotTraceable(f"{binary.path}: no instruction of {record.name} is certain to run once a call")
    unseen = []
    if missing_stops := sorted(set(data.histograms) - sound):
        names = ", ".join(DURATIONS[field].name.lower() for field in missing_stops)
        unseen.append(f"some stops of the world: not all of them are recorded by {record.name} ({names})")
    if PAUSES in data.histograms:
        unseen.append("stops of the world that are not the collector's")
    elif not any(field != TIME_TO_RUN for field in data.histograms):
        unseen.append("stops of the world")
    mcall, all_stops = find_stops(binary, table)
    stops = _places(all_stops)
    if not any(place is StopPlace.PARK for _, place in stops):
        raise NotTraceable(f"{binary.path}: its code doesn't show where goroutines park")
    others = {place for _, place in stops[STOP_LIMIT:]}
    return SampledPlan(
        function=record.name,
        site=site,
        histograms={DURATIONS[field]: vaddr for field, vaddr in data.histograms.items() if field in sound},
        stops=tuple(stops[:STOP_LIMIT]),
        mcall_vaddr=mcall.vaddr,
        other_place=StopPlace.YIELD if others == {StopPlace.YIELD} else StopPlace.UNKNOWN,
        unseen=tuple(unseen),
    )


def _runners(writes: StatusWrites) -> list[Function]:
    """Into which functions the compiler copied casgstatus so that they make goroutines run."""
    found = []
    for writer in writes.writers.values():
        name = writer.function.name.removeprefix("runtime.")
        copies = any(swap.new in (RUNNING, None) for swap in writer.swaps)
        if copies and name not in OWN_SWAPS and name not in SYSCALLS:
            found.append(writer.function)
    return found


def _places(stops: tuple[Stop, ...]) -> list[tuple[int, StopPlace]]:
    """Those at which goroutines come to wait for being run again."""
    named = [(stop.vaddr, stop.function.removeprefix("runtime.")) for stop in stops]
    found = [(vaddr, _PLACES.get(name, StopPlace.UNKNOWN)) for vaddr, name in named if name not in _NO_STOPS]
    # Gosched is copied into whatever calls it, of any package, so that these may be many: they come last.
    order = (StopPlace.PARK, StopPlace.SYSCALL, StopPlace.PREEMPT, StopPlace.UNKNOWN, StopPlace.YIELD)
    return sorted(found, key=lambda place: (order.index(place[1]), place[0]))
