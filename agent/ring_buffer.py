"""Reading a BPF ring buffer without BCC: for the child that holds probes, which is to stay small.

The layout is the kernel's (Documentation/bpf/ringbuf.rst, kernel/bpf/ringbuf.c): a page with the consumer's position,
one with the producer's, and the data, mapped twice in a row, so that no record is ever cut.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

BYTES = mmap.PAGESIZE
"""Size of the data of the ring buffers here: BPF_RINGBUF_OUTPUT(..., 1)."""

_HEADER = 8  # length, with two flags in it, and the record's page
_BUSY, _DISCARDED = 1 << 31, 1 << 30


class RingBuffer:
    """One that only we read. Its map's descriptor, which may be closed, can be polled for something to read."""

    def __init__(self, map_fd: int) -> None:
        """Raises OSError, ValueError."""
        page = mmap.PAGESIZE
        consumer = mmap.mmap(map_fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        produced = mmap.mmap(map_fd, page + 2 * BYTES, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        # Positions and headers are read as single words: the kernel writes them at any time.
        self._consumer, self._producer = memoryview(consumer).cast("Q"), memoryview(produced)[:page].cast("Q")
        self._headers, self._data = memoryview(produced)[page:].cast("I"), memoryview(produced)[page:]

    def read(self) -> Iterator[bytes]:
        """The records that are complete, each once."""
        while self._consumer[0] < self._producer[0]:
            start = self._consumer[0] % BYTES
            header = self._headers[start // 4]
            if header & _BUSY:
                return
            length = header & ~_DISCARDED
            record = bytes(self._data[start + _HEADER : start + _HEADER + length])
            self._consumer[0] += (_HEADER + length + 7) // 8 * 8
            if not header & _DISCARDED:
                yield record
