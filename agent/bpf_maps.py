"""Reading BPF maps in bulk: one system call a chunk, into numpy arrays."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedtrace import abi
from schedtrace.errors import AttachFailed

Array = np.ndarray[Any, Any]

_CHUNK = 1 << 14
_SLOTS = 32
_ANY, _NO_EXIST = ctypes.c_ulonglong(0), ctypes.c_ulonglong(1)  # flags of bpf_map_update_elem
# Made once: numpy takes 0.1 ms for it.
_STATS = {
    "stats": np.dtype(abi.TargetStats),
    "samples": np.dtype(abi.SampleStats),
    "thread_stats": np.dtype(abi.ThreadStats),
}
_HISTOGRAMS = {
    "stats": ("sched_latency", "wait"),
    "samples": ("sched_latency", "stop_the_world"),
    "thread_stats": ("run_queue", "off_cpu"),
}


class MapReader:
    """Reads and writes maps of one BPF object, through libbcc's wrappers of bpf(2).

    ``bpf`` and ``lib`` are BCC's BPF object and its C library. All methods raise AttachFailed if the kernel refuses.
    """

    def __init__(self, bpf: Any, lib: Any) -> None:
        self._bpf, self._lib = bpf, lib
        self._cpus = possible_cpus()

    def descriptor(self, table: str) -> int:
        """The map itself, which is BCC's, for who reads it without us."""
        return int(self._lib.bpf_table_fd(self._bpf.module, table.encode()))

    def per_cpu(self, table: str, index: int, dtype: Any) -> Array:
        """An entry of a per-CPU array: one element a CPU."""
        buffer = np.zeros(self._cpus, dtype)
        key = ctypes.c_uint32(index)
        if self._lib.bpf_lookup_elem(self.descriptor(table), ctypes.byref(key), _pointer(buffer)):
            raise _refused("read", table)
        return buffer

    def counter(self, table: str) -> int:
        """The one number in a per-CPU array, summed over CPUs."""
        return int(self.per_cpu(table, 0, np.dtype(np.uint64)).sum())

    def stats(self, slot: int, table: str = "stats") -> Any:
        """What was counted under a slot, summed over CPUs (maxima are maxima): a record of :class:`abi.TargetStats`, of
        :class:`abi.SampleStats` from the table "samples", or of :class:`abi.ThreadStats` from "thread_stats"."""
        return _summed(table, self.per_cpu(table, slot, _STATS[table])[np.newaxis])[0]

    def stats_of(self, slots: Collection[int], table: str = "stats") -> dict[int, Any]:
        """:meth:`stats` of these slots, by slot: one system call for many that lie together."""
        found: dict[int, Any] = {}
        for chunk in sorted({slot // _SLOTS for slot in slots}):
            first, own = chunk * _SLOTS, [slot for slot in slots if slot // _SLOTS == chunk]
            count = max(own) + 1 - first
            summed = _summed(table, self._per_cpu_of_some(table, first, count, _STATS[table]))
            found.update((slot, summed[slot - first]) for slot in own)
        return found

    def _per_cpu_of_some(self, table: str, first: int, count: int, dtype: Any) -> Array:
        """Entries of a per-CPU array, from ``first`` on: an array of (count, CPUs)."""
        keys, values = np.zeros(count, np.uint32), np.zeros((count, self._cpus), dtype)
        before, last, read = ctypes.c_uint32(first - 1), ctypes.c_uint32(0), ctypes.c_uint32(count)
        failed = self._lib.bpf_lookup_batch(
            self.descriptor(table),
            ctypes.byref(before) if first else None,
            ctypes.byref(last),
            _pointer(keys),
            _pointer(values),
            ctypes.byref(read),
        )
        if failed and ctypes.get_errno() != errno.ENOENT:  # the end; before Linux 5.13 this can't be done
            return np.stack([self.per_cpu(table, index, dtype) for index in range(first, first + count)])
        return values

    def zero_stats(self, slot: int, table: str = "stats") -> None:
        """Make a slot new."""
        key, zeros = ctypes.c_uint32(slot), np.zeros(self._cpus, _STATS[table])
        if self._lib.bpf_update_elem(self.descriptor(table), ctypes.byref(key), _pointer(zeros), _ANY):
            raise _refused("write", table)

    def put(self, table: str, key: int, value: ctypes.Structure) -> None:
        """Set an entry of a map whose keys are 32 bits."""
        index, pointer = ctypes.c_uint32(key), ctypes.byref(value)
        if self._lib.bpf_update_elem(self.descriptor(table), ctypes.byref(index), pointer, _ANY):
            raise _refused("write", table)

    def put_new(self, table: str, key: int, value: ctypes.Structure) -> bool:
        """Like :meth:`put`, unless there is one already. False if the map is full."""
        index, pointer = ctypes.c_uint32(key), ctypes.byref(value)
        if not self._lib.bpf_update_elem(self.descriptor(table), ctypes.byref(index), pointer, _NO_EXIST):
            return True
        if ctypes.get_errno() not in (errno.EEXIST, errno.E2BIG):
            raise _refused("write", table)
        return ctypes.get_errno() == errno.EEXIST

    def entries(self, table: str, key: type, value: type, capacity: int) -> tuple[Array, Array]:
        """All keys and values of a hash map, of the ctypes structs ``key`` and ``value``."""
        chunk = min(capacity, _CHUNK)
        keys, values = np.zeros(chunk, np.dtype(key)), np.zeros(chunk, np.dtype(value))
        found_keys, found_values = [], []
        position, next_position = ctypes.c_uint32(0), ctypes.c_uint32(0)
        first = True
        while True:
            count = ctypes.c_uint32(chunk)
            failed = self._lib.bpf_lookup_batch(
                self.descriptor(table),
                None if first else ctypes.byref(position),
                ctypes.byref(next_position),
                _pointer(keys),
                _pointer(values),
                ctypes.byref(count),
            )
            last = failed and ctypes.get_errno() == errno.ENOENT
            if failed and not last:
                raise _refused("read", table)
            found_keys.append(keys[: count.value].copy())
            found_values.append(values[: count.value].copy())
            if last:
                return np.concatenate(found_keys), np.concatenate(found_values)
            position, first = ctypes.c_uint32(next_position.value), False

    def look_up(self, table: str, keys: Array, value: type) -> list[Any]:
        """The values of single keys of a hash map, in their order; None for a key that isn't in it."""
        found: list[Any] = []
        for key in keys:
            one, buffer = np.array([key], keys.dtype), np.zeros(1, np.dtype(value))
            if self._lib.bpf_lookup_elem(self.descriptor(table), _pointer(one), _pointer(buffer)):
                if ctypes.get_errno() != errno.ENOENT:
                    raise _refused("read", table)
                found.append(None)
            else:
                found.append(buffer[0])
        return found

    def grouped(self, values: Array, by: Array) -> dict[int, Array]:
        """Elements of ``values`` by the numbers in ``by``, which has as many."""
        order = np.argsort(by, kind="stable")
        found, starts = np.unique(by[order], return_index=True)
        return dict(zip(found.tolist(), np.split(values[order], starts[1:]), strict=False))  # of none: one empty piece

    def delete_of(self, table: str, keys: Array, numbers: Array, wanted: Sequence[int]) -> None:
        """Delete those of ``keys`` that have one of ``wanted`` in ``numbers``."""
        self.delete(table, keys[np.isin(numbers, wanted)])

    def delete_key(self, table: str, key: int) -> None:
        """Delete the entry of a hash map whose keys are 32 bits, if it is there."""
        self.delete(table, np.array([key], np.uint32))

    def delete(self, table: str, keys: Array) -> None:
        """Delete entries of a hash map; those that are gone already don't matter."""
        for key in keys:
            one = np.array([key], keys.dtype)
            if self._lib.bpf_delete_elem(self.descriptor(table), _pointer(one)) and ctypes.get_errno() != errno.ENOENT:
                raise _refused("delete from", table)


def _summed(table: str, per_cpu: Array) -> Array:
    """Of an array of (slots, CPUs) the sums over CPUs; maxima are maxima."""
    slots, cpus = per_cpu.shape
    summed: Array = per_cpu.view(np.uint64).reshape(slots, cpus, -1).sum(axis=1).view(per_cpu.dtype)[:, 0]
    for histograms in _HISTOGRAMS[table]:
        summed[histograms]["max_ns"] = per_cpu[histograms]["max_ns"].max(axis=1)
    if table == "stats":
        summed["cgroup_id"] = per_cpu["cgroup_id"].max(axis=1)
    return summed


def possible_cpus() -> int:
    """How many values a per-CPU map holds: all CPUs that could be plugged in."""
    last = Path("/sys/devices/system/cpu/possible").read_text().strip().split(",")[-1].split("-")[-1]
    return int(last) + 1


def _pointer(array: Array) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def _refused(verb: str, table: str) -> AttachFailed:
    return AttachFailed(f"can't {verb} BPF map {table}: {os.strerror(ctypes.get_errno())}")
