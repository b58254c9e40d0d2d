"""Go's function table (pclntab): name and address of every function of a Go program, also a stripped one.

Layouts: runtime/symtab.go (pcHeader, functab, _func) and cmd/link/internal/ld/pcln.go, Go 1.16 to 1.27.
Three formats have what this module needs in different places; the magic number tells which:

==========  ===========  =====================================================  ========================
magic       Go           entry of functab                                       name, funcID: at byte of _func
==========  ===========  =====================================================  ========================
0xfffffffa  1.16, 1.17   16 bytes: pc (a pointer, relocated in a PIE), offset   8, 40
0xfffffff0  1.18, 1.19   8 bytes: pc - text, offset                             4, 36
0xfffffff1  1.20 to now  8 bytes: pc - text, offset                             4, 40
==========  ===========  =====================================================  ========================

"text" is the address of runtime.text. Up to Go 1.25 the header has it (a pointer, relocated in a PIE);
from 1.26 on that word is 0 and only moduledata has it. Section .text may start lower: where cgo is used,
C code comes first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.function import Function
from schedtrace.symbols.moduledata import Moduledata, find_moduledata
from schedtrace.symbols.nametable import NameTable
from schedtrace.symbols.refusals import why_not_go
from schedtrace.symbols.scan import find_words

_SECTIONS = (".gopclntab", ".data.rel.ro.gopclntab")
_INSTRUCTION_QUANTUM = {Arch.AMD64: 1, Arch.ARM64: 4}
_POINTER_SIZE = 8
_HEADER_SIZE = 72  # of the larger form: magic and sizes, then eight words
_TEXT_WORD = 24
_MAGIC_UP_TO_1_15 = 0xFFFFFFFB
_MAX_TABLES = 64
_MAX_FUNCTIONS = 4_000_000  # the largest programs have some hundred thousand; a lie costs at most 100 MB
_OUTSIDE = np.uint32(0xFFFFFFFF)
_SMALL_GAP = 64 << 10  # bytes of code between functions of one package, as the linker lays it out


_Starts = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Format:
    oldest_minor: int
    newest_minor: int | None
    has_absolute_pcs: bool
    name_byte: int
    func_id_byte: int


_FORMATS = {
    0xFFFFFFFA: _Format(16, 17, True, 8, 40),
    0xFFFFFFF0: _Format(18, 19, False, 4, 36),
    0xFFFFFFF1: _Format(20, None, False, 4, 40),
}


class Pclntab:
    """The function table of one binary.

    ``vaddr`` is its header's address, ``text_vaddr`` that of runtime.text. ``oldest_minor`` and
    ``newest_minor`` (None: no end known) are the Go versions that write its format. Names stay in the
    mapped file, which may be closed; 8 bytes of memory a function are used (12 for Go 1.16 and 1.17).
    """

    @classmethod
    def find(cls, binary: Binary) -> Self:
        """The table of ``binary``; NotTraceable, with the reason, if it has none that can be trusted."""
        for name in _SECTIONS:
            section = binary.sections.get(name)
            if section is not None:
                try:
                    return cls(binary, section.vaddr)
                except NotTraceable:
                    continue  # a name proves nothing: the table may still be elsewhere
        tables: list[Self] = []
        damage: NotTraceable | None = None
        magics = set()
        for vaddr, magic in _headers(binary):
            magics.add(magic)
            if magic in _FORMATS:
                try:
                    tables.append(cls(binary, vaddr))
                except NotTraceable as error:
                    damage = error
        # A Go program may carry another as data. Its runtime knows only its own table.
        own = tables if len(tables) == 1 else [table for table in tables if table.moduledata is not None]
        if len(own) == 1:
            return own[0]
        if tables:
            known = f"its runtime knows {len(own)} of them"
            raise NotTraceable(f"{binary.path}: has {len(tables)} Go function tables and {known}")
        if magics == {_MAGIC_UP_TO_1_15}:
            raise NotTraceable(f"{binary.path}: built with Go 1.15 or older; Go 1.17 or newer is needed")
        raise damage or NotTraceable(f"{binary.path}: {why_not_go(binary)}")

    def __init__(self, binary: Binary, vaddr: int) -> None:
        """The table with its header at ``vaddr``; NotTraceable if what is there doesn't hold together."""
        self._binary = binary
        self.vaddr = vaddr
        words = np.frombuffer(binary.view(vaddr, _HEADER_SIZE), "<u8").tolist()
        form = _FORMATS.get(words[0] & 0xFFFFFFFF)
        if form is None or words[0] >> 32 != _sizes_word(binary.arch):
            raise self._damaged("no header")
        self._form = form
        self.oldest_minor, self.newest_minor = form.oldest_minor, form.newest_minor
        self.function_count: int = words[1]
        names, names_end, files, pc_data, functab = words[3:8] if form.has_absolute_pcs else words[4:9]
        segment = binary.segment_at(vaddr)
        size = 0 if segment is None else segment.vaddr + segment.file_size - vaddr
        if not 0 < names <= names_end <= files <= pc_data <= functab < size:
            raise self._damaged("parts out of order")
        entry_size = 16 if form.has_absolute_pcs else 8
        if not 0 < self.function_count < min((size - functab) // entry_size, _MAX_FUNCTIONS):
            raise self._damaged(f"{self.function_count} functions don't fit in it")
        self._names_vaddr = vaddr + names
        self._names = NameTable(binary.view(vaddr + names, names_end - names))
        self._records = binary.view(vaddr + functab, size - functab)
        # Starts are relative to text; there is one more than functions, the end of the last.
        first_pc, self._starts, self._record_offsets = self._read_functab(vaddr + functab)
        if bool(np.any(self._starts[1:] < self._starts[:-1])):
            raise self._damaged("functions out of order")
        self.moduledata: Moduledata | None = find_moduledata(binary, vaddr, self._names_vaddr)
        self.text_vaddr = self._text() if first_pc is None else first_pc
        self._check_text()

    def functions_named(self, names: Iterable[str]) -> dict[str, Function]:
        """The functions of these names.

        Of a function and its ABI wrapper, which share a name here, the function. Left out is a name that
        is absent, and one that several functions have, as the instantiations of a generic function do.
        """
        found: dict[str, Function] = {}
        for name, entries in self._names.matches(self._name_offsets(), names).items():
            if len(entries) > 1:
                # funcID is 0 for a plain function, small for the runtime's special ones, and the largest
                # of all for wrappers, whatever the version numbers them.
                ids = self._func_ids(entries)
                entries = entries[ids == ids.min()]
            if len(entries) == 1:
                found[name] = self._function(name, int(entries[0]))
        return found

    def ranges_named(self, prefix: str) -> list[tuple[int, int]]:
        """Where the code is of functions whose names begin with ``prefix``, of at most eight bytes: (start, end)
        addresses, ascending, in as few ranges as there are when small gaps are part of them."""
        entries = self._names.starting_with(self._name_offsets(), prefix)
        starts = self.text_vaddr + self._starts[entries].astype(np.int64)
        ends = self.text_vaddr + self._starts[entries + 1].astype(np.int64)
        breaks = np.flatnonzero(starts[1:] - ends[:-1] > _SMALL_GAP) + 1
        return list(
            zip(
                (int(part[0]) for part in np.split(starts, breaks) if len(part)),
                (int(part[-1]) for part in np.split(ends, breaks) if len(part)),
                strict=True,
            )
        )

    def function_at(self, vaddr: int) -> Function | None:
        """The function whose code, or the padding behind it, includes ``vaddr``."""
        offset = vaddr - self.text_vaddr
        if not int(self._starts[0]) <= offset < int(self._starts[-1]):
            return None
        # Of several that start at one address the last has the code, the others are empty.
        index = int(np.searchsorted(self._starts, self._starts.dtype.type(offset), side="right")) - 1
        return self._function(self._name(index), index)

    def name_at(self, vaddr: int) -> str | None:
        """The name of the function at ``vaddr``."""
        function = self.function_at(vaddr)
        return None if function is None else function.name

    def __len__(self) -> int:
        return self.function_count

    def __iter__(self) -> Iterator[Function]:
        """All functions, ascending by address, ABI wrappers included. Slow for a large table."""
        return (self._function(self._name(index), index) for index in range(self.function_count))

    def _read_functab(self, vaddr: int) -> tuple[int | None, _Starts, npt.NDArray[np.uint32]]:
        """The first function's address where it is given, the starts, and the places of the _func records."""
        if not self._form.has_absolute_pcs:
            table = np.frombuffer(self._records, "<u4", 2 * self.function_count + 1)
            return None, table[0::2].copy(), table[1::2].copy()
        words = self._binary.pointers(vaddr, 2 * self.function_count + 1)
        offsets = np.minimum(words[1::2], np.uint64(_OUTSIDE)).astype(np.uint32)
        return int(words[0]), words[0::2] - words[0], offsets

    def _text(self) -> int:
        """The address of runtime.text."""
        in_header = self._binary.pointer(self.vaddr + _TEXT_WORD)
        if in_header:
            return in_header
        if self.moduledata is None:
            raise self._damaged("nothing says where its code starts")
        return self.moduledata.text_vaddr

    def _check_text(self) -> None:
        """All code must be in one executable segment's part of the file, and where the runtime says it is."""
        first, end = self.text_vaddr + int(self._starts[0]), self.text_vaddr + int(self._starts[-1])
        segment = self._binary.segment_at(first)
        if segment is None or not segment.executable or end > segment.vaddr + segment.file_size:
            raise self._damaged("its functions are not where code is")
        record = self.moduledata
        if record is not None and (record.min_pc_vaddr, record.max_pc_vaddr) != (first, end):
            raise self._damaged("the runtime's own record has other bounds")

    def _function(self, name: str, index: int) -> Function:
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        return Function(name, self.text_vaddr + start, end - start)

    def _name(self, index: int) -> str:
        place = int(self._record_offsets[index]) + self._form.name_byte
        offset = int.from_bytes(self._records[place : place + 4], "little")
        return self._names.name_at(offset) or ""

    def _name_offsets(self) -> npt.NDArray[np.uint32]:
        """Where each function's name starts in the name table; outside of it if its record is nowhere."""
        whole = len(self._records) - 3
        words = np.ndarray((whole,), "<u4", self._records, strides=(1,))
        places = self._record_offsets.astype(np.int64) + self._form.name_byte
        if int(places.max()) < whole:
            return words[places]
        offsets = np.full(len(places), _OUTSIDE, np.uint32)
        inside = places < whole
        offsets[inside] = words[places[inside]]
        return offsets

    def _func_ids(self, entries: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
        records = np.frombuffer(self._records, np.uint8)
        places = self._record_offsets[entries].astype(np.int64) + self._form.func_id_byte
        return records[np.minimum(places, len(records) - 1)]

    def _damaged(self, what: str) -> NotTraceable:
        return NotTraceable(f"{self._binary.path}: damaged Go function table at {self.vaddr:#x}: {what}")


def _sizes_word(arch: Arch) -> int:
    """Bytes 4 to 8 of the header as a number: two zeroes, the instruction quantum, the pointer size."""
    return _INSTRUCTION_QUANTUM[arch] << 16 | _POINTER_SIZE << 24


def _headers(binary: Binary) -> Iterator[tuple[int, int]]:
    """Address and magic of what could be a header, by its first eight bytes; at most 64 of them."""
    words = [magic | _sizes_word(binary.arch) << 32 for magic in (*_FORMATS, _MAGIC_UP_TO_1_15)]
    count = 0
    for segment in binary.segments:
        for vaddr in find_words(binary, segment, words):
            yield vaddr, int.from_bytes(binary.view(vaddr, 4), "little")
            count += 1
            if count >= _MAX_TABLES:
                return
