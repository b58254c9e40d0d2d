"""RELATIVE relocations: what the pointers stored in a position-independent file really are.

In a PIE or shared object the loader fills in every pointer to the program's own data. With RELA
relocations its value is the relocation's addend, and the bytes in place may be anything (GNU ld writes
zeroes, Go's linker the addend). With the packed form (DT_RELR) the bytes in place are the value, so
nothing needs to be looked up.
"""

from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt

from schedtrace.errors import NotTraceable

_DT_NULL, _DT_RELA, _DT_RELASZ, _DT_RELAENT = 0, 7, 8, 9
_DYNAMIC_ENTRY = np.dtype([("tag", "<u8"), ("value", "<u8")])
_RELA = np.dtype([("vaddr", "<u8"), ("info", "<u8"), ("addend", "<u8")])
_MAX_DYNAMIC_ENTRIES = 4096
_MAX_RELOCATIONS = 4_000_000  # the largest programs have a million


class RelativeRelocations:
    """``vaddrs``, ascending, and at the same index ``targets``: what each such word is at load bias 0."""

    def __init__(self, vaddrs: npt.NDArray[np.uint64], targets: npt.NDArray[np.uint64]) -> None:
        self.vaddrs = vaddrs
        self.targets = targets

    @classmethod
    def none(cls) -> Self:
        """No relocations at all."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.uint64))

    @classmethod
    def read(cls, path: str, dynamic: memoryview, view: Callable[[int, int], memoryview], kind: int) -> Self:
        """From the dynamic segment's bytes; ``view(vaddr, size)`` gives bytes, ``kind`` is RELATIVE's number.

        Raises NotTraceable, naming ``path``, if the table is larger than any program's, and what ``view`` raises if
        it isn't in the file.
        """
        entries = dynamic_entries(dynamic)
        start, size = entries.get(_DT_RELA, 0), entries.get(_DT_RELASZ, 0)
        if start == 0 or size < _RELA.itemsize or entries.get(_DT_RELAENT) != _RELA.itemsize:
            return cls.none()
        count = size // _RELA.itemsize
        if count > _MAX_RELOCATIONS:
            raise NotTraceable(f"{path}: damaged: {count} relocations")
        table = np.frombuffer(view(start, count * _RELA.itemsize), _RELA)
        relative = table["info"] == kind  # the upper half, a symbol's index, is 0 in a RELATIVE one
        vaddrs, targets = table["vaddr"][relative], table["addend"][relative]
        if bool(np.any(vaddrs[1:] < vaddrs[:-1])):
            order = np.argsort(vaddrs, kind="stable")
            vaddrs, targets = vaddrs[order], targets[order]
        return cls(vaddrs, targets)

    def value(self, vaddr: int, in_place: int) -> int:
        """The word at ``vaddr``: its relocation's, or ``in_place`` if it has none."""
        index = int(np.searchsorted(self.vaddrs, np.uint64(vaddr)))
        if index < len(self.vaddrs) and int(self.vaddrs[index]) == vaddr:
            return int(self.targets[index])
        return in_place

    def apply(self, vaddr: int, words: npt.NDArray[np.uint64]) -> None:
        """Replace, in ``words`` that were read at ``vaddr``, those that have a relocation."""
        bounds = np.array([vaddr, vaddr + 8 * len(words)], np.uint64)
        first, last = np.searchsorted(self.vaddrs, bounds).tolist()
        distances = self.vaddrs[first:last] - bounds[0]
        whole = distances % np.uint64(8) == 0
        words[(distances[whole] // np.uint64(8)).astype(np.intp)] = self.targets[first:last][whole]

    def vaddrs_of(self, target: int, limit: int = 64) -> list[int]:
        """Addresses of up to ``limit`` words that point to ``target``."""
        return [int(vaddr) for vaddr in self.vaddrs[np.flatnonzero(self.targets == np.uint64(target))[:limit]]]


def dynamic_entries(dynamic: memoryview) -> dict[int, int]:
    """Tag to value, the first of each tag, up to DT_NULL."""
    count = min(len(dynamic) // _DYNAMIC_ENTRY.itemsize, _MAX_DYNAMIC_ENTRIES)
    entries: dict[int, int] = {}
    for tag, value in np.frombuffer(dynamic[: count * _DYNAMIC_ENTRY.itemsize], _DYNAMIC_ENTRY).tolist():
        if tag == _DT_NULL:
            break
        entries.setdefault(tag, value)
    return entries
