"""Loading BPF into the kernel, and reading what it counted. The only module that imports bcc.

A :class:`Session` compiles bpf/, which only succeeds if the shared structs are those of :mod:`schedtrace.abi`, loads
the programs, attaches them and reads the maps. It knows addresses, offsets and numbers; names are given in
:mod:`schedtrace.join`.

Uprobes are made and held by a child (:mod:`schedtrace.probe_keeper`): through a link of many (Linux 6.6), on older
kernels through perf's uprobe PMU and, where that is refused, lines in tracefs' uprobe_events. All take the file by
inode: /proc/self/fd/N of an executable that is held open reaches binaries that were deleted, replaced, or lie in
another mount namespace.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from time import monotonic_ns
from types import FrameType
from typing import Any

import numpy as np

from schedtrace import abi, uprobe_multi, uprobe_pmu
from schedtrace.bpf_maps import MapReader
from schedtrace.bpf_text import source_text
from schedtrace.errors import AttachFailed, NodeUnsupported, SchedtraceError
from schedtrace.probe_keeper import Held, ProbeKeeper, Way
from schedtrace.uprobe_pmu import ANY_PROCESS

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ProbeSite:
    """Where a program goes: on the instruction at ``file_offset`` of an executable."""

    program: str
    """BPF function, for example "on_casgstatus"."""
    file_offset: int


@dataclass(frozen=True)
class Snapshot:
    """What the maps held at ``time_ns`` (CLOCK_MONOTONIC).

    ``stats``: numpy record of :class:`abi.TargetStats`, summed over CPUs (maxima are maxima).
    ``functions``: start_pc -> record of :class:`abi.Totals`, goroutines that have ended.
    ``goroutines``: array of :class:`abi.Goroutine` records, those that live.
    """

    time_ns: int
    stats: Any
    functions: Mapping[int, Any]
    goroutines: Array
    foreign_hits: int


@dataclass
class Attachment:
    """Probes on one executable."""

    held: list[Held] = field(default_factory=list)


class Session:
    """BPF programs and maps in the kernel, for at most ``max_targets`` processes. Close it, or use it in ``with``."""

    def __init__(
        self,
        programs: Sequence[str],
        *,
        max_targets: int = 1,
        max_goroutines: int = 1 << 17,
        max_functions: int = 1 << 14,
        max_threads: int = 1 << 14,
        process_events: bool = False,
    ) -> None:
        """Compile and load ``programs`` and the tracepoints. They do nothing until :meth:`watch`. With
        ``process_events`` also what :meth:`executed` needs.

        Raises NodeUnsupported if BCC is missing or the kernel refuses, AttachFailed if BCC's idea of the shared structs
        differs from ours.
        """
        self._targets: dict[int, int] = {}
        self._attachments: list[Attachment] = []
        self._programs: dict[tuple[str, bool], int] = {}
        self._max_goroutines = max_goroutines
        self._max_functions = max_functions
        self._max_threads = max_threads
        self._free_slots = list(range(max_targets))[::-1]
        sizes = {
            "MAX_TARGETS": max_targets,
            "MAX_GOROUTINES": max_goroutines,
            "MAX_FUNCTIONS": max_functions,
            "MAX_THREADS": max_threads,
        }
        # BCC wants a kernel source tree; our minimal headers are all that these programs need of one.
        bpf_folder = Path(str(files("schedtrace.bpf")))
        os.environ["BCC_KERNEL_SOURCE"] = str(bpf_folder / "headers")
        bcc = _import_bcc()
        self._bcc, self._lib = bcc, bcc.lib
        self._bpf: Any = None
        self._links_work = uprobe_multi.refusal() == 0
        with _explained("can't start the process that holds the probes", AttachFailed):
            self._keeper = ProbeKeeper()
        flags = [*_QUICK, *(f"-D{name}={value}" for name, value in sizes.items())]
        flags += [f"-DWITH_{program.upper()}" for program in programs]
        flags += ["-DWITH_PROCESS_EVENTS"] * process_events
        try:
            with _explained("the kernel or BCC refuses the BPF programs", NodeUnsupported), _uninterrupted():
                self._bpf = bcc.BPF(text=source_text(bpf_folder).encode(), cflags=flags)
            with _explained("the kernel refuses the BPF programs", NodeUnsupported):
                for program in programs:
                    self._program(program, multi=self._links_work)
            self._maps = MapReader(self._bpf, self._lib)
        except BaseException:
            self.close()
            raise

    def _program(self, name: str, *, multi: bool) -> int:
        """Descriptor of a loaded program. What it may be attached to is settled when it is loaded."""
        if (name, multi) not in self._programs:
            self._bpf.funcs.pop(name.encode(), None)  # BCC would hand out the one it has
            attach_type = uprobe_multi.ATTACH_TYPE if multi else -1
            self._programs[name, multi] = self._bpf.load_func(
                name.encode(), self._bcc.BPF.KPROBE, attach_type=attach_type
            ).fd
        return self._programs[name, multi]

    def _table(self, name: str) -> Any:
        return self._bpf[name.encode()]

    def attach(self, executable_fd: int, sites: Sequence[ProbeSite], pid: int = ANY_PROCESS) -> Attachment:
        """Put probes on the executable open at ``executable_fd``; with ``pid``, only in that process's memory.

        Raises AttachFailed; probes put in until then are taken out again.
        """
        attachment = Attachment()
        self._attachments.append(attachment)
        way = self._way(pid)
        offsets: dict[str, list[int]] = {}
        for site in sites:
            offsets.setdefault(site.program, []).append(site.file_offset)
        try:
            for program, file_offsets in offsets.items():
                with _explained(f"can't put probe {program} at offsets {file_offsets}", AttachFailed), _uninterrupted():
                    program_fd = self._program(program, multi=way == "link")
                    attachment.held += self._keeper.attach(way, program_fd, executable_fd, file_offsets, pid)
        except AttachFailed:
            self.detach([attachment])
            raise
        return attachment

    def _way(self, pid: int) -> Way:
        """How probes get into the kernel here."""
        if self._links_work and (pid == ANY_PROCESS or uprobe_multi.pid_filter_works()):
            return "link"
        return "perf" if uprobe_pmu.refusal() == 0 else "line"

    def detach(self, attachments: Sequence[Attachment]) -> None:
        """Take probes out. It waits for grace periods of the kernel (about 0.1 s each)."""
        held = [probe for attachment in attachments for probe in attachment.held]
        self._attachments = [attachment for attachment in self._attachments if attachment not in attachments]
        if held:
            with _uninterrupted():
                self._keeper.detach(held)

    def watch(self, pid: int, target: abi.Target) -> None:
        """Begin to count process ``pid``, whose executable carries the probes. Sets the target's slot and start."""
        table = self._table("targets")
        target.slot = self._free_slots.pop()
        target.attached_ns = monotonic_ns()
        self._targets[pid] = target.slot
        table[table.Key(pid)] = table.Leaf.from_buffer_copy(bytes(target))
        # Until now the target's own hits counted as those of a process nobody asked about.
        self._foreign_before = self._foreign_hits()
        self._learn_threads(pid, target.slot)

    def _learn_threads(self, pid: int, slot: int) -> None:
        """Threads made from now on are seen by task_newtask; those that exist are listed here."""
        table = self._table("threads")
        with suppress(OSError):
            for tid in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                key = table.Key(int(tid))
                if key not in table:
                    table[key] = table.Leaf(0, slot, 0)

    def is_watched(self, pid: int) -> bool:
        """Is ``pid`` being counted? Not before :meth:`watch` and after :meth:`unwatch`, and no longer as soon as it
        executes another program: the BPF program sees that first."""
        table = self._table("targets")
        return table.Key(pid) in table

    def unwatch(self, pid: int) -> None:
        """Count process ``pid`` no longer; what was counted can still be read."""
        self._unwatch([pid])

    def _unwatch(self, pids: Sequence[int]) -> None:
        table = self._table("targets")
        for pid in pids:
            with suppress(KeyError):
                del table[table.Key(pid)]
        # Those of a process that goes on would count for whoever has the slot next.
        keys, values = self._maps.entries("threads", ctypes.c_uint32, abi.Thread, self._max_threads)
        self._maps.delete("threads", keys[np.isin(values["slot"], [self._targets[pid] for pid in pids])])

    def snapshot(self, pid: int) -> Snapshot:
        """Read what was counted for ``pid`` since :meth:`watch`. Reads maps only; nothing is cleared."""
        slot = self._targets[pid]
        now_ns = monotonic_ns()
        keys, values = self._maps.entries("functions", abi.FunctionKey, abi.Totals, self._max_functions)
        ended = {int(k["start_pc"]): v for k, v in zip(keys, values, strict=True) if k["slot"] == slot}
        keys, values = self._goroutines()
        foreign = self._foreign_hits() - self._foreign_before
        return Snapshot(now_ns, self._maps.stats(slot), ended, values[keys["tgid"] == pid], foreign)

    def snapshots(self) -> dict[int, Snapshot]:
        """A snapshot of every target, without functions: one look at the goroutines for all."""
        now_ns = monotonic_ns()
        keys, values = self._goroutines()
        return self._snapshots(self._targets, now_ns, keys, values)

    def _goroutines(self) -> tuple[Array, Array]:
        return self._maps.entries("goroutines", abi.GoroutineKey, abi.Goroutine, self._max_goroutines)

    def _snapshots(self, pids: Iterable[int], now_ns: int, keys: Array, values: Array) -> dict[int, Snapshot]:
        """Snapshots without functions, from all goroutines there are."""
        order = np.argsort(keys["tgid"], kind="stable")
        found, starts = np.unique(keys["tgid"][order], return_index=True)
        own = dict(zip(found.tolist(), np.split(values[order], starts[1:]), strict=False))  # none: one empty piece
        none = values[:0]
        return {pid: Snapshot(now_ns, self._maps.stats(self._targets[pid]), {}, own.get(pid, none), 0) for pid in pids}

    def retire(self, pids: Sequence[int]) -> dict[int, Snapshot]:
        """Count these processes no longer, and forget them, so that others can take their places: the last snapshot of
        each, without functions. One look at each map for all of them."""
        self._unwatch(pids)
        now_ns = monotonic_ns()
        keys, values = self._goroutines()
        snapshots = self._snapshots(pids, now_ns, keys, values)
        self._maps.delete("goroutines", keys[np.isin(keys["tgid"], pids)])
        slots = [self._targets.pop(pid) for pid in pids]
        keys, _ = self._maps.entries("functions", abi.FunctionKey, abi.Totals, self._max_functions)
        self._maps.delete("functions", keys[np.isin(keys["slot"], slots)])
        for slot in slots:
            self._maps.zero_stats(slot)
        self._free_slots += slots
        return snapshots

    @property
    def has_room(self) -> bool:
        """Can one more process be watched?"""
        return bool(self._free_slots)

    def executed(self, callback: Callable[[int], None], on_lost: Callable[[int], None]) -> Sequence[int]:
        """Have ``callback`` called with the PID of every process on the node that executes a program, from
        :meth:`poll`; ``on_lost`` with how many were lost. Returns the descriptors to poll for."""
        table = self._table("process_events")

        def unpack(_cpu: int, data: int, _size: int) -> None:
            callback(int(abi.ProcessEvent.from_address(data).tgid))

        table.open_perf_buffer(unpack, page_cnt=_EVENT_PAGES, lost_cb=on_lost)
        return [self._lib.perf_reader_fd(reader) for reader in self._bpf.perf_buffers.values()]

    def poll(self) -> None:
        """Make the calls that :meth:`executed` asked for. Doesn't wait."""
        # Not perf_buffer_poll: the caller's own poll has taken the readiness, which perf reports once.
        self._bpf.perf_buffer_consume()

    def _foreign_hits(self) -> int:
        return int(self._maps.per_cpu("foreign_hits", 0, np.dtype(np.uint64)).sum())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all probes out and free the maps. May be called twice."""
        # BCC would take up what was left half done when Python ends, and close the same descriptors again.
        with _uninterrupted():
            self.detach(self._attachments)
            self._keeper.close()
            if self._bpf:
                self._bpf.cleanup()


_EVENT_PAGES = 64
# Of no use to these programs, and a tenth of the time to compile.
_QUICK = ("-g0", "-fno-unroll-loops", "-fno-vectorize", "-fno-slp-vectorize")


def _import_bcc() -> Any:
    try:
        import bcc
        import bcc.libbcc
    except (ImportError, OSError, AttributeError) as error:
        # OSError: its library is missing; AttributeError: the library is another one
        raise NodeUnsupported(
            f"BCC's Python module can't be used ({error}): install the distribution's package "
            "(Debian, Ubuntu: apt-get install python3-bpfcc) and run in a Python that sees it; the package bcc on "
            "PyPI is another thing"
        ) from None
    bcc.lib = bcc.libbcc.lib
    return bcc


@contextmanager
def _explained(what: str, kind: type[SchedtraceError]) -> Iterator[None]:
    """Turn a failure inside BCC into one line. libbcc writes the reason to file descriptor 2: it is caught here."""
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except Exception as error:  # noqa: BLE001 (BCC raises plain Exception)
            caught.seek(0)
            lines = caught.read().decode(errors="replace").strip().splitlines()
            # The compiler's first error is the reason, its last line a count; others end with the reason.
            compiler_errors = [line for line in lines if ": error: " in line]
            said = "; ".join(line.strip() for line in compiler_errors[:1] or lines[-2:])
            raise kind(f"{what}: {error}{': ' + said if said else ''}") from None
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM while something is done that must not stop half way; they count afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs the handlers of signals in its main thread
        return
    arrived: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    ours = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, remember) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
