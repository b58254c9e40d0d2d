"""RELATIVE relocations: what the pointers stored in a position-independent file really are.

In a PIE or shared object a pointer to the program's own data is filled in by the loader. With RELA relocations its value
is in the relocation's addend and the bytes in place may be anything (GNU ld writes zeroes, Go's linker the addend);
with the packed form (DT_RELR) the bytes in place are the value, so nothing needs to be looked up.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_DT_NULL, _DT_RELA, _DT_RELASZ, _DT_RELAENT = 0, 7, 8, 9
_DYNAMIC_ENTRY = np.dtype([("tag", "<u8"), ("value", "<u8")])
_RELA = np.dtype([("vaddr", "<u8"), ("info", "<u8"), ("addend", "<u8")])
_MAX_DYNAMIC_ENTRIES = 4096


class RelativeRelocations:
    """``vaddrs`` (ascending) and, at the same index, ``targets``: the value each of these words has at load bias 0."""

    def __init__(self, vaddrs: npt.NDArray[np.uint64], targets: npt.NDArray[np.uint64]) -> None:
        self.vaddrs = vaddrs
        self.targets = targets

    @classmethod
    def none(cls) -> "RelativeRelocations":
        empty = np.empty(0, np.uint64)
        return cls(empty, empty)

    @classmethod
    def read(
        cls, dynamic: memoryview, view: Callable[[int, int], memoryview], kind: int
    ) -> "RelativeRelocations":
        """From the bytes of the dynamic segment; ``view(vaddr, size)`` gives bytes, ``kind`` is the type's number.

        Raises what ``view`` raises if the table isn't in the file.
        """
        entries = dynamic_entries(dynamic)
        start, size = entries.get(_DT_RELA, 0), entries.get(_DT_RELASZ, 0)
        if start == 0 or size < _RELA.itemsize or entries.get(_DT_RELAENT, _RELA.itemsize) != _RELA.itemsize:
            return cls.none()
        table = np.frombuffer(view(start, size - size % _RELA.itemsize), _RELA)
        chosen = table["info"] == kind  # the upper half, a symbol's index, is 0 for RELATIVE
        vaddrs, targets = table["vaddr"][chosen], table["addend"][chosen]
        if len(vaddrs) > 1 and not bool(np.all(vaddrs[:-1] <= vaddrs[1:])):
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
        first, last = (int(i) for i in np.searchsorted(self.vaddrs, _words_range(vaddr, len(words))))
        distances = self.vaddrs[first:last] - np.uint64(vaddr)
        aligned = distances % np.uint64(8) == 0
        words[(distances[aligned] // np.uint64(8)).astype(np.intp)] = self.targets[first:last][aligned]

    def vaddrs_of(self, target: int, limit: int = 64) -> list[int]:
        """Addresses of up to ``limit`` words that point to ``target``."""
        return [int(v) for v in self.vaddrs[np.flatnonzero(self.targets == np.uint64(target))[:limit]]]


def _words_range(vaddr: int, count: int) -> npt.NDArray[np.uint64]:
    return np.array([vaddr, vaddr + 8 * count], np.uint64)


def dynamic_entries(dynamic: memoryview) -> dict[int, int]:
    """Tag to value, the first of each tag, up to DT_NULL."""
    count = min(len(dynamic) // _DYNAMIC_ENTRY.itemsize, _MAX_DYNAMIC_ENTRIES)
    entries: dict[int, int] = {}
    for tag, value in np.frombuffer(dynamic, _DYNAMIC_ENTRY, count).tolist() if count else []:
        if tag == _DT_NULL:
            break
        entries.setdefault(tag, value)
    return entries
