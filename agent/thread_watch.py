"""Processes whose threads are watched: how long these wait for a CPU, and how long goroutines that run for Go are off
it.

No probe is needed, so that this goes on for as long as a process is watched, between windows, too. The numbers come
from bpf/thread.h; names are given in :mod:`schedtrace.join`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from schedtrace import abi
from schedtrace.bpf_maps import MapReader
from schedtrace.errors import AttachFailed


@dataclass(frozen=True)
class ThreadSnapshot:
    """What was counted of one process's threads. ``stats``: numpy record of :class:`abi.ThreadStats`, summed over CPUs;
    ``functions``: start_pc -> record of :class:`abi.OffCpuTotals`; ``goroutines_known``: whether it could be told which
    goroutine a thread runs; ``unlisted``: threads for which there was no room."""

    stats: Any
    functions: Mapping[int, Any]
    goroutines_known: bool
    unlisted: int

    @property
    def switches(self) -> int:
        """How often they began to run."""
        return int(self.stats["run_queue"]["slots"].sum())


@dataclass
class _Watched:
    slot: int
    record: abi.Process
    goroutines_known: bool
    unlisted: int = 0
    last: ThreadSnapshot | None = None


class ThreadWatch:
    """The watched processes of a session, by PID: at most ``most_processes``."""

    def __init__(self, maps: MapReader, most_processes: int, most_threads: int, most_functions: int) -> None:
        self._maps = maps
        self._most_threads, self._most_functions = most_threads, most_functions
        self._watched: dict[int, _Watched] = {}
        self._free_slots = list(range(most_processes))[::-1]

    def watch(self, pid: int, record: abi.Process) -> None:
        """Begin to count the threads of process ``pid``. Raises AttachFailed if there is no room."""
        if not self._free_slots:
            raise AttachFailed(f"no room for the threads of process {pid}")
        watched = _Watched(self._free_slots.pop(), record, goroutines_known=bool(record.allm))
        self._watched[pid] = watched
        self._maps.put("processes", watched.slot, record)
        # Threads made from now on are seen by task_newtask; those that exist are listed here.
        self._maps.put("process_slots", pid, abi.ProcessSlot(watched.slot))
        fresh = abi.Thread(slot=watched.slot)
        with suppress(OSError):
            for tid in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
                watched.unlisted += not self._maps.put_new("threads", tid, fresh)
                if not os.path.exists(f"/proc/{pid}/task/{tid}"):  # noqa: PTH110 (one of thousands)
                    self._maps.delete_key("threads", tid)  # its end came before it was listed

    def look_for_goroutines(self, pid: int, *, wanted: bool) -> None:
        """Whether to look, at each switch, which goroutine the thread runs. If not, only its waits for a CPU are
        counted, which costs a third."""
        watched = self._watched[pid]
        record = abi.Process.from_buffer_copy(bytes(watched.record))
        record.allm = watched.record.allm if wanted else 0
        self._maps.put("processes", watched.slot, record)

    def watches(self, pid: int) -> bool:
        """Is there something to :meth:`retire`?"""
        return pid in self._watched

    def snapshot(self, pid: int) -> ThreadSnapshot:
        """What was counted for ``pid`` since :meth:`watch`, by function, too. Nothing is cleared."""
        watched = self._watched[pid]
        keys, values = self._functions()
        own = {int(k["start_pc"]): v for k, v in zip(keys, values, strict=True) if k["slot"] == watched.slot}
        return self._snapshot(watched, own)

    def snapshots(self) -> dict[int, ThreadSnapshot]:
        """A snapshot of every process, without functions: the same object as last time where it is the same."""
        stats = self._maps.stats_of([watched.slot for watched in self._watched.values()], "thread_stats")
        found = {}
        for pid, watched in self._watched.items():
            own, last = stats[watched.slot], watched.last
            if last is None or last.stats.tobytes() != own.tobytes():
                last = ThreadSnapshot(own.copy(), {}, watched.goroutines_known, watched.unlisted)
            found[pid] = watched.last = last
        return found

    def _snapshot(self, watched: _Watched, functions: Mapping[int, Any]) -> ThreadSnapshot:
        stats = self._maps.stats(watched.slot, "thread_stats")
        return ThreadSnapshot(stats, functions, watched.goroutines_known, watched.unlisted)

    def _functions(self) -> tuple[Any, Any]:
        return self._maps.entries("off_cpu_functions", abi.FunctionKey, abi.OffCpuTotals, self._most_functions)

    def unwatch(self, pids: Iterable[int]) -> None:
        """Count these no longer; what was counted can still be read."""
        slots = []
        for pid in pids:
            self._maps.delete_key("process_slots", pid)
            slots.append(self._watched[pid].slot)
        # Those of a process that goes on would count for whoever has the slot next.
        keys, values = self._maps.entries("threads", ctypes.c_uint32, abi.Thread, self._most_threads)
        self._maps.delete_of("threads", keys, values["slot"], slots)

    def retire(self, pids: Sequence[int]) -> dict[int, ThreadSnapshot]:
        """Count these processes no longer, and forget them: the last snapshot of each, without functions."""
        self.unwatch(pids)
        found = {pid: self._snapshot(self._watched[pid], {}) for pid in pids}
        slots = [self._watched.pop(pid).slot for pid in pids]
        keys, _ = self._functions()
        self._maps.delete_of("off_cpu_functions", keys, keys["slot"], slots)
        for slot in slots:
            self._maps.zero_stats(slot, "thread_stats")
        self._free_slots += slots
        return found
