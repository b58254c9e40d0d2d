"""Which functions of a Go binary to probe, at which instruction, and what then can and can't be seen.

The plan is made from the binary's own code. Every change of a goroutine's status goes through
``runtime.casgstatus`` or, for a few, through a compare-and-swap of its own; see
:mod:`schedtrace.symbols.status`. Two modes:

*casgstatus*: one probe on that function reports every transition with both states. Used from Go 1.26 on,
where system calls no longer go through it, and before if system calls are asked for: up to 1.25 each costs
two hits.

*functions*: the transitions that matter are each probed where they are made. A function that makes one
transition a call is probed at its entry; elsewhere the probe is on the ``call casgstatus`` itself, where
old and new state are in registers. Used up to Go 1.25, where it leaves system calls free, and whenever the
compiler copied casgstatus into its callers (PGO). A transition has one probe, so nothing is reported twice:

====================================  ========================================================================
running -> waiting                    park_m, entry. Passed to mcall by value, so it always exists
waiting -> runnable                   ready, entry; calls in injectglist (netpoll, sysmon), findRunnable and
                                      findRunnableGCWorker (schedule too up to 1.18), park_m (unlock failed)
runnable -> running                   execute, entry
dead -> runnable                      call in newproc1; else newproc's call of runqput
running -> runnable                   goschedImpl and goyield_m, entry
running -> dead                       gdestroy, entry (up to 1.21 goexit0)
syscall -> runnable                   exitsyscall0, entry; from 1.26 exitsyscallNoP, running -> runnable
running -> preempted                  preemptPark, entry, in both modes: casgstatus does not see it
running <-> waiting                   coroswitch_m, entry, in both modes, where linked (iter.Pull, 1.23+)
dead <-> syscall                      calls in needm and dropm: C threads that call into Go, if cgo is in use
====================================  ========================================================================

Left out in this mode on purpose: running -> waiting -> running of goroutines that go on running on the
system stack (GC workers, assists, stopping the world), growth of stacks, system calls. Checked against
runtime/proc.go and coro.go of 1.19 and 1.21 to 1.27.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.buildinfo import BuildInfo, read_buildinfo
from schedtrace.symbols.code import Site, call_sites, cheapest_site, constant_arguments, site_of_call
from schedtrace.symbols.function import Function
from schedtrace.symbols.layout import NEWEST_MINOR, Layout, layout_of
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.reasons import WAIT_REASON_STRING, read_wait_reasons
from schedtrace.symbols.status import StatusWriter, StatusWrites, find_status_writes
from schedtrace.symbols.symtab import Symtab

_RUNNABLE, _RUNNING, _SYSCALL, _WAITING, _DEAD = 1, 2, 3, 4, 6
_IDLE = 0


@dataclass(frozen=True)
class _Entry:
    """A function that makes one transition a call: probed at an instruction that still has its arguments."""

    program: str
    transition: tuple[int, int]
    arguments: int = 1


_ENTRIES: Mapping[str, _Entry] = {
    "park_m": _Entry("on_park_m", (_RUNNING, _WAITING)),
    "ready": _Entry("on_ready", (_WAITING, _RUNNABLE)),
    "execute": _Entry("on_execute", (_RUNNABLE, _RUNNING)),
    "goschedImpl": _Entry("on_goschedimpl", (_RUNNING, _RUNNABLE)),
    # goschedImpl inlined: these two do nothing else with a goroutine
    "gosched_m": _Entry("on_goschedimpl", (_RUNNING, _RUNNABLE)),
    "gopreempt_m": _Entry("on_goschedimpl", (_RUNNING, _RUNNABLE)),
    "goyield_m": _Entry("on_goyield_m", (_RUNNING, _RUNNABLE)),
    "gdestroy": _Entry("on_gdestroy", (_RUNNING, _DEAD)),
    "goexit0": _Entry("on_gdestroy", (_RUNNING, _DEAD)),
    "exitsyscall0": _Entry("on_exitsyscall_nop", (_SYSCALL, _RUNNABLE)),
    "exitsyscallNoP": _Entry("on_exitsyscall_nop", (_RUNNING, _RUNNABLE)),
}
# Reported by a probe of their own, or of no interest: see the module's text.
_OWN_SWAPS = {
    "casgstatus", "castogscanstatus", "casfrom_Gscanstatus", "casGToPreemptScan", "casGFromPreempted",
    "casgcopystack", "coroswitch_m", "allGsSnapshotSortedForGC",
}  # fmt: skip
_SYSCALLS = {"reentersyscall", "exitsyscall", "entersyscallblock"}
_SYSTEM_STACK = {
    "casGToWaiting", "casGToWaitingForGC", "casGToWaitingForSuspendG", "gcBgMarkWorker", "gcAssistAlloc1",
    "markroot", "gcMarkTermination", "gcMarkDone", "forEachP", "stopTheWorld", "stopTheWorldGC",
    "stopTheWorldWithSema", "traceAdvance", "writeheapdump_m", "debugCallWrap", "debugCallWrap1", "newstack",
    "copystack", "oneNewExtraM", "findGoroutineLeaks", "casgstatus",
}  # fmt: skip
# Woken here, run at once: where the call is gone, on_execute makes up for it.
_SCHEDULER = {"findRunnable", "findrunnable", "schedule", "(*gcControllerState).findRunnableGCWorker"}
_C_THREADS = {"needm", "dropm"}
_NAMES = [
    f"runtime.{name}"
    for name in (
        *_ENTRIES, *_OWN_SWAPS, *_SYSCALLS, "preemptPark", "injectglist", "newproc.func1", "newproc1",
        "runqput",
    )
] + [WAIT_REASON_STRING]  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """One uprobe: the BPF program ``program`` at an instruction of ``function``. ``vaddr`` is as linked;
    the kernel takes ``file_offset``. ``emulated`` is false for a dear probe, which the kernel
    single-steps."""

    function: str
    program: str
    vaddr: int
    file_offset: int
    site: str
    emulated: bool


@dataclass(frozen=True)
class ProbePlan:
    """All that ``inspect`` prints and the session needs. ``layout`` is None where the runtime's structs are
    not known; ``unseen`` says, for a reader, what the probes can't see; ``notes`` what else is odd."""

    path: str
    arch: str
    build_id: str | None
    go_version: str
    settings: Mapping[str, str]
    symbols: str  # "symtab" | "pclntab"
    mode: str  # "casgstatus" | "functions"
    mode_reason: str
    layout: Layout | None
    probes: tuple[Probe, ...]
    unseen: tuple[str, ...]
    notes: tuple[str, ...]


def make_plan(path: str, *, syscalls: bool = False) -> ProbePlan:
    """Decide how to watch the goroutines of the Go executable or shared object at ``path``.

    ``syscalls``: also report when goroutines enter and leave system calls (two hits each).

    Raises NotTraceable, saying why, if the file is no Go binary that can be watched; PermissionDenied if it
    may not be read.
    """
    with Binary.open(path) as binary:
        return _Planner(binary, syscalls).plan()


class FunctionNames:
    """Names functions by address for as long as it is open; reads the table when first asked.

    Addresses are as linked: of a position-independent executable or a shared object the caller first
    subtracts the load bias (start of its mapping - vaddr of the segment mapped there).
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._binary: Binary | None = None
        self._table: Pclntab | None = None

    def name(self, vaddr: int) -> str | None:
        """Name of the function whose code includes ``vaddr``; None if none does. Raises NotTraceable."""
        if self._table is None:
            self._binary = Binary.open(self._path)
            self._table = Pclntab.find(self._binary)
        return self._table.name_at(vaddr)

    def close(self) -> None:
        self._table = None
        if self._binary is not None:
            self._binary.close()
            self._binary = None

    def __enter__(self) -> "FunctionNames":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Planner:
    """Collects probes and what they leave unseen, for one binary."""

    binary: Binary
    syscalls: bool
    probes: list[Probe] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def plan(self) -> ProbePlan:
        info = read_buildinfo(self.binary)
        self.table = Pclntab.find(self.binary)
        symtab = Symtab.read(self.binary)
        self.functions = {
            name.removeprefix("runtime."): function
            for name, function in self.table.functions_named(_NAMES).items()
        }
        self._refuse_unsuitable(info)
        reasons = read_wait_reasons(self.binary, symtab, self.table.functions_named)
        self.layout = layout_of(self.binary, info.version, reasons)
        self.writes = self._status_writes()
        if self.layout and self.writes.offset not in (0, self.layout.offsets["g.atomicstatus"]):
            self.notes.append(
                f"the layout of {self.layout.toolchain} does not fit: an experiment or a fork of Go"
            )
            self.layout = None
        mode, why = self._mode()
        if mode == "casgstatus":
            self._add_entry("casgstatus", "on_casgstatus", 3)
        else:
            self._add_functions(info)
        self._add_both_modes()
        self._add_syscalls(mode)
        self._explain_layout(info)
        return ProbePlan(
            path=self.binary.path,
            arch=self.binary.arch.value,
            build_id=self.binary.build_id,
            go_version=info.version.text if info.version else "unknown",
            settings=info.settings,
            symbols="pclntab" if symtab is None else "symtab",
            mode=mode,
            mode_reason=why,
            layout=self.layout,
            probes=tuple(sorted(self.probes, key=lambda probe: probe.vaddr)),
            unseen=tuple(self.unseen),
            notes=tuple(self.notes),
        )

    def _refuse_unsuitable(self, info: BuildInfo) -> None:
        minor = info.version.minor if info.version else self.table.newest_minor
        if self.binary.arch is Arch.ARM64 and minor == 17:
            raise NotTraceable(
                f"{self.binary.path}: Go 1.17 on arm64 passes arguments on the stack; "
                "build it with Go 1.18 or newer"
            )
        if "casgstatus" not in self.functions:
            raise NotTraceable(
                f"{self.binary.path}: no function runtime.casgstatus in it; "
                "its Go runtime is not one that is known"
            )

    def _status_writes(self) -> StatusWrites:
        segment = self.binary.segment_at(self.table.text_vaddr)
        end = segment.vaddr + segment.file_size if segment else self.table.text_vaddr
        text = (self.table.text_vaddr, end)
        return find_status_writes(self.binary, text, self.functions["casgstatus"], self.table.function_at)

    @property
    def _syscalls_are_free(self) -> bool:
        """From Go 1.26 on system calls are entered and left without casgstatus."""
        return "exitsyscallNoP" in self.functions

    def _mode(self) -> tuple[str, str]:
        copied = sorted(self._copies())
        if copied:
            return "functions", f"the compiler copied casgstatus into {', '.join(copied)}"
        if self._syscalls_are_free:
            return "casgstatus", "complete, and system calls do not pass through it"
        if self.syscalls:
            return "casgstatus", "complete, with system calls as asked"
        return "functions", "leaves system calls free, which pass through casgstatus in this version"

    def _copies(self) -> list[str]:
        """Functions into which the compiler copied casgstatus."""
        expected = _OWN_SWAPS | (_SYSCALLS if self._syscalls_are_free else set())
        return [
            name for writer in self.writes.writers.values()
            if writer.swaps and (name := _short(writer.function)) not in expected
        ]  # fmt: skip

    def _add_functions(self, info: BuildInfo) -> None:
        """The function set: each transition where it is made."""
        uses_c = info.settings.get("CGO_ENABLED") != "0"
        for writer in self.writes.writers.values():
            name = _short(writer.function)
            outer = name.split(".")[0]  # "gcBgMarkWorker" of "gcBgMarkWorker.func2"
            if outer in _SYSTEM_STACK or name in _SYSCALLS or name in _OWN_SWAPS - {"coroswitch_m"}:
                continue
            if name in _C_THREADS and not uses_c:
                continue
            if name in _ENTRIES:
                self._add_transition_function(writer, _ENTRIES[name])
            else:
                self._add_calls(writer, _DEAD if name == "coroswitch_m" else None)
                self._make_up_for_copies(writer, name)
        self._require_complete()

    def _add_transition_function(self, writer: StatusWriter, entry: _Entry) -> None:
        """A function with one transition of its own: its entry, and its other calls of casgstatus."""
        name = _short(writer.function)
        self._add_entry(name, entry.program, entry.arguments)
        others = [
            call for call in writer.calls if self._transition(writer.function, call.vaddr) != entry.transition
        ]
        own_by_call = len(others) < len(writer.calls)
        for call in others:
            self._add_site(writer.function, "on_casgstatus", site_of_call(self.binary, writer.function, call))
        if len(writer.swaps) + own_by_call != 1:
            self._refuse_copy(name)

    def _add_calls(self, writer: StatusWriter, only_to: int | None) -> None:
        for call in writer.calls:
            old, new = self._transition(writer.function, call.vaddr)
            if old != _IDLE and (only_to is None or new == only_to):
                self._add_site(
                    writer.function, "on_casgstatus", site_of_call(self.binary, writer.function, call)
                )

    def _make_up_for_copies(self, writer: StatusWriter, name: str) -> None:
        """casgstatus was copied into a function that has no probe of its own."""
        if not writer.swaps or name == "coroswitch_m":
            return
        if name == "injectglist" and self.layout:
            self._add_entry(name, "on_injectglist", 1)
        elif name in ("newproc1", "newproc.func1", "newcoro.func1"):
            self._add_newproc()
        elif name in _SCHEDULER:
            self.unseen.append(
                "wait to run of goroutines that the scheduler itself wakes and runs at once (some network "
                "wakes): counted as none"
            )
        elif name in _C_THREADS:
            self.unseen.append("C threads that begin or end to call into Go")
        else:
            self._refuse_copy(name)

    def _add_newproc(self) -> None:
        """newproc's call of runqput(pp, gp, next): there the second argument register holds the new
        goroutine."""
        function, runqput = self.functions.get("newproc.func1"), self.functions.get("runqput")
        if function and runqput:
            calls = [call for call in call_sites(self.binary, function) if call.target_vaddr == runqput.vaddr]
            if len(calls) == 1:
                self._add_site(function, "on_newproc", site_of_call(self.binary, function, calls[0]))
                return
        self.unseen.append("the creation of goroutines: a new one is first seen when it runs")

    def _refuse_copy(self, name: str) -> None:
        raise NotTraceable(
            f"{self.binary.path}: profile-guided optimisation copied casgstatus into runtime.{name} "
            "in a way that no probe can follow; build it with -pgo=off"
        )

    def _require_complete(self) -> None:
        present = {probe.program for probe in self.probes}
        for name in ("park_m", "ready", "execute"):
            if f"on_{name}" not in present:
                raise NotTraceable(
                    f"{self.binary.path}: the compiler left no function runtime.{name} that could be probed; "
                    "build it with -pgo=off"
                )

    def _add_both_modes(self) -> None:
        """What casgstatus does not report in any mode."""
        if "preemptPark" in self.functions:
            self._add_entry("preemptPark", "on_preemptpark", 1)
        else:
            self.unseen.append(
                "goroutines stopped for a scan of their stacks: counted as running until woken"
            )
        if "coroswitch_m" in self.functions:
            if self.layout and "g.coroarg" in self.layout.offsets:
                self._add_entry("coroswitch_m", "on_coroswitch_m", 1)
            else:
                self.unseen.append(
                    "coroutine switches (iter.Pull): the goroutines involved are counted wrongly"
                )

    def _add_syscalls(self, mode: str) -> None:
        if not self.syscalls:
            if mode == "functions" or self._syscalls_are_free:
                self.unseen.append("system calls: a goroutine in one counts as running")
            return
        if mode == "casgstatus" and not self._syscalls_are_free:
            return
        for name, program in (
            ("reentersyscall", "on_reentersyscall"), ("entersyscallblock", "on_reentersyscall"),
            ("exitsyscall", "on_exitsyscall"),
        ):  # fmt: skip
            if name == "entersyscallblock" and mode == "casgstatus":
                continue  # still calls casgstatus
            if name in self.functions:
                self._add_entry(name, program, 0, goroutine=True)
            else:
                self.unseen.append(
                    f"system calls through runtime.{name}, which the compiler left no function of"
                )

    def _explain_layout(self, info: BuildInfo) -> None:
        if self.layout is None:
            version = info.version.text if info.version else "a Go version that the binary does not tell"
            self.unseen.append(
                f"wait reasons, causes of wakes, start functions: {version} is newer than "
                f"Go 1.{NEWEST_MINOR} or unknown, and the binary has no DWARF to tell where they are kept"
            )
        elif not self.layout.wait_reasons:
            self.unseen.append(
                "names of wait reasons: neither the binary nor this version of schedtrace has them"
            )

    def _transition(self, function: Function, vaddr: int) -> tuple[int | None, int | None]:
        """Old and new state at a call of casgstatus, where they are constants."""
        _, old, new = constant_arguments(self.binary, function, vaddr, 3)
        return old, new

    def _add_entry(self, name: str, program: str, arguments: int, *, goroutine: bool = False) -> None:
        function = self.functions.get(name) or self.writes.writers[f"runtime.{name}"].function
        site = cheapest_site(self.binary, function, arguments, goroutine=goroutine)
        if site is None:
            raise NotTraceable(
                f"{self.binary.path}: no instruction of {function.name} is certain to run once a call; "
                "please report it"
            )
        self._add_site(function, program, site)

    def _add_site(self, function: Function, program: str, site: Site) -> None:
        self.probes.append(
            Probe(function.name, program, site.vaddr, site.file_offset, str(site), site.emulated)
        )


def _short(function: Function) -> str:
    return function.name.removeprefix("runtime.")
