"""Go's function table (pclntab): the name and address of every Go function, in every Go program, also a stripped one.

Layouts: runtime/symtab.go (pcHeader, functab, _func) and cmd/link/internal/ld/pcln.go of Go 1.16 to 1.27. Three have the
parts this module needs in different places; the magic number tells which:

=========== =========== ======================================================== ==============================
magic       Go          functab entry                                            name's and funcID's byte in _func
=========== =========== ======================================================== ==============================
0xfffffffa  1.16, 1.17  16 bytes: pc (a pointer, so relocated in a PIE), offset  8, 40
0xfffffff0  1.18, 1.19  8 bytes: pc - text, offset                               4, 36
0xfffffff1  1.20 on     the same                                                 4, 40
=========== =========== ======================================================== ==============================

text is runtime.text. Up to 1.25 the header has it (relocated in a PIE); from 1.26 that word is 0 and only moduledata has it.
It is not the start of section .text where C code was linked in before Go's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.function import Function
from schedtrace.symbols.moduledata import Moduledata, find_moduledata, text_bounds_agree
from schedtrace.symbols.nametable import NameTable
from schedtrace.symbols.refusals import why_not_go
from schedtrace.symbols.scan import find_words

_SECTIONS = (".gopclntab", ".data.rel.ro.gopclntab")
_INSTRUCTION_QUANTUM = {"amd64": 1, "arm64": 4}
_HEADER_WORDS = 9  # magic and sizes, then up to eight counts and offsets


@dataclass(frozen=True, slots=True)
class _Format:
    magic: int
    oldest_minor: int
    newest_minor: int | None
    has_text_word: bool
    name_byte: int
    func_id_byte: int


_FORMATS = {
    f.magic: f
    for f in (
        _Format(0xFFFFFFFA, 16, 17, False, 8, 40),
        _Format(0xFFFFFFF0, 18, 19, True, 4, 36),
        _Format(0xFFFFFFF1, 20, None, True, 4, 40),
    )
}
_MAGIC_UP_TO_1_15 = 0xFFFFFFFB


class Pclntab:
    """Function table of one binary. Names are looked up in the mapped file; only numbers are held, 8 bytes a function."""

    vaddr: int
    function_count: int
    text_vaddr: int  # runtime.text
    oldest_minor: int  # the Go minor versions that write this format
    newest_minor: int | None

    @classmethod
    def find(cls, binary: Binary) -> "Pclntab":
        """The table of ``binary``. Raises NotTraceable, saying why, if there is none that can be trusted."""
        too_old = False
        for name in _SECTIONS:
            section = binary.sections.get(name)
            if section is not None:
                try:
                    return cls(binary, section.vaddr)
                except NotTraceable:
                    continue  # the name proves nothing: look for the table itself
        found: list[Pclntab] = []
        for vaddr in _scan(binary):
            if int.from_bytes(binary.view(vaddr, 4), "little") == _MAGIC_UP_TO_1_15:
                too_old = True
                continue
            try:
                found.append(cls(binary, vaddr))
            except NotTraceable:
                continue
        if len(found) > 1:
            # A Go program may carry another one as data; only its own table is known to its runtime.
            found = [table for table in found if table.moduledata is not None]
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            raise NotTraceable(
                f"{binary.path}: {len(found)} Go function tables, and no telling which is in use"
            )
        if too_old:
            raise NotTraceable(f"{binary.path}: built with Go 1.15 or older; Go 1.17 or newer is needed")
        raise NotTraceable(f"{binary.path}: {why_not_go(binary)}")

    def __init__(self, binary: Binary, vaddr: int) -> None:
        """The table whose header is at ``vaddr``; raises NotTraceable if what is there doesn't hold together."""
        self._binary = binary
        self._moduledata: Moduledata | bool | None = False  # False: not looked for yet
        self.vaddr = vaddr
        segment = binary.segment_at(vaddr)
        size = 0 if segment is None else segment.vaddr + segment.file_size - vaddr
        words = np.frombuffer(binary.view(vaddr, 8 * _HEADER_WORDS), "<u8").tolist()
        layout = _FORMATS.get(words[0] & 0xFFFFFFFF)
        if layout is None or words[0] >> 32 != _sizes_word(binary):
            raise self._damaged("no header")
        self._format = layout
        self.oldest_minor, self.newest_minor = layout.oldest_minor, layout.newest_minor
        self.function_count = words[1]
        names_start, names_end, files, pctab, functab = words[4:9] if layout.has_text_word else words[3:8]
        if not 0 < names_start <= names_end <= files <= pctab <= functab < size:
            raise self._damaged("parts out of order")
        self._names_vaddr = vaddr + names_start
        entry_size = 8 if layout.has_text_word else 16
        if not 0 < self.function_count <= (size - functab) // entry_size - 1:
            raise self._damaged("more functions than fit")
        self._names = NameTable(binary.view(vaddr + names_start, names_end - names_start))
        self._records = binary.view(vaddr + functab, size - functab)
        self._read_functab(vaddr + functab)
        if len(self._starts) > 1 and bool(np.any(self._starts[1:] < self._starts[:-1])):
            raise self._damaged("functions out of order")
        first, end = int(self._starts[0]), int(self._starts[-1])
        if layout.has_text_word:
            self.text_vaddr = binary.pointer(vaddr + 24) or self._text_of_moduledata()
            first, end = first + self.text_vaddr, end + self.text_vaddr
        else:
            self.text_vaddr = 0
        if not text_bounds_agree(binary, first, end):
            raise self._damaged("functions outside of the code")
        if not layout.has_text_word:
            self._starts -= np.uint64(first)
            self.text_vaddr = first

    @property
    def moduledata(self) -> Moduledata | None:
        """The runtime's record of this table, which also bounds text and data; None if it can't be found."""
        if isinstance(self._moduledata, bool):
            self._moduledata = find_moduledata(self._binary, self.vaddr, self._names_vaddr)
        return self._moduledata

    def functions_named(self, names: Iterable[str]) -> dict[str, Function]:
        """The functions of these names.

        Of a function and its ABI wrapper, which share a name, the function. Left out: a name that is absent, and one that
        several functions have (instantiations of one generic function do).
        """
        found: dict[str, Function] = {}
        for name, entries in self._names.matches(self._name_offsets(), names).items():
            index = self._own_entry(entries)
            if index is not None:
                found[name] = self._function(name, index)
        return found

    def function_at(self, vaddr: int) -> Function | None:
        """The function whose code, or the padding behind it, includes ``vaddr``."""
        offset = vaddr - self.text_vaddr
        if not int(self._starts[0]) <= offset < int(self._starts[-1]):
            return None
        # Of functions without code that start at one address, the last is the one that has it.
        index = int(np.searchsorted(self._starts, self._starts.dtype.type(offset), side="right")) - 1
        return self._function(self._name(index), index)

    def name_at(self, vaddr: int) -> str | None:
        """Name of the function at ``vaddr``."""
        function = self.function_at(vaddr)
        return None if function is None else function.name

    def __len__(self) -> int:
        return self.function_count

    def __iter__(self) -> Iterator[Function]:
        """All functions, ascending by address, ABI wrappers included. Slow for a large table."""
        return (self._function(self._name(index), index) for index in range(self.function_count))

    def _read_functab(self, vaddr: int) -> None:
        """Sets _starts (one more than functions: the last is the end) and _record_offsets."""
        count = self.function_count
        if self._format.has_text_word:
            table = np.frombuffer(self._records, "<u4", 2 * count + 1)
            self._starts: npt.NDArray[np.unsignedinteger] = table[0::2].copy()
            self._record_offsets: npt.NDArray[np.uint32] = table[1::2].copy()
            return
        words = self._binary.pointers(vaddr, 2 * count + 1)
        self._starts = words[0::2].copy()
        # Offsets are of 32 bits by nature; what a damaged file has above them is cut off and fails as a name.
        self._record_offsets = words[1::2].astype(np.uint32)

    def _text_of_moduledata(self) -> int:
        moduledata = self.moduledata
        if moduledata is None:
            raise self._damaged("no runtime record says where its code starts")
        return moduledata.text_vaddr

    def _own_entry(self, entries: npt.NDArray[np.intp]) -> int | None:
        if len(entries) > 1:
            # funcID is 0 for a plain function; special runtime functions have small numbers and wrappers, in every
            # version, the largest.
            ids = self._record_bytes(entries, self._format.func_id_byte)
            entries = entries[ids == ids.min()]
        return int(entries[0]) if len(entries) == 1 else None

    def _function(self, name: str, index: int) -> Function:
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        return Function(name, self.text_vaddr + start, end - start)

    def _name(self, index: int) -> str:
        offset = self._name_offsets()[index] if index < 0 else self._name_offset(index)
        return self._names.name_at(int(offset)) or ""

    def _name_offset(self, index: int) -> int:
        start = int(self._record_offsets[index]) + self._format.name_byte
        return int.from_bytes(self._records[start : start + 4], "little")

    def _name_offsets(self) -> npt.NDArray[np.uint32]:
        """Every function's place in the name table; for a record outside of the table, one outside of the names."""
        count = len(self._records) - 3
        words = np.ndarray((count,), "<u4", self._records, strides=(1,))
        places = self._record_offsets.astype(np.int64) + self._format.name_byte
        if int(places.max()) < count:
            return words[places]
        offsets = np.full(len(places), 0xFFFFFFFF, np.uint32)
        inside = places < count
        offsets[inside] = words[places[inside]]
        return offsets

    def _record_bytes(self, entries: npt.NDArray[np.intp], byte: int) -> npt.NDArray[np.uint8]:
        data = np.frombuffer(self._records, np.uint8)
        places = self._record_offsets[entries].astype(np.int64) + byte
        return data[np.minimum(places, len(data) - 1)]

    def _damaged(self, what: str) -> NotTraceable:
        return NotTraceable(f"{self._binary.path}: damaged Go function table at {self.vaddr:#x}: {what}")


def _sizes_word(binary: Binary) -> int:
    """Bytes 4 to 8 of the header: two zeroes, the instruction quantum, the pointer size."""
    return _INSTRUCTION_QUANTUM[binary.arch.value] << 16 | 8 << 24


def _scan(binary: Binary) -> Iterator[int]:
    """Where a header's first eight bytes are; the low byte tells the format."""
    header = 0xFFFFFF00 | _sizes_word(binary) << 32
    for segment in binary.segments:
        for vaddr in find_words(binary, segment, header, mask=~0xFF & (1 << 64) - 1):
            magic = int.from_bytes(binary.view(vaddr, 4), "little")
            if magic in _FORMATS or magic == _MAGIC_UP_TO_1_15:
                yield vaddr
