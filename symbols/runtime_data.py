"""Where a Go program keeps the variables of its runtime that are read from outside: by name, else from its code.

The linker's symbol table names them. A stripped file has no such table, but functions still have names (pclntab), and
their code holds the addresses of the variables they use. So a variable is found by what certain functions have in
common: a *derivation* names functions and, for a struct, fields that each of them uses, and the variable is at the one
address from which every one of these fields is among the addresses in that function's code. No order of instructions is
relied on, and what the compiler inlines into those functions does no harm. Each variable has several derivations, from
functions that have nothing to do with each other; two must find it (the
symbol table counts as one), and all that find it must agree. As they go through the fields' offsets, they also show
that the layout is this binary's.

Which function uses what was read from runtime/proc.go, mgc.go, mgcpacer.go and compared with the symbol tables of
programs of Go 1.19 to 1.27 for both architectures.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import data_operands, displacements
from schedtrace.symbols.layout import Layout
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.symtab import Symtab

_RUNTIME = "runtime."
_SELF = ""  # the variable itself: no struct, or its first word
_SLICES = frozenset({"allp", "allgs"})  # pointer, length, capacity
_SLICE_WORDS = ("0", "8", "16")
_WORD = 8
_ENOUGH = 2
_OLD_END = "timeHistogram.underflow"  # where record was compiled into its callers, up to Go 1.19

TIME_TO_RUN = "schedt.timeToRun"
PAUSES = "mstats.gcPauseDist"
STOPPING = ("schedt.stwStoppingTimeGC", "schedt.stwStoppingTimeOther")
STOPPED = ("schedt.stwTotalTimeGC", "schedt.stwTotalTimeOther")

# A function (or, where it was renamed, both names) and the fields of the variable that it uses.
_Use = tuple[str, tuple[str, ...]]

_DERIVATIONS: Mapping[str, tuple[tuple[_Use, ...], ...]] = {
    "sched": (
        (("stopTheWorldWithSema", ("schedt.lock", "schedt.gcwaiting", "schedt.stopwait")),),
        (("casgstatus", (TIME_TO_RUN, "schedt.totalMutexWaitTime", _OLD_END)),),
        (("handoffp", ("schedt.lock", "schedt.npidle", "schedt.nmspinning", "schedt.gcwaiting")),),
        (("checkmcount", ("schedt.mnext", "schedt.nmfreed")),),
    ),
    "allp": (
        (("procresize", _SLICE_WORDS), ("preemptall", (_SELF,))),
        (("stopTheWorldWithSema", (_SELF,)), ("gcMarkTinyAllocs", (_SELF,))),
        (("stealWork", (_SELF,)), ("timeSleepUntil", (_SELF,)), ("retake", (_SELF,))),
        (("checkdead", (_SELF,)), ("gcMark", (_SELF,)), ("gcComputeStartingStackSize", (_SELF,))),
    ),
    "gomaxprocs": (
        (("procresize", (_SELF,)), ("GOMAXPROCS", (_SELF,))),
        (("stopTheWorldWithSema", (_SELF,)), ("gcBgMarkStartWorkers", (_SELF,))),
        (("findRunnable|findrunnable", (_SELF,)), ("sysmon", (_SELF,)), ("gcMarkDone", (_SELF,))),
        (("schedtrace", (_SELF,)), ("startTheWorldWithSema", (_SELF,)), ("gcStart", (_SELF,))),
    ),
    "allgs": (
        (("allgadd", _SLICE_WORDS),),
        (("forEachG", (_SELF,)), ("gcPrepareMarkRoots|gcMarkRootPrepare", (_SELF,))),
        (("forEachG", (_SELF,)), ("markroot", (_SELF,))),  # up to Go 1.17
    ),
    "allm": (
        (("mcommoninit", (_SELF,)), ("mexit", (_SELF,))),
        (("mcommoninit", (_SELF,)), ("schedtrace", (_SELF,))),
        (("mexit", (_SELF,)), ("schedtrace", (_SELF,))),
    ),
    "memstats": (
        (("gcMarkTermination", ("mstats.numgc", "mstats.numforcedgc", "mstats.pause_total_ns")),),
        (("gcTrigger.test", ("mstats.last_gc_nanotime", "mstats.enablegc")),),
    ),
    "gcController": (
        (("gcControllerCommit", (_SELF, "gcControllerState.memoryLimit", "gcControllerState.lastHeapGoal")),),
        ((
            "gcPaceScavenger",
            ("gcControllerState.heapInUse", "gcControllerState.heapFree", "gcControllerState.mappedReady"),
        ),),
    ),
}  # fmt: skip
# Uses none of them: what it names is named everywhere, such as where a shared object finds the running goroutine.
_UNRELATED = "(*semaRoot).dequeue"
# Those functions use fields of sched, too.
_OUTSIDE_OF_SCHED = frozenset({"allm"})
# They follow the list of all ms, through m.alllink, whose place differs between patch releases of 1.23 and 1.24.
_ALLM_WALKERS = ("mcommoninit", "mexit", "schedtrace")
_M_END = 1024
_NEEDED = ("sched", "allp", "gomaxprocs", "allgs")
# What else a layout must have; without the fields of memstats and gcController the two are left out.
_NEEDED_FIELDS = (
    *("schedt.lock", TIME_TO_RUN, "schedt.mnext", "schedt.nmfreed", "schedt.ngsys", "schedt.nmidle", "schedt.npidle"),
    *("timeHistogram.counts", "timeHistogram.underflow", "p.id", "p.status", "p.runqhead", "p.runqtail", "p.runnext"),
)
# Which function must be seen to use a histogram, or it is not believed to be there.
_RECORDERS = {
    TIME_TO_RUN: ("casgstatus", "execute"),
    **dict.fromkeys(STOPPING, ("stopTheWorldWithSema",)),
    **dict.fromkeys(STOPPED, ("startTheWorldWithSema",)),
    PAUSES: ("gcMarkTermination",),
}


@dataclass(frozen=True)
class RuntimeData:
    """Addresses as linked. ``histograms`` has those of the timeHistograms by the field that they are, such as
    "schedt.timeToRun". ``memstats_vaddr`` and ``gc_controller_vaddr`` are None where they can't be found or the layout
    doesn't describe them; ``allm_vaddr`` where it can't be, and then so is ``alllink_offset``, the offset in bytes of
    m.alllink. ``source``: "symtab" or "code".
    """

    sched_vaddr: int
    allp_vaddr: int
    gomaxprocs_vaddr: int
    allgs_vaddr: int
    memstats_vaddr: int | None
    gc_controller_vaddr: int | None
    allm_vaddr: int | None
    alllink_offset: int | None
    histograms: Mapping[str, int]
    source: str


def find_runtime_data(binary: Binary, table: Pclntab, symtab: Symtab | None, layout: Layout) -> RuntimeData:
    """The variables of ``binary``'s runtime. Raises NotTraceable, with the reason, where one that is needed is not
    found twice, or where what was found disagrees or doesn't lie in the program's data."""
    missing = [field for field in _NEEDED_FIELDS if field not in layout.offsets]
    if missing:
        raise NotTraceable(f"{binary.path}: the layout of {layout.toolchain} has no {missing[0]}")
    uses = _Uses(binary, table, layout)
    symbols = symtab.data_named([_RUNTIME + name for name in _DERIVATIONS]) if symtab else {}
    places = {name: _agreed(binary, uses, name, symbols.get(_RUNTIME + name)) for name in _DERIVATIONS}
    for name in _NEEDED:
        if places[name] is None:
            raise NotTraceable(f"{binary.path}: its code doesn't show where runtime.{name} is")
    sched, memstats = places["sched"], places["memstats"]
    histograms = {}
    for field, functions in _RECORDERS.items():
        base = memstats if field == PAUSES else sched
        offset = layout.offsets.get(field)
        if base is not None and offset is not None and any(base + offset in uses.targets(f) for f in functions):
            histograms[field] = base + offset
    if TIME_TO_RUN not in histograms:
        raise NotTraceable(f"{binary.path}: its code doesn't record scheduling latencies where {layout.toolchain} does")
    alllink = _alllink_offset(uses, layout)
    return RuntimeData(
        sched_vaddr=sched or 0,
        allp_vaddr=places["allp"] or 0,
        gomaxprocs_vaddr=places["gomaxprocs"] or 0,
        allgs_vaddr=places["allgs"] or 0,
        memstats_vaddr=memstats,
        gc_controller_vaddr=places["gcController"],
        allm_vaddr=None if alllink is None else places["allm"],
        alllink_offset=None if places["allm"] is None else alllink,
        histograms=histograms,
        source="symtab" if all(_RUNTIME + name in symbols for name in _NEEDED) else "code",
    )


def derivations_of(
    binary: Binary, table: Pclntab, layout: Layout
) -> Mapping[str, tuple[frozenset[int], ...]]:
    """For each variable the addresses that each of its derivations leaves possible: one, where it says what it is."""
    uses = _Uses(binary, table, layout)
    return {name: tuple(uses.places(name, d) for d in ds) for name, ds in _DERIVATIONS.items()}


def _alllink_offset(uses: "_Uses", layout: Layout) -> int | None:
    """Where m.alllink is, by the code that follows it: the one offset behind m.spinning that all such functions use.
    None if there are several or none, or the layout knows another."""
    spinning = layout.offsets.get("m.spinning")
    if spinning is None:
        return None
    used = [uses.displacements(function) for function in _ALLM_WALKERS]
    found = [offset for offset in frozenset.intersection(*used) if spinning < offset < _M_END]
    return found[0] if len(found) == 1 and layout.offsets.get("m.alllink", found[0]) == found[0] else None


def _agreed(binary: Binary, uses: "_Uses", name: str, symbol: tuple[int, int] | None) -> int | None:
    """The one address that at least two ways lead to; None if there is none."""
    found = [symbol[0]] if symbol else []
    found += [min(places) for d in _DERIVATIONS[name] if len(places := uses.places(name, d)) == 1]
    if len(set(found)) > 1:
        ways = ", ".join(f"{vaddr:#x}" for vaddr in dict.fromkeys(found))
        raise NotTraceable(f"{binary.path}: its symbols and its code disagree on where runtime.{name} is: {ways}")
    if len(found) < _ENOUGH:
        return None
    (vaddr,) = set(found)
    end = vaddr + uses.size_of(name)
    for segment in binary.segments:
        if segment.vaddr <= vaddr and end <= segment.vaddr + segment.memory_size and segment.writable:
            return vaddr
    raise NotTraceable(f"{binary.path}: damaged: runtime.{name} would be outside of its data, at {vaddr:#x}")


class _Uses:
    """Which data the functions of one binary use."""

    def __init__(self, binary: Binary, table: Pclntab, layout: Layout) -> None:
        self._binary = binary
        self._layout = layout
        functions = {function for ds in _DERIVATIONS.values() for d in ds for function, _ in d}
        functions.add(_UNRELATED)
        functions.update(function for recorders in _RECORDERS.values() for function in recorders)
        names = {_RUNTIME + name for function in functions for name in function.split("|")}
        self._functions = table.functions_named(names)
        self._targets: dict[str, frozenset[int]] = {}
        self._sched: frozenset[int] | None = None

    def targets(self, function: str) -> frozenset[int]:
        """The addresses in the code of a function; none if it isn't there."""
        if function not in self._targets:
            there = [f for name in function.split("|") if (f := self._functions.get(_RUNTIME + name))]
            operands = data_operands(self._binary, there[0]) if there else ()
            self._targets[function] = frozenset(operand.target_vaddr for operand in operands)
        return self._targets[function]

    def displacements(self, function: str) -> frozenset[int]:
        """What is added to registers in the code of a function; nothing if it isn't there."""
        there = self._functions.get(_RUNTIME + function)
        return displacements(self._binary, there) if there else frozenset()

    def _fields_of_sched(self) -> frozenset[int]:
        """Addresses in sched, wherever it could be."""
        if self._sched is None:
            ways = [self.places("sched", derivation) for derivation in _DERIVATIONS["sched"]]
            size = self.size_of("sched")
            self._sched = frozenset(a for places in ways for start in places for a in range(start, start + size, 4))
        return self._sched

    def places(self, name: str, derivation: tuple[_Use, ...]) -> frozenset[int]:
        """Where the variable could be by that derivation; nowhere if the layout lacks a field that tells."""
        possible: frozenset[int] | None = None
        for function, fields in derivation:
            for offset in self._offsets(fields):
                shifted = frozenset(target - offset for target in self.targets(function) - self.targets(_UNRELATED))
                possible = shifted if possible is None else possible & shifted
        if possible and name in _SLICES:  # where only one word is asked for, the words behind it look the same
            possible = frozenset(vaddr for vaddr in possible if vaddr - _WORD not in possible)
        if possible and name in _OUTSIDE_OF_SCHED:
            possible -= self._fields_of_sched()
        alignment = 4 if name == "gomaxprocs" else _WORD
        return frozenset(vaddr for vaddr in possible or () if vaddr % alignment == 0)

    def _offsets(self, fields: tuple[str, ...]) -> list[int]:
        """Of those fields that this version has."""
        known = self._layout.offsets
        found = []
        for field in fields:
            if field == _SELF or field in _SLICE_WORDS:
                found.append(int(field or 0))
            elif field == _OLD_END:
                if "timeHistogram.overflow" not in known:
                    found.append(known[TIME_TO_RUN] + known[_OLD_END])
            elif field in known:
                found.append(known[field])
        return found

    def size_of(self, name: str) -> int:
        """In bytes, at least."""
        struct = {"sched": "schedt", "memstats": "mstats", "gcController": "gcControllerState"}.get(name)
        if struct is None:
            return {"gomaxprocs": 4, "allm": _WORD}.get(name, 3 * _WORD)
        fields = [offset for field, offset in self._layout.offsets.items() if field.startswith(f"{struct}.")]
        return self._layout.sizes.get(struct, max(fields, default=0) + _WORD)
