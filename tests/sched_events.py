"""What threads and goroutines of one program do, as the kernel's own tracing (tracefs) writes it down event by event:
an account that has nothing in common with BPF programs that count.

The kernel's ring buffers keep sched_switch and sched_wakeup of all threads that carry the program's name, and what
passes runtime.casgstatus, with the thread that does. Which goroutine runs on a thread follows from the latter: nothing
is read from the runtime's memory. From Go 1.26 system calls don't pass there, and goroutines stopped for a scan of
their stacks never do, so that their functions are watched as well.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from schedtrace.symbols.binary import Binary
from schedtrace.symbols.pclntab import Pclntab
from tools import toolchains

_TRACING = Path("/sys/kernel/tracing")
_BUFFER_KB = 65536
_LINE = re.compile(r"\s*.+?-(\d+)\s+\[\d+\] \S+ +(\d+)\.(\d{6}): (\w+): (.*)", re.DOTALL)
_FIELD = re.compile(r"(\w+)=(\S+)")
_RUNNABLE, _RUNNING, _WAITING, _COPYSTACK = 1, 2, 4, 8
_TRAP_NS = 6_000


@dataclass
class OffCpu:
    """Time in ns, and number of intervals, that goroutines ran for Go and their threads were off the CPU, by why."""

    ns: Counter[str] = field(default_factory=Counter)
    uncertain_ns: int = 0
    """Preempted right behind a probe: it sits before the change of status, so that this has perhaps not been made yet,
    and the kernel gladly preempts at the end of a trap."""
    times: Counter[str] = field(default_factory=Counter)

    def add(self, reason: str, ns: int) -> None:
        """One more."""
        self.ns[reason] += ns
        self.times[reason] += 1


@dataclass
class WaitsToRun:
    """Time in ns that goroutines were runnable until they ran, all of it, and of it while the thread that then ran them
    was runnable and not running; and how many such waits there were."""

    total_ns: int = 0
    kernel_ns: int = 0
    times: int = 0


@dataclass
class _CpuWaits:
    """Of a thread: since when it is runnable and not running, 0 if it is not, and its waits until now."""

    on_cpu: bool = False
    since_ns: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)

    def overlap_ns(self, begin_ns: int, end_ns: int) -> int:
        total = 0
        for begin, end in reversed(self.waits):
            if end <= begin_ns:
                break
            total += max(min(end, end_ns) - max(begin, begin_ns), 0)
        return total


@dataclass
class _Thread:
    goroutine: int = 0
    changed_ns: int = 0
    """When it passed a probe last."""
    running: bool = False
    off_since_ns: int = 0
    woken_ns: int = 0
    blocked: bool = False
    doubtful: list[tuple[str, int]] = field(default_factory=list)
    """Off the CPU while the runtime calls its goroutine waiting: it runs if it is never readied."""


class SchedEvents:
    """A trace that goes on; see :func:`sched_events`."""

    def __init__(self, instance: Path, name: str) -> None:
        self._instance = instance
        self._name = name[:15]

    def stop(self) -> None:
        """Write down no more."""
        (self._instance / "tracing_on").write_text("0")

    def off_cpu(self) -> OffCpu:
        """The account. Raises RuntimeError if the kernel has overwritten events."""
        self._refuse_loss()
        account, threads = OffCpu(), dict[int, _Thread]()
        for tid, ns, event, fields in self._events():
            _take(account, threads, tid, ns, event, fields)
        return account

    def waits_to_run(self) -> WaitsToRun:
        """The account of waits to run, each known to a microsecond. Raises RuntimeError if events were overwritten."""
        self._refuse_loss()
        account, threads, since = WaitsToRun(), dict[int, _CpuWaits](), dict[str, int]()
        for tid, ns, event, fields in self._events():
            thread = threads.setdefault(tid, _CpuWaits())
            if event == "sched_wakeup":
                woken = threads.setdefault(int(fields["pid"]), _CpuWaits())
                if not woken.on_cpu and not woken.since_ns:
                    woken.since_ns = ns
            elif event == "sched_switch":
                thread.on_cpu, thread.since_ns = False, ns if fields["prev_state"].startswith("R") else 0
                following = threads.setdefault(int(fields["next_pid"]), _CpuWaits())
                if following.since_ns:
                    following.waits.append((following.since_ns, ns))
                following.on_cpu, following.since_ns = True, 0
            elif event == "status":
                old, new = int(fields["old"], 0), int(fields["new"], 0)
                if new == _RUNNABLE:
                    since[fields["g"]] = ns
                elif old == _RUNNABLE and new == _RUNNING and (began := since.pop(fields["g"], 0)):
                    account.times += 1
                    account.total_ns += ns - began
                    account.kernel_ns += thread.overlap_ns(began, ns)
        return account

    def _refuse_loss(self) -> None:
        for file in self._instance.glob("per_cpu/cpu*/stats"):
            for line in file.read_text().splitlines():
                what, _, number = line.partition(": ")
                if what in ("overrun", "commit overrun", "dropped events") and int(number):
                    raise RuntimeError(f"{number} events lost ({what})")

    def _events(self) -> Iterator[tuple[int, int, str, dict[str, str]]]:
        with (self._instance / "trace").open() as file:
            whole = ""
            for line in [*file, ""]:
                if line and not _LINE.match(line):
                    whole += line  # somebody's name has a line break in it
                    continue
                match, whole = _LINE.match(whole), line
                if match:
                    tid, seconds, fraction, event, rest = match.groups()
                    yield int(tid), (int(seconds) * 1_000_000 + int(fraction)) * 1000, event, dict(_FIELD.findall(rest))


def _take(
    account: OffCpu, threads: dict[int, _Thread], tid: int, ns: int, event: str, fields: dict[str, str]
) -> None:
    thread = threads.setdefault(tid, _Thread())
    if not event.startswith("sched_"):
        thread.changed_ns = ns
    if event == "status":
        _status(account, thread, int(fields["g"], 16), int(fields["old"], 0), int(fields["new"], 0))
    elif event in ("enter", "stop"):
        thread.running = False
    elif event == "leave":
        thread.running = True
    elif event == "sched_wakeup":
        woken = threads.setdefault(int(fields["pid"]), _Thread())
        if woken.off_since_ns and woken.blocked and not woken.woken_ns:
            woken.woken_ns = ns
    elif event == "sched_switch":
        thread.off_since_ns, thread.woken_ns = ns, 0
        thread.blocked = not fields["prev_state"].startswith("R")
        following = threads.setdefault(int(fields["next_pid"]), _Thread())
        if following.off_since_ns:
            _back(account, following, ns)


def _back(account: OffCpu, thread: _Thread, ns: int) -> None:
    parts = [("preempted", ns - thread.off_since_ns)]
    if thread.blocked:
        woken_ns = thread.woken_ns or ns
        parts = [("blocked", woken_ns - thread.off_since_ns), ("woken", ns - woken_ns)]
    uncertain = not thread.blocked and thread.off_since_ns - thread.changed_ns <= _TRAP_NS
    thread.off_since_ns = 0
    if uncertain:
        account.uncertain_ns += parts[0][1]
    elif thread.running:
        for part in parts:
            account.add(*part)
    elif thread.goroutine:
        thread.doubtful += parts


def _status(account: OffCpu, thread: _Thread, g: int, old: int, new: int) -> None:
    if old == _RUNNING and new == _WAITING:
        thread.running, thread.goroutine = False, g
        thread.doubtful.clear()
    elif new == _RUNNING:
        if old == _WAITING and thread.goroutine == g:  # it worked on the system stack
            for part in thread.doubtful:
                account.add(*part)
        thread.running, thread.goroutine = True, 0
        thread.doubtful.clear()
    elif old == _RUNNING and new != _COPYSTACK:
        thread.running, thread.goroutine = False, 0


@contextmanager
def sched_events(program: Path, version: str) -> Iterator[SchedEvents]:
    """Write down what threads of ``program``, built by that Go version for amd64, do, from now on."""
    group = f"schedtrace_test_{os.getpid()}"
    with Binary.open(program) as binary:
        names = {"status": "runtime.casgstatus", "stop": "runtime.preemptPark"}
        if toolchains.minor(version) >= 26:
            names.update(enter="runtime.reentersyscall", leave="runtime.exitsyscall")
        functions = Pclntab.find(binary).functions_named(set(names.values()))
        places = {event: binary.file_offset(functions[name].vaddr) for event, name in names.items()}
    arguments = {"status": "g=%ax:x64 old=%bx:u32 new=%cx:u32"}
    instance = _TRACING / "instances" / group
    try:
        for event, offset in places.items():
            _define(f"p:{group}/{event} {program}:{offset:#x} {arguments.get(event, '')}")
        instance.mkdir()
        try:
            comm = program.name[:15]
            (instance / "trace_clock").write_text("mono")
            (instance / "buffer_size_kb").write_text(str(_BUFFER_KB))
            switch, wakeup = instance / "events/sched/sched_switch", instance / "events/sched/sched_wakeup"
            (switch / "filter").write_text(f'prev_comm == "{comm}" || next_comm == "{comm}"')
            (wakeup / "filter").write_text(f'comm == "{comm}"')
            for folder in (switch, wakeup, instance / "events" / group):
                (folder / "enable").write_text("1")
            yield SchedEvents(instance, comm)
            (instance / "events/enable").write_text("0")
        finally:
            (instance / "events/enable").write_text("0")
            instance.rmdir()
    finally:
        for event in places:
            _define(f"-:{group}/{event}")


def _define(line: str) -> None:
    descriptor = os.open(_TRACING / "uprobe_events", os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)
