"""Loading BPF into the kernel, and reading what it counted. The only module that imports bcc.

A :class:`Compilation` compiles bpf/, which only succeeds if the shared structs are those of :mod:`schedtrace.abi`. A
:class:`Session` loads the programs, attaches them and reads the maps. It knows addresses, offsets and numbers; names
are given in :mod:`schedtrace.join`.

This module imports little, so that the compiler can begin while the rest is imported.

Uprobes are made and held by a child (:mod:`schedtrace.probe_keeper`): through a link of many (Linux 6.6), on older
kernels through perf's uprobe PMU and, where that is refused, lines in tracefs' uprobe_events. All take the file by
inode: /proc/self/fd/N of an executable that is held open reaches binaries that were deleted, replaced, or lie in
another mount namespace.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Self

from schedtrace import abi, tracefs, uprobe_multi, uprobe_pmu
from schedtrace.bpf_text import FOLDER, OPTIONAL_PROGRAMS, source_text
from schedtrace.errors import AttachFailed, NodeUnsupported
from schedtrace.guards import explained, uninterrupted
from schedtrace.probe_keeper import Held, ProbeKeeper, Way
from schedtrace.uprobe_pmu import ANY_PROCESS

if TYPE_CHECKING:
    import numpy as np

    from schedtrace.event_ring import EventRing

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ProbeSite:
    """Where a program goes: on the instruction at ``file_offset`` of an executable."""

    program: str
    """BPF function, for example "on_probe"."""
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


@dataclass(frozen=True)
class Sizes:
    """How many entries the maps have. This process is a target, too, while the cost of a hit is measured."""

    targets: int = 2
    goroutines: int = 1 << 17
    functions: int = 1 << 14
    threads: int = 1 << 14


class Compilation:
    """BCC's work on bpf/, in a thread: nothing has to wait for it before a :class:`Session` is made of it. Close it, or
    use it in ``with``.

    Until it is closed or a session has been made, what is written to descriptor 2 may be lost: report nothing there.
    """

    def __init__(
        self,
        sizes: Sizes = Sizes(),
        programs: Collection[str] = (),
        *,
        process_events: bool = False,
        recording_pages: int = 0,
    ) -> None:
        """Begin. ``programs``: what will be needed, as far as that is known. With ``process_events`` also what
        :meth:`Session.executed` needs; with ``recording_pages`` what :meth:`Session.events` needs: the size of its
        buffer, a power of two."""
        self.sizes = sizes
        self._process_events = process_events
        self.recording_pages = recording_pages
        # BCC wants a kernel source tree; our minimal headers are all that these programs need of one.
        os.environ["BCC_KERNEL_SOURCE"] = str(FOLDER / "headers")
        self._bpf: Any = None
        self._begin(programs)

    def _begin(self, programs: Collection[str]) -> None:
        self._optional = OPTIONAL_PROGRAMS.intersection(programs)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._compile, name="compilation")
        with uninterrupted():
            self._thread.start()

    def _compile(self) -> None:
        flags = [*_QUICK, *(f"-DMAX_{name.upper()}={value}" for name, value in vars(self.sizes).items())]
        flags += [f"-DWITH_{program.upper()}" for program in self._optional]
        flags += ["-DWITH_PROCESS_EVENTS"] * self._process_events
        flags += [f"-DRECORDING_PAGES={self.recording_pages}"] * bool(self.recording_pages)
        try:
            tracefs.ensure_mounted()  # BCC reads what arguments a tracepoint has
            bcc = _import_bcc()
            # Not yet on tracepoints: to take programs out of them takes 0.2 s, which a refusal need not wait for.
            detached = type("Detached", (bcc.BPF,), {"_trace_autoload": lambda _self: None})
            with explained("the kernel or BCC refuses the BPF programs", NodeUnsupported):
                self._bpf = detached(text=source_text().encode(), cflags=flags)
        except Exception as error:  # noqa: BLE001 (raised again by finish)
            self._failure = error

    def finish(self, programs: Collection[str]) -> Any:
        """Wait until it is done, and attach the tracepoints. Returns BCC's object, with ``programs`` in it and the maps
        made. To be called once.

        Raises NodeUnsupported if BCC is missing or the kernel refuses, also because BCC's idea of the shared structs
        differs from ours; what :func:`tracefs.ensure_mounted` raises.
        """
        if not OPTIONAL_PROGRAMS.intersection(programs) <= self._optional:
            # Only now the plan is known, and it is one of the few that need one of these.
            self.close()
            self._begin(programs)
        with uninterrupted():
            self._thread.join()
        if self._failure:
            raise self._failure
        with explained("the kernel refuses the BPF programs", NodeUnsupported), uninterrupted():
            _import_bcc().BPF._trace_autoload(self._bpf)  # noqa: SLF001
        return self._bpf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until it is done, and free all. May be called twice."""
        # BCC would take up what was left half done when Python ends, and close the same descriptors again.
        with uninterrupted():
            self._thread.join()
            if self._bpf:
                self._bpf.cleanup()


class Session:
    """BPF programs and maps in the kernel. Close it, or use it in ``with``."""

    def __init__(self, compilation: Compilation, programs: Collection[str]) -> None:
        """Load ``programs`` and the tracepoints. They do nothing until :meth:`watch`. Closing the session closes the
        compilation.

        Raises what :meth:`Compilation.finish` raises, NodeUnsupported if the kernel refuses, AttachFailed.
        """
        from schedtrace.bpf_maps import MapReader  # and numpy, while the compilation goes on

        self._compilation = compilation
        self._sizes = compilation.sizes
        self._targets: dict[int, int] = {}
        self._attachments: list[Attachment] = []
        self._programs: dict[tuple[str, bool], int] = {}
        self._free_slots = list(range(self._sizes.targets))[::-1]
        self._foreign_before = 0
        self._foreign_after: int | None = None
        try:
            self._keeper = ProbeKeeper()
        except OSError as error:
            raise AttachFailed(f"can't start the process that holds the probes: {error}") from None
        try:
            self._links_work = uprobe_multi.refusal() == 0
            self._bpf = compilation.finish(programs)
            self._bcc = _import_bcc()
            self._lib = self._bcc.lib
            with explained("the kernel refuses the BPF programs", NodeUnsupported):
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
                with explained(f"can't put probe {program} at offsets {file_offsets}", AttachFailed), uninterrupted():
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
            with uninterrupted():
                self._keeper.detach(held)

    def watch(self, pid: int, target: abi.Target, *, time_before: bool = True) -> None:
        """Begin to count process ``pid``, whose executable carries the probes. Sets the target's slot and start.

        What state a goroutine is in shows at its first move. With ``time_before`` the time since now then counts for a
        goroutine that was waiting or runnable; a counter that is read again and again would jump by it.
        """
        table = self._table("targets")
        target.slot = self._free_slots.pop()
        target.attached_ns = monotonic_ns() if time_before else 0
        self._targets[pid] = target.slot
        table[table.Key(pid)] = table.Leaf.from_buffer_copy(bytes(target))
        # Until now the target's own hits counted as those of a process nobody asked about.
        self._foreign_before, self._foreign_after = self._foreign_hits(), None
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
        self._foreign_after = self._foreign_hits()  # from now on the target's own are among them
        self._unwatch([pid])

    def _unwatch(self, pids: Sequence[int]) -> None:
        table = self._table("targets")
        for pid in pids:
            with suppress(KeyError):
                del table[table.Key(pid)]
        # Those of a process that goes on would count for whoever has the slot next.
        keys, values = self._maps.entries("threads", ctypes.c_uint32, abi.Thread, self._sizes.threads)
        self._maps.delete_of("threads", keys, values["slot"], [self._targets[pid] for pid in pids])

    def snapshot(self, pid: int) -> Snapshot:
        """Read what was counted for ``pid`` since :meth:`watch`. Reads maps only; nothing is cleared."""
        slot = self._targets[pid]
        now_ns = monotonic_ns()
        keys, values = self._maps.entries("functions", abi.FunctionKey, abi.Totals, self._sizes.functions)
        ended = {int(k["start_pc"]): v for k, v in zip(keys, values, strict=True) if k["slot"] == slot}
        keys, values = self._goroutines()
        foreign = self._foreign_hits() if self._foreign_after is None else self._foreign_after
        own = values[keys["tgid"] == pid]
        return Snapshot(now_ns, self._maps.stats(slot), ended, own, foreign - self._foreign_before)

    def snapshots(self) -> dict[int, Snapshot]:
        """A snapshot of every target, without functions: one look at the goroutines for all."""
        now_ns = monotonic_ns()
        keys, values = self._goroutines()
        return self._snapshots(self._targets, now_ns, keys, values)

    def _goroutines(self) -> tuple[Array, Array]:
        return self._maps.entries("goroutines", abi.GoroutineKey, abi.Goroutine, self._sizes.goroutines)

    def _snapshots(self, pids: Iterable[int], now_ns: int, keys: Array, values: Array) -> dict[int, Snapshot]:
        """Snapshots without functions, from all goroutines there are."""
        own, none = self._maps.grouped(values, keys["tgid"]), values[:0]
        return {pid: Snapshot(now_ns, self._maps.stats(self._targets[pid]), {}, own.get(pid, none), 0) for pid in pids}

    def retire(self, pids: Sequence[int]) -> dict[int, Snapshot]:
        """Count these processes no longer, and forget them, so that others can take their places: the last snapshot of
        each, without functions. One look at each map for all of them."""
        self._unwatch(pids)
        now_ns = monotonic_ns()
        keys, values = self._goroutines()
        snapshots = self._snapshots(pids, now_ns, keys, values)
        self._maps.delete_of("goroutines", keys, keys["tgid"], pids)
        slots = [self._targets.pop(pid) for pid in pids]
        keys, _ = self._maps.entries("functions", abi.FunctionKey, abi.Totals, self._sizes.functions)
        self._maps.delete_of("functions", keys, keys["slot"], slots)
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

    def events(self) -> EventRing:
        """What the programs send for a recording: every transition of every target, and each switch of their threads.
        Raises AttachFailed."""
        from schedtrace.event_ring import EventRing

        with explained("can't map the buffer of events", AttachFailed):
            return EventRing(
                self._maps.descriptor("events"),
                self._compilation.recording_pages,
                lambda: self._maps.per_cpu("events_lost", 0, "u8"),
            )

    def _foreign_hits(self) -> int:
        return self._maps.counter("foreign_hits")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all probes out and free the maps. May be called twice."""
        with uninterrupted():
            self.detach(self._attachments)
            self._keeper.close()
            self._compilation.close()


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
