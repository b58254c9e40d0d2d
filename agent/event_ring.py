"""Reading the BPF ring buffer with the events of a recording: many at once, without a step of Python for each.

The layout is the kernel's (Documentation/bpf/ringbuf.rst, kernel/bpf/ringbuf.c): a page with the consumer's position,
one with the producer's, and the data, mapped twice in a row, so that no record is ever cut. All records here have one
size, so that the buffer is an array, and its position says how many there have been.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np

from schedtrace.events import EVENT, EVENT_BYTES, Array

_RECORD_BYTES = 8 + EVENT_BYTES  # before the event: its length and two flags, 4 bytes, and the number of its page
_WORDS = _RECORD_BYTES // 8
_BUSY = np.uint64(1 << 31)
_MOST_AT_ONCE = 1 << 17


class EventRing:
    """The ring buffer of a session that records. Read by one thread."""

    def __init__(self, map_fd: int, pages: int, lost_by_cpu: Callable[[], Array]) -> None:
        """``map_fd``: the map's descriptor, which may be closed then; ``pages``: its size; ``lost_by_cpu``: reads how
        many events found no room, by CPU. Raises OSError."""
        page = mmap.PAGESIZE
        self._bytes = pages * page
        consumer = mmap.mmap(map_fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        produced = mmap.mmap(map_fd, page + 2 * self._bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._consumer = np.frombuffer(consumer, np.uint64, 1)
        self._producer = np.frombuffer(produced, np.uint64, 1)
        self._data = memoryview(produced)[page:]
        self._lost_by_cpu = lost_by_cpu
        self._barrier = threading.Lock()

        self.skip()

    def skip(self) -> None:
        """Begin here: what has been sent or lost until now is of no interest."""
        self._begin = int(self._producer[0])
        self._consumer[0] = self._begin
        self._lost_before = self._lost_by_cpu()

    @property
    def sent(self) -> int:
        """Events that the kernel has put into it, those that are not finished yet among them."""
        return (int(self._producer[0]) - self._begin) // _RECORD_BYTES

    @property
    def taken(self) -> int:
        """Events that have been read."""
        return (int(self._consumer[0]) - self._begin) // _RECORD_BYTES

    def lost_by_cpu(self) -> Array:
        """Events that found no room, by CPU."""
        lost: Array = self._lost_by_cpu() - self._lost_before
        return lost

    def read(self) -> Array:
        """The next events (:data:`EVENT`), each once, in the order in which they were sent; empty if there are none."""
        position = int(self._consumer[0])
        count = min((int(self._producer[0]) - position) // _RECORD_BYTES, _MOST_AT_ONCE)
        words = np.frombuffer(self._data, np.uint64, count * _WORDS, position % self._bytes)
        records = words.reshape(count, _WORDS)  # numpy copies words ten times as fast as structs
        busy = (records[:, 0] & _BUSY) != 0
        if busy.any():  # a program is held up between making room and writing
            records = records[: int(np.argmax(busy))]
        with self._barrier:  # on a CPU that reorders reads, none of an event is before that of its length
            events: Array = records[:, 1:].copy().view(EVENT)
        self._consumer[0] = position + len(records) * _RECORD_BYTES
        return events[:, 0]
