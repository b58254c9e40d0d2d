"""The runtime's moduledata: the record through which a Go program finds its own function table and text.

Offsets (bytes): runtime/symtab.go, type moduledata; unchanged from Go 1.16 to 1.27 as far as the fields used here go.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.scan import find_words

_PC_HEADER, _FUNCNAMETAB, _MINPC, _MAXPC, _TEXT, _ETEXT = 0, 8, 160, 168, 176, 184
_SECTION = ".go.module"  # Go 1.26 and newer


@dataclass(frozen=True, slots=True)
class Moduledata:
    """Where the record is and what it says of the text: [text_vaddr, etext_vaddr) is Go's, [min_pc, max_pc) has functions."""

    vaddr: int
    min_pc: int
    max_pc: int
    text_vaddr: int
    etext_vaddr: int


def find_moduledata(binary: Binary, pclntab_vaddr: int, names_vaddr: int) -> Moduledata | None:
    """The record that points to the function table at ``pclntab_vaddr``, whose names start at ``names_vaddr``.

    None if the file has none.
    """
    for vaddr in _candidates(binary, pclntab_vaddr):
        try:
            if (
                binary.pointer(vaddr + _PC_HEADER) != pclntab_vaddr
                or binary.pointer(vaddr + _FUNCNAMETAB) != names_vaddr
            ):
                continue
            words = {offset: binary.pointer(vaddr + offset) for offset in (_MINPC, _MAXPC, _TEXT, _ETEXT)}
        except NotTraceable:
            continue  # too near to a segment's end to be one
        found = Moduledata(vaddr, words[_MINPC], words[_MAXPC], words[_TEXT], words[_ETEXT])
        if found.text_vaddr <= found.min_pc < found.max_pc <= found.etext_vaddr:
            return found
    return None


def _candidates(binary: Binary, pclntab_vaddr: int) -> Iterator[int]:
    section = binary.sections.get(_SECTION)
    if section is not None:
        yield section.vaddr
    yield from binary.relocations.vaddrs_of(pclntab_vaddr)
    for segment in sorted(binary.segments, key=lambda s: not s.writable):
        if not segment.executable or segment.writable:
            yield from find_words(binary, segment, pclntab_vaddr)


def text_bounds_agree(binary: Binary, first_vaddr: int, end_vaddr: int) -> bool:
    """Whether code from ``first_vaddr`` up to ``end_vaddr`` lies in one executable segment's part of the file."""
    segment = binary.segment_at(first_vaddr)
    return (segment is not None and segment.executable and first_vaddr < end_vaddr
            and end_vaddr <= segment.vaddr + segment.file_size)  # fmt: skip
