"""Which functions of a Go binary to probe, at which instruction, and what then can and can't be seen.

The plan is made from the binary's own code; what the functions do is told in :mod:`schedtrace.transitions`. A
transition has one probe, so none is reported twice. Two modes:

*casgstatus*: one probe, on that function, reports every transition with both states. Used from Go 1.26 on,
where system calls no longer pass through it, and before if system calls are asked for.

*functions*: each transition that matters is probed where it is made. A function that makes one transition a
call is probed at its entry; elsewhere the probe is on the instruction that calls casgstatus, where old and
new state are in registers, and reports as casgstatus itself would. Used up to Go 1.25, where a probe on
casgstatus would cost two hits a system call, and whenever the compiler copied casgstatus into its callers
(PGO).

In both modes preemptPark and coroswitch_m are probed, whose transitions casgstatus does not see.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypeVar

from schedtrace.abi import SITE_LIMIT, ProbeKind
from schedtrace.errors import NotTraceable
from schedtrace.runtime_plan import RuntimePlan, make_runtime_plan
from schedtrace.sampled_plan import SampledPlan, make_sampled_plan
from schedtrace.stops_plan import NAMES as STOPS_NAMES
from schedtrace.stops_plan import StopsPlan, make_stops_plan
from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.buildinfo import BuildInfo, read_buildinfo
from schedtrace.symbols.code import (
    Call,
    Site,
    call_sites,
    cheapest_site,
    constant_arguments,
    site_behind_call,
    site_of_call,
)
from schedtrace.symbols.function import Function
from schedtrace.symbols.layout import NEWEST_MINOR, Layout, layout_of
from schedtrace.symbols.names import FunctionNames as FunctionNames  # for those who may not import symbols
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.reasons import read_wait_reasons
from schedtrace.symbols.runtime_data import RuntimeData, find_runtime_data
from schedtrace.symbols.status import StatusWriter, StatusWrites, find_status_writes
from schedtrace.symbols.symtab import Symtab
from schedtrace.transitions import (
    C_THREADS,
    DEAD,
    HOTTEST,
    IDLE,
    NEW_GOROUTINE,
    ONE_TRANSITION,
    OWN_SWAPS,
    RUNNABLE,
    RUNNING,
    SCHEDULER,
    SYSCALL,
    SYSCALLS,
    WAITING,
    OneTransition,
    is_uninteresting,
)
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL

_Part = TypeVar("_Part")
_RUNTIME = "runtime."
_ONCE = "schedinit"  # runs once in a process's life
_NAMES = [
    _RUNTIME + name
    for name in (*ONE_TRANSITION, *OWN_SWAPS, *SYSCALLS, "preemptPark", *NEW_GOROUTINE, "runqput", _ONCE, *STOPS_NAMES)
]


@dataclass(frozen=True)
class Probe:
    """One uprobe at an instruction of ``function``; ``kind`` says what it means that it is hit. ``vaddr`` is as linked;
    the kernel takes ``file_offset``. ``emulated`` is false for a dear probe, which the kernel single-steps."""

    function: str
    kind: ProbeKind
    vaddr: int
    file_offset: int
    site: str
    emulated: bool


@dataclass(frozen=True)
class ProbePlan:
    """All that ``inspect`` prints and the session needs. ``probes`` has those first that are hit most.

    ``anchor``: file offset of the instruction for the probe that comes out last, see :mod:`schedtrace.probe_keeper`.
    ``layout`` is None where the runtime's structs are not known; ``unseen`` says, for a reader, what the
    probes can't see; ``notes`` what else is worth knowing. ``sampled``: what the sampled level needs; None if
    that isn't possible, and ``sampled_obstacle`` then says why. ``runtime``: where the runtime's own state is, or why
    that isn't known. ``stops``: how a recording sees stops of the world, or why it can't; "" if nobody asked.
    """

    path: str
    arch: str
    build_id: str | None
    go_version: str
    settings: Mapping[str, str]
    symbols: str  # "symtab" | "pclntab"
    mode: str  # "casgstatus" | "functions"; at the sampled level "record"
    mode_reason: str
    anchor: int
    layout: Layout | None
    probes: tuple[Probe, ...]
    unseen: tuple[str, ...]
    notes: tuple[str, ...]
    sampled: SampledPlan | None = None
    sampled_obstacle: str = ""
    runtime: RuntimePlan | str = ""
    stops: StopsPlan | str = ""

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that need probes and are possible."""
        return (*((SAMPLED_LEVEL,) if self.sampled else ()), FULL_LEVEL)

    def at_sampled_level(self) -> "ProbePlan":
        """The plan for the sampled level: one probe, on what the runtime hands its own samples to.

        Raises NotTraceable, saying why, if that level isn't possible.
        """
        sampled = self.sampled
        if sampled is None:
            why = f"the sampled level is not possible: {self.sampled_obstacle}"
            raise NotTraceable(f"{self.path}: {why}; use --level full")
        site = sampled.site
        probe = _probe(sampled.function, ProbeKind.RECORD, site)
        why = "the runtime hands its own samples to it"
        return replace(self, mode="record", mode_reason=why, probes=(probe,), unseen=sampled.unseen, notes=())

    def with_stops(self) -> "ProbePlan":
        """Of one that was made with ``stops`` the plan for a recording, which also sees stops of the world; where it
        can't, that is among ``unseen``."""
        if isinstance(self.stops, str):
            return replace(self, unseen=(*self.unseen, f"stops of the world: {self.stops}"))
        more = tuple(_probe(function, kind, site) for function, kind, site in self.stops.sites)
        if len(self.probes) + len(more) >= SITE_LIMIT:
            unseen = f"stops of the world: with those there would be more than {SITE_LIMIT - 1} probes"
            return replace(self, stops="", unseen=(*self.unseen, unseen))
        return replace(self, probes=(*self.probes, *more))


def make_plan(path: str, *, syscalls: bool = False, stops: bool = False) -> ProbePlan:
    """Decide how to watch the goroutines of the Go executable or shared object at ``path``.

    ``syscalls``: also report when goroutines enter and leave system calls (two hits each). ``stops``: also look for
    where stops of the world can be seen, for which all code is read.

    Raises NotTraceable, saying why, if the file is no Go binary that can be watched; PermissionDenied if it
    may not be read.
    """
    with Binary.open(path) as binary:
        return _Planner(binary, syscalls, stops).plan()


@dataclass
class _Planner:
    """Collects the probes for one binary, and what they leave unseen."""

    binary: Binary
    syscalls: bool
    stops: bool
    probes: list[Probe] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plan(self) -> ProbePlan:
        info = read_buildinfo(self.binary)
        self.table = Pclntab.find(self.binary)
        symtab = Symtab.read(self.binary)
        found = self.table.functions_named(_NAMES)
        self.functions = {name.removeprefix(_RUNTIME): function for name, function in found.items()}
        self._refuse_unsuitable(info)
        self.writes = self._status_writes()
        self.layout = self._layout(info, symtab)
        self.syscalls_are_free = "exitsyscallNoP" in self.functions  # Go 1.26 and later
        mode, why = self._mode()
        if mode == "casgstatus":
            self._add_entry(self.functions["casgstatus"], ProbeKind.CASGSTATUS, 3)
        else:
            self._add_functions(info)
        self._add_what_casgstatus_does_not_see()
        self._add_syscalls(mode)
        if dear := sorted({_short(probe.function) for probe in self.probes if not probe.emulated}):
            self.notes.append(f"dear probes, single-stepped by the kernel: {', '.join(dear)}")
        self.find_data = cache(lambda: self._find_data(symtab))
        sampled = self._or_why_not(self._sampled)
        return ProbePlan(
            path=self.binary.path,
            arch=self.binary.arch.value,
            build_id=self.binary.build_id,
            go_version=info.version.text if info.version else "unknown",
            settings=info.settings,
            symbols="pclntab" if symtab is None else "symtab",
            mode=mode,
            mode_reason=why,
            anchor=self.binary.file_offset(self.functions[_ONCE].vaddr),
            layout=self.layout,
            probes=tuple(sorted(self.probes, key=_heat)),
            unseen=tuple(self.unseen),
            notes=tuple(self.notes),
            sampled=None if isinstance(sampled, str) else sampled,
            sampled_obstacle=sampled if isinstance(sampled, str) else "",
            runtime=self._or_why_not(lambda: self._runtime(info)),
            stops=self._or_why_not(self._stops) if self.stops else "",
        )

    def _find_data(self, symtab: Symtab | None) -> RuntimeData:
        assert self.known_layout  # nobody asks without
        return find_runtime_data(self.binary, self.table, symtab, self.known_layout)

    def _sampled(self) -> SampledPlan:
        return make_sampled_plan(self.binary, self.table, self.layout, self.writes, self.find_data)

    def _runtime(self, info: BuildInfo) -> RuntimePlan:
        return make_runtime_plan(self.binary, self.table, info.version, self.known_layout, self.find_data)

    def _stops(self) -> StopsPlan:
        return make_stops_plan(self.binary, self.table, self.known_layout, self.functions)

    def _or_why_not(self, make: Callable[[], _Part]) -> _Part | str:
        try:
            return make()
        except NotTraceable as error:
            return str(error).removeprefix(f"{self.binary.path}: ")

    def _refuse_unsuitable(self, info: BuildInfo) -> None:
        minor = info.version.minor if info.version else self.table.newest_minor
        if self.binary.arch is Arch.ARM64 and minor == 17:
            raise self._refusal("Go 1.17 on arm64 passes arguments on the stack; build it with Go 1.18 or newer")
        if "casgstatus" not in self.functions:
            raise self._refusal("no function runtime.casgstatus in it: a Go runtime that is not known")

    def _status_writes(self) -> StatusWrites:
        code = self.table.ranges_named(_RUNTIME)
        return find_status_writes(self.binary, code, self.functions["casgstatus"], self.table.function_at)

    def _layout(self, info: BuildInfo, symtab: Symtab | None) -> Layout | None:
        reasons = read_wait_reasons(self.binary, symtab, self.table.functions_named)
        self.known_layout = layout = layout_of(self.binary, info.version, reasons)
        text = info.version.text if info.version else "its Go version is unknown"
        if layout is None:
            why = f"{text}: only Go up to 1.{NEWEST_MINOR} is known, and the binary has no DWARF"
        elif self.writes.offset and self.writes.offset != layout.offsets["g.atomicstatus"]:
            why = f"{text}: the binary's code does not agree with the layout of {layout.toolchain}"
            layout = None
        elif not layout.wait_reasons:
            self.unseen.append("names of wait reasons: neither the binary nor this version of schedtrace has them")
        if layout is None:
            self.unseen.append(f"wait reasons, causes of wakes, start functions ({why})")
        return layout

    def _mode(self) -> tuple[str, str]:
        if copies := sorted(self._copies()):
            return "functions", f"the compiler copied casgstatus into {', '.join(copies)}"
        if self.syscalls_are_free:
            return "casgstatus", "it sees every transition, and system calls do not pass through it"
        if self.syscalls:
            return "casgstatus", "it sees every transition, system calls among them, as asked for"
        return "functions", "leaves alone system calls, which pass through casgstatus in this version"

    def _copies(self) -> Iterator[str]:
        """Functions into which the compiler copied casgstatus, as far as that matters."""
        for writer in self.writes.writers.values():
            name = _short(writer.function.name)
            if name in OWN_SWAPS or is_uninteresting(name):
                continue
            if any(not (self.syscalls_are_free and _is_syscall(swap.old, swap.new)) for swap in writer.swaps):
                yield name

    def _add_functions(self, info: BuildInfo) -> None:
        """The functions mode: each transition where it is made."""
        for name, transition in ONE_TRANSITION.items():
            function, writer = self.functions.get(name), self.writes.writers.get(_RUNTIME + name)
            if function and (transition.always or writer):
                self._add_entry(function, transition.kind, 1)
                if writer:
                    self._add_other_transitions(writer, transition)
            elif name in ("park_m", "ready", "execute"):
                raise self._refusal(f"the compiler left no function runtime.{name} to probe; build it with -pgo=off")
        uses_c = info.settings.get("CGO_ENABLED") != "0"
        for writer in self.writes.writers.values():
            name = _short(writer.function.name)
            elsewhere = name in ONE_TRANSITION or name in SYSCALLS or name in OWN_SWAPS
            if not elsewhere and not is_uninteresting(name) and (uses_c or name not in C_THREADS):
                self._add_calls(writer)
                self._make_up_for_copies(writer)
        self._add_new_goroutines()
        self._add_end_of_coroutines()

    def _add_other_transitions(self, writer: StatusWriter, own: OneTransition) -> None:
        """What else a function does that is probed at its entry for its own transition."""
        for call in writer.calls:
            states = self._states(writer.function, call)
            if None not in states and states != (own.old, own.new):
                self._add_call(writer.function, call)
        for swap in writer.swaps:
            # A wake by park_m or the scheduler comes before a run, and the probe on execute makes up for it.
            if (swap.old, swap.new) not in ((own.old, own.new), (WAITING, RUNNABLE)):
                raise self._copied(writer.function)

    def _add_calls(self, writer: StatusWriter) -> None:
        """The calls of casgstatus in a function that has no program of its own."""
        for call in writer.calls:
            old, new = self._states(writer.function, call)
            if old != IDLE and (self.syscalls or not _is_syscall(old, new)):
                self._add_call(writer.function, call)

    def _make_up_for_copies(self, writer: StatusWriter) -> None:
        """casgstatus was copied into a function that has no program of its own."""
        name = _short(writer.function.name)
        swaps = [swap for swap in writer.swaps if self.syscalls or not _is_syscall(swap.old, swap.new)]
        if not swaps or name in NEW_GOROUTINE:
            return
        if name == "injectglist" and self.layout:
            self._add_entry(writer.function, ProbeKind.READY_LIST, 1)
        elif name in SCHEDULER:
            self.unseen.append(
                f"the wait to run of goroutines that {writer.function.name} wakes: counted as none"
            )
        elif name in C_THREADS or all(_is_syscall(swap.old, swap.new) for swap in swaps):
            self.unseen.append(f"what {writer.function.name} does to goroutines in system calls")
        else:
            raise self._copied(writer.function)

    def _add_new_goroutines(self) -> None:
        """Where casgstatus was copied into newproc1: newproc, right behind its call of newproc1, whose
        result is the new goroutine, or at its call of runqput(pp, gp, next)."""
        newproc, newproc1 = self.functions.get("newproc.func1"), self.functions.get("newproc1")
        makes = self._calls(newproc, newproc1)
        maker = newproc1 if makes else newproc
        if maker and any(probe.function == maker.name for probe in self.probes):
            return  # at its call of casgstatus
        queues = self._calls(newproc, self.functions.get("runqput"))
        if newproc and len(makes) == 1 and (site := site_behind_call(self.binary, newproc, makes[0])):
            self._add_site(newproc, ProbeKind.CREATED, site)
        elif newproc and len(queues) == 1:
            self._add_site(newproc, ProbeKind.CREATE, site_of_call(self.binary, newproc, queues[0], "runqput"))
        else:
            self.unseen.append("the creation of goroutines: a new one is first seen when it runs")

    def _add_end_of_coroutines(self) -> None:
        """gdestroy, where the compiler put it into coroswitch_m."""
        writer = self.writes.writers.get(f"{_RUNTIME}coroswitch_m")
        if writer is None:
            return
        for call in writer.calls:
            if self._states(writer.function, call)[1] == DEAD:
                self._add_call(writer.function, call)
        if any(swap.new == DEAD for swap in writer.swaps):
            self.unseen.append("the end of goroutines behind iter.Pull")

    def _add_what_casgstatus_does_not_see(self) -> None:
        if preempt_park := self.functions.get("preemptPark"):
            self._add_entry(preempt_park, ProbeKind.STOP, 1)
        else:
            self.unseen.append("goroutines stopped for a scan of their stack: they count as running until woken")
        coroswitch = self.functions.get("coroswitch_m")
        if coroswitch is None:
            return  # the linker leaves it out of programs without iter.Pull
        if self.layout and "g.coroarg" in self.layout.offsets:
            self._add_entry(coroswitch, ProbeKind.COROUTINE_SWITCH, 1)
        else:
            self.unseen.append("coroutine switches (iter.Pull): their goroutines' states may be wrong")

    def _add_syscalls(self, mode: str) -> None:
        if not self.syscalls:
            self.unseen.append("system calls: a goroutine in one counts as running")
            return
        for name in sorted(SYSCALLS):
            function, writer = self.functions.get(name), self.writes.writers.get(_RUNTIME + name)
            if name == "entersyscall" and writer is None:
                continue  # it calls reentersyscall
            if function is None:
                self.unseen.append(f"system calls, as far as they use runtime.{name}: the compiler left it out")
            elif writer and writer.calls and not writer.swaps:
                if mode == "functions":
                    self._add_calls(writer)  # else the probe on casgstatus sees them
            else:
                kind = ProbeKind.SYSCALL_EXIT if name == "exitsyscall" else ProbeKind.SYSCALL
                self._add_entry(function, kind, 0, goroutine=True)

    def _calls(self, caller: Function | None, callee: Function | None) -> list[Call]:
        if caller is None or callee is None:
            return []
        return [call for call in call_sites(self.binary, caller) if call.target_vaddr == callee.vaddr]

    def _states(self, function: Function, call: Call) -> tuple[int | None, int | None]:
        """Old and new state at a call of casgstatus(gp, old, new), where they are constants."""
        _, old, new = constant_arguments(self.binary, function, call, 3)
        return old, new

    def _add_call(self, function: Function, call: Call) -> None:
        """A call of casgstatus: reports what casgstatus itself would."""
        self._add_site(function, ProbeKind.CASGSTATUS, site_of_call(self.binary, function, call, "casgstatus"))

    def _add_entry(self, function: Function, kind: ProbeKind, arguments: int, *, goroutine: bool = False) -> None:
        site = cheapest_site(self.binary, function, arguments, goroutine=goroutine)
        if site is None:
            raise self._refusal(f"no instruction of {function.name} is certain to run once a call")
        self._add_site(function, kind, site)

    def _add_site(self, function: Function, kind: ProbeKind, site: Site) -> None:
        self.probes.append(_probe(function.name, kind, site))

    def _copied(self, function: Function) -> NotTraceable:
        return self._refusal(
            f"profile-guided optimisation copied casgstatus into {function.name} in a way that no probe can "
            "follow; build it with -pgo=off"
        )

    def _refusal(self, reason: str) -> NotTraceable:
        return NotTraceable(f"{self.binary.path}: {reason}")


def _probe(function: str, kind: ProbeKind, site: Site) -> Probe:
    return Probe(function, kind, site.vaddr, site.file_offset, str(site), site.emulated)


def _is_syscall(old: int | None, new: int | None) -> bool:
    return (old, new) in ((RUNNING, SYSCALL), (SYSCALL, RUNNING))


def _heat(probe: Probe) -> tuple[int, int]:
    name = _short(probe.function)
    return HOTTEST.index(name) if name in HOTTEST else len(HOTTEST), probe.vaddr


def _short(name: str) -> str:
    return name.removeprefix(_RUNTIME)
