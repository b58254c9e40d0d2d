"""The fixed structures of an ELF file: identification, program headers, section headers, notes.

Every count and size in a header is a stranger's claim. Each is checked against the file's length before
anything is allocated or looped over, and what the kernel would not load is refused. The structures are
read as numpy records and not through pyelftools: three fixed layouts need no parser, and hostile headers
can't reach code that trusts them.

Layouts and constants: System V ABI, chapters 4 and 5 (elf.h). What the kernel accepts: fs/binfmt_elf.c.
"""

import enum
import itertools
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedtrace.errors import NotTraceable

ET_EXEC, ET_DYN = 2, 3
PT_LOAD, PT_DYNAMIC, PT_NOTE = 1, 2, 4
SHT_NULL, SHT_SYMTAB, SHT_NOBITS = 0, 2, 8
_PF_X, _PF_W, _PF_R = 1, 2, 4
_ELFCLASS64, _ELFDATA2LSB = 2, 1
_NT_GNU_BUILD_ID = 3

_HEADER_SIZE = 64
_HEADER = struct.Struct("<HH12xQQ6xHHHHH")  # e_type, e_machine, e_phoff, e_shoff, e_phentsize ... from byte 16
_PROGRAM_HEADER = np.dtype(
    [
        ("type", "<u4"),
        ("flags", "<u4"),
        ("offset", "<u8"),
        ("vaddr", "<u8"),
        ("paddr", "<u8"),
        ("file_size", "<u8"),
        ("memory_size", "<u8"),
        ("align", "<u8"),
    ]
)
_SECTION_HEADER = np.dtype(
    [
        ("name", "<u4"),
        ("type", "<u4"),
        ("flags", "<u8"),
        ("vaddr", "<u8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("link", "<u4"),
        ("info", "<u4"),
        ("align", "<u8"),
        ("entry_size", "<u8"),
    ]
)
# The kernel refuses to execute a file whose program headers take more than 64 KiB.
_MAX_PROGRAM_HEADERS = 65536 // _PROGRAM_HEADER.itemsize
_MAX_SECTION_NAME = 256
_MAX_NOTES_SIZE = 65536
_MAX_NOTE_SEGMENTS = 16
_PAGE_SIZE = 4096  # the smallest page of both architectures
_MAX_LOADED_SIZE = 2 << 30  # code and data reach each other by 32-bit signed offsets
_ADDRESS_LIMIT = 1 << 56  # user space ends here on amd64 with five-level page tables, lower elsewhere


class Arch(enum.Enum):
    """Architectures that can be traced; the value is Go's name (GOARCH)."""

    AMD64 = "amd64"
    ARM64 = "arm64"


_MACHINES = {62: Arch.AMD64, 183: Arch.ARM64}
_OTHER_MACHINES = {21: "PowerPC64", 22: "S390", 243: "RISC-V", 258: "LoongArch", 8: "MIPS"}
_OTHER_TYPES = {1: "an object file, not linked", 4: "a core dump"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A PT_LOAD program header: ``file_size`` bytes at ``file_offset`` appear at ``vaddr``, then zeroes."""

    vaddr: int
    file_offset: int
    file_size: int
    memory_size: int
    readable: bool
    writable: bool
    executable: bool


@dataclass(frozen=True, slots=True)
class Section:
    """A section header. ``vaddr`` is 0 if it is not loaded; ``link`` is an index of the section table."""

    name: str
    vaddr: int
    file_offset: int
    size: int
    type: int
    flags: int
    link: int
    entry_size: int


@dataclass(frozen=True, slots=True)
class Headers:
    """``dynamic`` is the dynamic segment's (file offset, size in bytes), (0, 0) if there is none."""

    arch: Arch
    position_independent: bool
    segments: tuple[Segment, ...]
    sections: tuple[Section, ...]
    dynamic: tuple[int, int]
    build_id: str | None


def read_headers(data: memoryview) -> Headers:
    """Headers of the file ``data``; NotTraceable, with the reason but not the file's name, if refused."""
    header = _identified(data)
    elf_type, machine, program_offset, section_offset, *counts = _HEADER.unpack(header[16:])
    program_size, program_count, section_size, section_count, names_index = counts
    arch = _MACHINES.get(machine)
    if arch is None:
        name = _OTHER_MACHINES.get(machine, f"machine {machine}")
        raise NotTraceable(f"built for {name}; only amd64 and arm64 can be traced")
    if elf_type not in (ET_EXEC, ET_DYN):
        what = _OTHER_TYPES.get(elf_type, f"ELF type {elf_type}")
        raise NotTraceable(f"neither an executable nor a shared object but {what}")
    if program_count == 0:
        raise NotTraceable("no program headers: nothing the kernel can load")
    if program_size != _PROGRAM_HEADER.itemsize or program_count > _MAX_PROGRAM_HEADERS:
        raise NotTraceable("damaged: the kernel would refuse its program headers")
    program_headers = _records(data, _PROGRAM_HEADER, program_offset, program_count, "the program headers")
    sections = _sections(data, section_offset, section_size, section_count, names_index)
    dynamic = [(h["offset"], h["file_size"]) for h in program_headers if h["type"] == PT_DYNAMIC]
    for offset, size in dynamic:
        _check_end(data, offset + size, "the dynamic segment")
    return Headers(
        arch=arch,
        position_independent=elf_type == ET_DYN,
        segments=_segments(data, program_headers),
        sections=sections,
        dynamic=dynamic[0] if dynamic else (0, 0),
        build_id=_build_id(data, program_headers, sections),
    )


def _identified(data: memoryview) -> bytes:
    header = bytes(data[:_HEADER_SIZE])
    if header[:4] != b"\x7fELF":
        raise NotTraceable("not an ELF file")
    _check_end(data, _HEADER_SIZE, "the ELF header")
    if header[4] != _ELFCLASS64:
        raise NotTraceable("not a 64-bit ELF file; only amd64 and arm64 can be traced")
    if header[5] != _ELFDATA2LSB:
        raise NotTraceable("not a little-endian ELF file; only amd64 and arm64 can be traced")
    return header


def _check_end(data: memoryview, end: int, what: str) -> None:
    if end > len(data):
        raise NotTraceable(f"truncated: the file ends at byte {len(data)}, {what} at {end}")


def _records(data: memoryview, kind: np.dtype[Any], offset: int, count: int, what: str) -> list[dict[str, int]]:
    _check_end(data, offset + count * kind.itemsize, what)
    names = kind.names or ()
    rows = np.frombuffer(data, kind, count, offset).tolist()
    return [dict(zip(names, row, strict=True)) for row in rows]


def _segments(data: memoryview, program_headers: list[dict[str, int]]) -> tuple[Segment, ...]:
    segments = []
    for header in program_headers:
        if header["type"] != PT_LOAD:
            continue
        vaddr, offset, flags = header["vaddr"], header["offset"], header["flags"]
        file_size, memory_size = header["file_size"], header["memory_size"]
        if file_size > memory_size or vaddr + memory_size > _ADDRESS_LIMIT:
            raise NotTraceable(f"damaged: impossible size of the segment at {vaddr:#x}")
        if file_size:
            _check_end(data, offset + file_size, f"the segment at {vaddr:#x}")
            if (offset - vaddr) % _PAGE_SIZE:
                # The kernel maps whole pages: such a file has no rule from address to file offset.
                raise NotTraceable(f"damaged: the segment at {vaddr:#x} can't be mapped from byte {offset}")
        readable, writable, executable = bool(flags & _PF_R), bool(flags & _PF_W), bool(flags & _PF_X)
        segments.append(Segment(vaddr, offset, file_size, memory_size, readable, writable, executable))
    segments.sort(key=lambda segment: segment.vaddr)
    for one, following in itertools.pairwise(segments):
        if one.vaddr + one.memory_size > following.vaddr:
            raise NotTraceable(f"damaged: segments overlap at {following.vaddr:#x}")
    if not any(segment.executable and segment.file_size for segment in segments):
        raise NotTraceable("no code in it (a file of debug symbols only?)")
    # What follows bounds the time of every search through the segments.
    size = sum(segment.file_size for segment in segments)
    if size > 2 * len(data):
        raise NotTraceable("damaged: its segments share their content")
    if size > _MAX_LOADED_SIZE:
        raise NotTraceable(f"{size >> 20} MiB to load: more than a Go program can have")
    return tuple(segments)


def _sections(data: memoryview, offset: int, entry_size: int, count: int, names_index: int) -> tuple[Section, ...]:
    # A count of 0 with an offset would mean more than 65,279 sections, with the count in the first of
    # them: no linked program has that, so it reads as none.
    if offset == 0 or count == 0:
        return ()
    if entry_size != _SECTION_HEADER.itemsize:
        raise NotTraceable("damaged: section headers of an unknown size")
    headers = _records(data, _SECTION_HEADER, offset, count, "the section headers")
    names = data[:0]
    if names_index < count and headers[names_index]["type"] not in (SHT_NULL, SHT_NOBITS):
        start = headers[names_index]["offset"]
        names = data[start : start + headers[names_index]["size"]]
    sections = []
    for header in headers:
        name = bytes(names[header["name"] : header["name"] + _MAX_SECTION_NAME]).partition(b"\0")[0]
        section = Section(
            name=name.decode("utf-8", "replace"),
            vaddr=header["vaddr"],
            file_offset=header["offset"],
            size=header["size"],
            type=header["type"],
            flags=header["flags"],
            link=header["link"],
            entry_size=header["entry_size"],
        )
        if section.type not in (SHT_NULL, SHT_NOBITS):
            _check_end(data, section.file_offset + section.size, f"section {section.name!r}")
        sections.append(section)
    return tuple(sections)


def _build_id(data: memoryview, program_headers: list[dict[str, int]], sections: tuple[Section, ...]) -> str | None:
    """The GNU build id in hex: from the notes that are loaded, else from its own section."""
    places = [(h["offset"], h["file_size"]) for h in program_headers if h["type"] == PT_NOTE]
    places = places[:_MAX_NOTE_SEGMENTS]
    places += [(s.file_offset, s.size) for s in sections if s.name == ".note.gnu.build-id"][:1]
    for offset, size in places:
        found = _build_id_note(data[offset : offset + min(size, _MAX_NOTES_SIZE)])
        if found is not None:
            return found
    return None


def _build_id_note(notes: memoryview) -> str | None:
    position = 0
    while position + 12 <= len(notes):
        name_size, content_size, kind = struct.unpack_from("<III", notes, position)
        name_start = position + 12
        start = name_start + (name_size + 3 & ~3)
        end = start + content_size
        if end > len(notes):
            return None
        if kind == _NT_GNU_BUILD_ID and bytes(notes[name_start:start]) == b"GNU\0":
            return bytes(notes[start:end]).hex() if 0 < content_size <= 64 else None
        position = start + (content_size + 3 & ~3)
    return None
