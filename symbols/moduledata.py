"""The runtime's moduledata: the record through which a Go program finds its own function table and text.

Offsets in bytes: type moduledata in runtime/symtab.go. The fields used here haven't moved from Go 1.16 to
1.27.
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
    """Where the record is, and what it says: text is [text, etext), functions are in [min_pc, max_pc)."""

    vaddr: int
    min_pc_vaddr: int
    max_pc_vaddr: int
    text_vaddr: int
    etext_vaddr: int


def find_moduledata(binary: Binary, pclntab_vaddr: int, names_vaddr: int) -> Moduledata | None:
    """The record that points to the function table at ``pclntab_vaddr`` and its names at ``names_vaddr``.

    None if the file has none.
    """
    for vaddr in _candidates(binary, pclntab_vaddr):
        try:
            if binary.pointer(vaddr + _PC_HEADER) != pclntab_vaddr:
                continue
            if binary.pointer(vaddr + _FUNCNAMETAB) != names_vaddr:
                continue
            min_pc, max_pc, text, etext = (binary.pointer(vaddr + o) for o in (_MINPC, _MAXPC, _TEXT, _ETEXT))
        except NotTraceable:
            continue  # too near to the end of its segment to be one
        if text <= min_pc < max_pc <= etext:
            return Moduledata(vaddr, min_pc, max_pc, text, etext)
    return None


def _candidates(binary: Binary, pclntab_vaddr: int) -> Iterator[int]:
    section = binary.sections.get(_SECTION)
    if section is not None:
        yield section.vaddr
    yield from binary.relocations.vaddrs_of(pclntab_vaddr)
    for segment in sorted(binary.segments, key=lambda s: (not s.writable, s.executable)):
        yield from find_words(binary, segment, [pclntab_vaddr])
