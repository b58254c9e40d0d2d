"""Loading BPF into the kernel, and reading what it counted.

A :class:`Session` loads the programs that :mod:`schedtrace.compilation` has compiled, attaches them and reads the maps.
It knows addresses, offsets and numbers; names are given in :mod:`schedtrace.join`.

Uprobes are made and held by a child (:mod:`schedtrace.probe_keeper`): through a link of many (Linux 6.6), on older
kernels through perf's uprobe PMU and, where that is refused, lines in tracefs' uprobe_events. All take the file by
inode: /proc/self/fd/N of an executable that is held open reaches binaries that were deleted, replaced, or lie in
another mount namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Self

from schedtrace import abi, uprobe_multi, uprobe_pmu
from schedtrace.compilation import Compilation, import_bcc
from schedtrace.errors import AttachFailed, NodeUnsupported
from schedtrace.guards import explained, uninterrupted
from schedtrace.probe_keeper import Held, KeptWindow, ProbeKeeper, Way
from schedtrace.uprobe_pmu import ANY_PROCESS

if TYPE_CHECKING:
    import numpy as np

    from schedtrace.event_ring import EventRing

    Array = np.ndarray[Any, Any]


ANCHOR = "anchor"
"""Not a BPF function: the probe that does nothing and is taken out last, see :mod:`schedtrace.probe_keeper`."""


@dataclass(frozen=True)
class ProbeSite:
    """Where a program goes: on the instruction at ``file_offset`` of an executable."""

    program: str
    """BPF function, for example "on_probe"; or :data:`ANCHOR`."""
    file_offset: int


@dataclass(frozen=True)
class Snapshot:
    """What the maps held at ``time_ns`` (CLOCK_MONOTONIC), which is the window's end once that has passed, ``seen_ns``
    after the counting began.

    ``stats``: numpy record of :class:`abi.TargetStats`, summed over CPUs (maxima are maxima).
    ``functions``: start_pc -> record of :class:`abi.Totals`, goroutines that have ended.
    ``goroutines``: array of :class:`abi.Goroutine` records, those that live.
    ``keys``: their array of :class:`abi.GoroutineKey`, None in snapshots of many processes.
    ``samples``: numpy record of :class:`abi.SampleStats`, summed as ``stats``; None unless it was watched so.
    """

    time_ns: int
    stats: Any
    functions: Mapping[int, Any]
    goroutines: Array
    foreign_hits: int
    keys: Array | None = None
    seen_ns: int = 0
    samples: Any = None

    @property
    def hits(self) -> list[int]:
        """Of its probes, by site."""
        return list(self.stats["hits"].tolist())

    @property
    def timed(self) -> tuple[int, int]:
        """Of some hits, how long the programs took, in ns, and how many those are."""
        return _timed(self.stats)


def _timed(stats: Any) -> tuple[int, int]:
    return int(stats["timed_ns"]), int(stats["timed"])


@dataclass
class Attachment:
    """Probes on one executable."""

    held: list[Held] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """Probes on one executable until a time (CLOCK_MONOTONIC), after which nothing is counted; ``number``: in the map
    of windows."""

    number: int
    until_ns: int


_ENDLESS = 0
"""The window of those that are counted until :meth:`Session.unwatch`."""


class Session:
    """BPF programs and maps in the kernel. Close it, or use it in ``with``."""

    def __init__(self, compilation: Compilation, programs: Collection[str]) -> None:
        """Load ``programs`` and the tracepoints. They do nothing until :meth:`watch`. Closing the session closes the
        compilation.

        Raises what :meth:`Compilation.finish` raises, NodeUnsupported if the kernel refuses, AttachFailed.
        """
        from schedtrace.bpf_maps import MapReader  # and numpy, while the compilation goes on
        from schedtrace.thread_watch import ThreadWatch

        self._compilation = compilation
        self._sizes = compilation.sizes
        self._targets: dict[int, int] = {}
        self._watched: dict[int, tuple[int, int]] = {}  # PID -> window, since when in ns
        self._attachments: list[Attachment] = []
        self._programs: dict[tuple[str, bool], int] = {}
        self._sampled: set[int] = set()  # PIDs
        self._free_slots = list(range(self._sizes.targets))[::-1]
        self._free_windows = list(range(1, self._sizes.targets + 1))[::-1]
        self._foreign_before = 0
        self._foreign_after: int | None = None
        try:
            self._keeper = ProbeKeeper()
        except OSError as error:
            raise AttachFailed(f"can't start the process that holds the probes: {error}") from None
        try:
            self._links_work = uprobe_multi.refusal() == 0
            self._bpf = compilation.finish(programs)
            self._bcc = import_bcc()
            self._lib = self._bcc.lib
            with explained("the kernel refuses the BPF programs", NodeUnsupported):
                for program in programs:
                    self._program(program, multi=self._links_work)
            self._maps = MapReader(self._bpf, self._lib)
            sizes = self._sizes
            self.threads = ThreadWatch(self._maps, sizes.targets, sizes.threads, sizes.functions)
            """The processes whose threads are watched, with or without probes."""
            self._set_end(_ENDLESS, abi.NO_LIMIT)
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
        self._put_in(attachment, executable_fd, sites, pid, None)
        return attachment

    def _put_in(
        self, attachment: Attachment, executable_fd: int, sites: Sequence[ProbeSite], pid: int, window: Window | None
    ) -> None:
        kept = KeptWindow(window.number, window.until_ns) if window else None
        way = self._way(pid)
        offsets: dict[str, list[int]] = {}
        for site in sites:
            offsets.setdefault(site.program, []).append(site.file_offset)
        try:
            for program, file_offsets in offsets.items():
                with explained(f"can't put probe {program} at offsets {file_offsets}", AttachFailed), uninterrupted():
                    program_fd = None if program == ANCHOR else self._program(program, multi=way == "link")
                    attachment.held += self._keeper.attach(way, program_fd, executable_fd, file_offsets, pid, kept)
        except AttachFailed:
            self.detach([attachment])
            raise

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

    # Windows

    def open_window(
        self, executable_fd: int, sites: Sequence[ProbeSite], duration_ns: int, pid: int = ANY_PROCESS
    ) -> Window:
        """Like :meth:`attach`, for so long: then nothing is counted, and the probes are taken out, whatever this
        process does. That happens sooner if a target in the window has had the hits it may. To be freed by
        :meth:`free_window`.

        Raises AttachFailed; probes put in until then are taken out again.
        """
        with explained("the child that holds the probes can't be told of storms", AttachFailed):
            self._keeper.hear_ends(self._maps.descriptor("window_ends"))
        window = Window(self._free_windows.pop(), monotonic_ns() + duration_ns)
        self._set_end(window.number, window.until_ns)
        try:
            self._put_in(Attachment(), executable_fd, sites, pid, window)
        except AttachFailed:
            self.free_window(window)
            raise
        return window

    def end_windows(self, windows: Sequence[Window]) -> None:
        """Count nothing more in them, and begin to take their probes out."""
        for window in windows:
            self._set_end(window.number, min(monotonic_ns(), self.end_of(window)))
        with explained("the probes of a window can't be taken out", AttachFailed):
            self._keeper.end_windows([window.number for window in windows])

    def end_of(self, window: Window) -> int:
        """Until when it counts, or has counted: sooner than planned if a target has had the hits it may."""
        return self._end(window.number)

    def probed_windows(self) -> set[int]:
        """Numbers of the windows whose probes are not all out yet."""
        with explained("the child that holds the probes doesn't answer", AttachFailed):
            return self._keeper.windows()

    def free_window(self, window: Window) -> None:
        """Others may have its number: its probes are out, and its targets retired."""
        self._free_windows.append(window.number)

    @property
    def keeper_pid(self) -> int:
        """The child that holds the probes: putting them in and taking them out is its CPU time."""
        return self._keeper.pid

    def _set_end(self, number: int, until_ns: int) -> None:
        table = self._table("windows")
        table[table.Key(number)] = table.Leaf(until_ns)

    def _end(self, number: int) -> int:
        table = self._table("windows")
        return int(table[table.Key(number)].until_ns)

    # Targets

    def watch(
        self,
        pid: int,
        target: abi.Target,
        window: Window | None = None,
        hits_limit: int = abi.NO_LIMIT,
        *,
        sampler: abi.Sampler | None = None,
        time_before: bool = True,
    ) -> None:
        """Begin to count process ``pid``, whose executable carries the probes; ``hits_limit`` ends its ``window``. Sets
        the target's slot, window, limit and start. ``sampler``: for the sampled level.

        What state a goroutine is in shows at its first move. With ``time_before`` the time since now then counts for a
        goroutine that was waiting or runnable; a counter that is read again and again would jump by it.
        """
        table = self._table("targets")
        target.slot = self._free_slots.pop()
        target.window = window.number if window else _ENDLESS
        target.hits, target.hits_limit = 0, hits_limit
        began_ns = monotonic_ns()
        target.attached_ns = began_ns if time_before else 0
        self._targets[pid] = target.slot
        self._watched[pid] = (target.window, began_ns)
        if sampler:
            self._maps.put("samplers", pid, sampler)
            self._sampled.add(pid)
        table[table.Key(pid)] = table.Leaf.from_buffer_copy(bytes(target))
        # Until now the target's own hits counted as those of a process nobody asked about.
        self._foreign_before, self._foreign_after = self._foreign_hits(), None

    @property
    def records(self) -> bool:
        """Is it made for a recording?"""
        return self._compilation.recording_pages > 0

    @property
    def next_slot(self) -> int:
        """Which slot the next one that is watched will have."""
        return self._free_slots[-1]

    def counts(self, pid: int) -> bool:
        """Is there something to :meth:`retire`?"""
        return pid in self._targets

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
        for pid in pids:
            self._maps.delete_key("targets", pid)
            if pid in self._sampled:
                self._maps.delete_key("samplers", pid)

    def snapshot(self, pid: int) -> Snapshot:
        """Read what was counted for ``pid`` since :meth:`watch`. Reads maps only; nothing is cleared."""
        slot = self._targets[pid]
        now_ns = monotonic_ns()
        keys, values = self._maps.entries("functions", abi.FunctionKey, abi.Totals, self._sizes.functions)
        ended = {int(k["start_pc"]): v for k, v in zip(keys, values, strict=True) if k["slot"] == slot}
        keys, values = self._goroutines()
        foreign = self._foreign_hits() if self._foreign_after is None else self._foreign_after
        own = keys["tgid"] == pid
        counted = foreign - self._foreign_before
        samples = self._samples_of(pid)
        return Snapshot(now_ns, self._maps.stats(slot), ended, values[own], counted, keys[own], samples=samples)

    def timed(self, pid: int) -> tuple[int, int]:
        """Of some hits since :meth:`watch`, how long the programs took, in ns, and how many those are."""
        return _timed(self._maps.stats(self._targets[pid]))

    def look_again(self, keys: Array) -> list[Any]:
        """The records of these goroutines as they are now; None for one that has ended. BPF changes a record while it
        is read: only what is the same twice was read whole."""
        return self._maps.look_up("goroutines", keys, abi.Goroutine)

    def _samples_of(self, pid: int) -> Any:
        return self._maps.stats(self._targets[pid], "samples") if pid in self._sampled else None

    def snapshots(self, pids: Iterable[int]) -> dict[int, Snapshot]:
        """A snapshot of each of these that is a target, without functions: one look at the goroutines for all."""
        targets = [pid for pid in pids if pid in self._targets]
        if not targets:
            return {}
        now_ns = monotonic_ns()
        keys, values = self._goroutines()
        return self._snapshots(targets, now_ns, keys, values)

    def _goroutines(self) -> tuple[Array, Array]:
        return self._maps.entries("goroutines", abi.GoroutineKey, abi.Goroutine, self._sizes.goroutines)

    def _snapshots(self, pids: Sequence[int], now_ns: int, keys: Array, values: Array) -> dict[int, Snapshot]:
        """Snapshots without functions, from all goroutines there are."""
        own, none = self._maps.grouped(values, keys["tgid"]), values[:0]
        ends = {number: self._end(number) for number in {self._watched[pid][0] for pid in pids}}
        slots = {pid: self._targets[pid] for pid in pids}
        stats = self._maps.stats_of(slots.values())
        found = {}
        for pid, slot in slots.items():
            window, since_ns = self._watched[pid]
            time_ns = max(min(now_ns, ends[window]), since_ns)
            samples, seen_ns = self._samples_of(pid), time_ns - since_ns
            found[pid] = Snapshot(time_ns, stats[slot], {}, own.get(pid, none), 0, seen_ns=seen_ns, samples=samples)
        return found

    def retire(self, pids: Sequence[int]) -> dict[int, Snapshot]:
        """Count these processes no longer, and forget them, so that others can take their places: the last snapshot of
        each, without functions. One look at each map for all of them."""
        self._unwatch(pids)
        now_ns = monotonic_ns()
        keys, values = self._goroutines()
        snapshots = self._snapshots(pids, now_ns, keys, values)
        self._maps.delete_of("goroutines", keys, keys["tgid"], pids)
        for pid in self._sampled.intersection(pids):
            self._maps.zero_stats(self._targets[pid], "samples")
        self._sampled.difference_update(pids)
        slots = [self._targets.pop(pid) for pid in pids]
        for pid in pids:
            del self._watched[pid]
        keys, _ = self._maps.entries("functions", abi.FunctionKey, abi.Totals, self._sizes.functions)
        self._maps.delete_of("functions", keys, keys["slot"], slots)
        for slot in slots:
            self._maps.zero_stats(slot)
        self._free_slots += slots
        return snapshots

    @property
    def room(self) -> int:
        """How many more processes can be watched."""
        return len(self._free_slots)

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
