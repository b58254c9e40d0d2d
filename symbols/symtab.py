"""The ELF symbol table (.symtab), which a stripped file doesn't have."""

from collections.abc import Iterable, Iterator
from typing import Self

import numpy as np
import numpy.typing as npt

from schedtrace.symbols.binary import Binary
from schedtrace.symbols.elf import SHT_SYMTAB
from schedtrace.symbols.function import Function
from schedtrace.symbols.nametable import NameTable

_STT_OBJECT, _STT_FUNC = 1, 2
_SHN_UNDEF = 0
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_MAX_SAME_NAME = 64
_MAX_SYMBOLS = 4_000_000
_ABI0 = ".abi0"


class Symtab:
    """Defined functions and data objects by name, found in the mapped file: no Python object per symbol."""

    def __init__(self, symbols: npt.NDArray[np.void], names: NameTable) -> None:
        self._symbols = symbols
        self._names = names
        self._kinds: dict[int, npt.NDArray[np.intp]] = {}

    @classmethod
    def read(cls, binary: Binary) -> Self | None:
        """The table of ``binary``; None if it has none, or one that can't be made sense of."""
        for section in binary.section_table:
            if section.type != SHT_SYMTAB or section.entry_size != _SYMBOL.itemsize:
                continue
            content = binary.content(section)
            count = len(content) // _SYMBOL.itemsize
            if not 0 < count <= _MAX_SYMBOLS or section.link >= len(binary.section_table):
                continue
            names = binary.content(binary.section_table[section.link])
            if len(names):
                return cls(np.frombuffer(content, _SYMBOL, count), NameTable(names))
        return None

    def functions_named(self, names: Iterable[str]) -> dict[str, Function]:
        """The functions of these names; without those that are absent or that several functions have.

        An assembly function that only assembly calls is listed as NAME.abi0, and found as NAME. What has both
        entries is a Go function with a wrapper for assembly's calls, NAME.abi0, or an assembly function with
        a wrapper for Go's calls, NAME: found is what Go code calls. Pclntab tells wrappers apart.
        """
        wanted = list(dict.fromkeys(names))
        places = self._named(_STT_FUNC, wanted)
        for name, place in self._named(_STT_FUNC, [n + _ABI0 for n in wanted if n not in places]).items():
            places[name.removesuffix(_ABI0)] = place
        return {name: Function(name, *places[name]) for name in wanted if name in places}

    def data_named(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Data objects by name: (vaddr, size in bytes). Absent and ambiguous names are left out."""
        return self._named(_STT_OBJECT, names)

    def function_names(self) -> Iterator[str]:
        """Every defined function's name, in the table's order, with repeats. Slow for a large table."""
        for offset in self._symbols["name"][self._of_kind(_STT_FUNC)].tolist():
            name = self._names.name_at(offset)
            if name:
                yield name

    def _named(self, kind: int, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        chosen = self._of_kind(kind)
        found: dict[str, tuple[int, int]] = {}
        for name, entries in self._names.matches(self._symbols["name"][chosen], names).items():
            symbols = self._symbols[chosen[entries[:_MAX_SAME_NAME]]]
            places = set(zip(symbols["value"].tolist(), symbols["size"].tolist(), strict=True))
            if len(places) == 1:
                found[name] = places.pop()
        return found

    def _of_kind(self, kind: int) -> npt.NDArray[np.intp]:
        if kind not in self._kinds:
            defined = self._symbols["section"] != _SHN_UNDEF
            self._kinds[kind] = np.flatnonzero(((self._symbols["info"] & 15) == kind) & defined)
        return self._kinds[kind]
