"""Reads another process's memory without stopping it: process_vm_readv(2), many places in one call."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from schedtrace.errors import NotTraceable
from schedtrace.proc_formats import Mapping

_MOST_PLACES = 1024  # IOV_MAX: more go into further calls
_MOST_BYTES = 4 << 20
_ADDRESS_LIMIT = 1 << 56


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    *(ctypes.c_int, ctypes.POINTER(_IoVec), ctypes.c_ulong, ctypes.POINTER(_IoVec), ctypes.c_ulong, ctypes.c_ulong),
)


class Places:
    """Ranges of a process's memory, (address, size in bytes) each, to be read together as often as wanted."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Raises NotTraceable if they are not where a program's memory can be, or are too much to read."""
        if any(not 0 < start < start + size < _ADDRESS_LIMIT for start, size in ranges):
            raise NotTraceable("addresses in it lead nowhere")
        size = sum(size for _, size in ranges)
        if size > _MOST_BYTES:
            raise NotTraceable(f"{size >> 20} MiB to read: more than a Go runtime has to tell")
        self.ranges = tuple(ranges)
        self._buffer = ctypes.c_char * size  # made for each reading: thousands of these are kept
        self._remote = (_IoVec * len(ranges))(*(_IoVec(*r) for r in ranges))
        self._ends = [0]
        for _, size in ranges:
            self._ends.append(self._ends[-1] + size)

    def read(self, pid: int) -> list[bytes]:
        """What is there now, range by range. Ranges are not read at one moment: the process runs on.

        Raises OSError: ESRCH if the process has exited, EFAULT if it has no memory there, EPERM without the right to.
        """
        buffer = self._buffer()
        base = ctypes.addressof(buffer)
        for first in range(0, len(self.ranges), _MOST_PLACES):
            last = min(first + _MOST_PLACES, len(self.ranges))
            start, end = self._ends[first], self._ends[last]
            local = _IoVec(base + start, end - start)
            remote = ctypes.cast(ctypes.byref(self._remote, first * ctypes.sizeof(_IoVec)), ctypes.POINTER(_IoVec))
            done = _readv(pid, ctypes.byref(local), 1, remote, last - first, 0)
            if done != end - start:
                number = ctypes.get_errno() if done < 0 else errno.EFAULT
                raise OSError(number, os.strerror(number))
        content = bytes(buffer)
        return [content[start:end] for start, end in pairwise(self._ends)]


def unsafe_places(
    ranges: Sequence[tuple[int, int]], mappings: Sequence[Mapping], code_address: int
) -> Iterator[tuple[int, int]]:
    """Those of ``ranges`` that a Go program's own data can't be in.

    Data is in writable private memory without a file, or in that of the file whose code is at ``code_address``: reading
    what is mapped from other files could wait for ever for whoever serves them.
    """
    own = {(m.device, m.inode) for m in mappings if m.start <= code_address < m.end}
    sound = [
        (m.start, m.end)
        for m in mappings
        if m.permissions.startswith("rw") and m.permissions.endswith("p")
        if not m.inode or (m.device, m.inode) in own
    ]
    joined: list[list[int]] = []
    for start, end in sorted(sound):
        if joined and joined[-1][1] == start:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    for address, size in ranges:
        if not any(start <= address and address + size <= end for start, end in joined):
            yield address, size
