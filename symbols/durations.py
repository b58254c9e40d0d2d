"""Where the Go runtime records how long something took: one function, ``(*timeHistogram).record(h, ns)``.

From Go 1.20 it is a function of its own, which casgstatus calls each time that a goroutine begins to run that is being
tracked (one in eight), and which the functions that stop and start the world call. Up to 1.19 the compiler copies it
into its callers, and a profile may make newer ones do so. So the binary's own code is asked: whoever names one of the
histograms must hand it to a call of record, and touch nothing inside of it.

A goroutine that begins to run is found where it stopped: ``g.sched.pc`` is the address behind a call of ``mcall(fn)``,
and fn says why it stopped, or it was stopped by a check of its stack, or it has not run yet. All calls of mcall are
found here, with what they are given: they stay calls wherever the compiler copies their callers to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import DataOperand, calls_in, data_operands
from schedtrace.symbols.function import Function
from schedtrace.symbols.instructions import instructions
from schedtrace.symbols.layout import Layout
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.runtime_data import PAUSES, STOPPED, STOPPING, TIME_TO_RUN, RuntimeData

RECORD = "runtime.(*timeHistogram).record"
_MCALL = "runtime.mcall"
# Who records into the histograms of stops of the world.
_STOPS = {
    **dict.fromkeys(STOPPING, ("runtime.stopTheWorldWithSema",)),
    **dict.fromkeys(STOPPED, ("runtime.startTheWorldWithSema",)),
    PAUSES: (
        "runtime.gcMarkTermination",
        *(f"runtime.{name}.func{n}" for name in ("gcStart", "gcMarkDone") for n in range(1, 8)),
    ),
}
_MOST_CALLS = 1000
_WORD = 8


@dataclass(frozen=True)
class Stop:
    """A place where goroutines stop: the address at which they go on, as linked, and the function that is given to
    mcall there, such as "runtime.park_m"; "" where the code doesn't show which."""

    vaddr: int
    function: str


def find_record(
    binary: Binary, table: Pclntab, data: RuntimeData, layout: Layout, writers: Sequence[Function]
) -> tuple[Function, frozenset[str]]:
    """The function record, and the fields of ``data.histograms`` that are only recorded through it.

    ``writers``: functions, beside casgstatus, that make goroutines run by code of their own. Raises NotTraceable, with
    the reason, if record isn't called each time that the time to run of a goroutine is recorded.
    """
    names = [RECORD, "runtime.casgstatus", *(name for names in _STOPS.values() for name in names)]
    functions = table.functions_named(names)
    record = functions.get(RECORD)
    if record is None:
        raise NotTraceable(f"{binary.path}: the compiler copied {RECORD} into its callers")
    size = layout.offsets["timeHistogram.overflow"] + _WORD
    places = dict(data.histograms)
    for writer in (functions["runtime.casgstatus"], *writers):
        if not _hands_over(binary, writer, record, places[TIME_TO_RUN], size):
            raise NotTraceable(f"{binary.path}: the compiler copied {RECORD} into {writer.name}")
    sound = {
        field
        for field, vaddr in places.items()
        if field != TIME_TO_RUN
        if (users := [f for name in _STOPS[field] if (f := functions.get(name)) and _names(binary, f, vaddr, size)])
        and all(_hands_over(binary, user, record, vaddr, size) for user in users)
    }
    # The end of a stop that isn't seen would make it last for ever.
    for stopping, stopped in zip(STOPPING, STOPPED, strict=True):
        if stopped not in sound:
            sound.discard(stopping)
    return record, frozenset({TIME_TO_RUN, *sound})


def find_stops(binary: Binary, table: Pclntab) -> tuple[Function, tuple[Stop, ...]]:
    """mcall, and all places where goroutines stop by it, in order of address. Raises NotTraceable if there is no such
    function, or more calls of it than can be looked at."""
    mcall = table.functions_named([_MCALL]).get(_MCALL)
    if mcall is None:
        raise NotTraceable(f"{binary.path}: no function {_MCALL} in it: a Go runtime that is not known")
    found: list[Stop] = []
    for segment in binary.segments:
        if not segment.executable:
            continue
        for vaddr in calls_in(binary, segment.vaddr, segment.vaddr + segment.file_size, mcall.vaddr):
            if len(found) == _MOST_CALLS:
                raise NotTraceable(f"{binary.path}: goroutines stop at more than {_MOST_CALLS} places")
            if (function := table.function_at(vaddr)) and (stop := _stop(binary, table, function, vaddr)):
                found.append(stop)
    return mcall, tuple(found)


def _names(binary: Binary, function: Function, vaddr: int, size: int) -> list[DataOperand]:
    """Where a function's code names an address in the histogram at ``vaddr``."""
    return [o for o in data_operands(binary, function) if vaddr <= o.target_vaddr < vaddr + size]


def _hands_over(binary: Binary, function: Function, record: Function, vaddr: int, size: int) -> bool:
    """Whether a function names the histogram only to hand it to a call of record."""
    operands = _names(binary, function, vaddr, size)
    calls = len(list(calls_in(binary, function.vaddr, function.vaddr + function.size, record.vaddr)))
    return bool(operands and calls) and all(o.address_of and o.target_vaddr == vaddr for o in operands)


def _stop(binary: Binary, table: Pclntab, function: Function, vaddr: int) -> Stop | None:
    """The call of mcall at ``vaddr``; None if no instruction begins there, so that it is no call."""
    code = instructions(binary, function)
    index = next((i for i, instruction in enumerate(code) if instruction.vaddr == vaddr), None)
    if index is None:
        return None
    behind = vaddr + len(code[index].code)
    # What a function value is: the address of a word that holds the function's.
    moved = next((i for i in reversed(code[:index]) if i.mnemonic != "nop"), None)
    for operand in data_operands(binary, function) if moved else ():
        if moved and operand.address_of and operand.vaddr == moved.vaddr:
            return Stop(behind, _function_of(binary, table, operand.target_vaddr))
    return Stop(behind, "")


def _function_of(binary: Binary, table: Pclntab, value_vaddr: int) -> str:
    try:
        return table.name_at(binary.pointer(value_vaddr)) or ""
    except NotTraceable:
        return ""

