"""Offsets of struct fields from a Go program's DWARF, without reading the rest of it.

Go's linker writes the type descriptions of the whole program into one compile unit, tens of thousands of
them, so walking there takes seconds. But it stores every name inline, right behind a one-byte abbreviation
code: the description of ``runtime.g`` is found by searching the section for those bytes, and pyelftools
then reads that one entry, its members and the types they lead to. Holds for 1.17 to 1.27, DWARF 4 and 5
(1.25 and later), linked by Go or by gcc, sections compressed or not.
"""

import bisect
import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from elftools.common.exceptions import DWARFError, ELFError
from elftools.construct import ConstructError
from elftools.dwarf.die import DIE
from elftools.dwarf.dwarfinfo import DebugSectionDescriptor, DwarfConfig, DWARFInfo

from schedtrace.symbols.binary import Arch, Binary, Section

_SHF_COMPRESSED = 0x800
_COMPRESSION_HEADER = struct.Struct("<IIQQ")  # Elf64_Chdr: type, reserved, size, alignment
_ELFCOMPRESS_ZLIB = 1
# About what can be decompressed and searched in 0.3 s. Kubernetes' largest programs have some 40 MB.
_MAX_INFO_SIZE = 64 << 20
_MAX_ABBREV_SIZE = 256 << 10
_MAX_UNITS = 200_000
_MAX_CANDIDATES = 64
_MAX_MEMBERS = 1024
_MAX_TYPEDEFS = 8

_UNUSED_SECTIONS = (
    "debug_aranges_sec", "debug_frame_sec", "eh_frame_sec", "debug_str_sec", "debug_loc_sec",
    "debug_ranges_sec",
    "debug_line_sec", "debug_pubtypes_sec", "debug_pubnames_sec", "debug_addr_sec", "debug_str_offsets_sec",
    "debug_line_str_sec", "debug_loclists_sec", "debug_rnglists_sec", "debug_sup_sec", "gnu_debugaltlink_sec",
    "debug_types_sec",
)  # fmt: skip

# What pyelftools raises at entries that make no sense, found by feeding it damaged sections.
_DAMAGED = (
    ELFError, DWARFError, ConstructError, struct.error, ValueError, LookupError, TypeError, AttributeError,
    AssertionError, RecursionError, OverflowError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class Struct:
    """A struct's size in bytes and, for each dotted field asked for that it has, the offset in bytes."""

    size: int
    offsets: Mapping[str, int]


def read_structs(binary: Binary, wanted: Mapping[str, Iterable[str]]) -> dict[str, Struct]:
    """Sizes and offsets of the Go structs ``wanted`` names, each with dotted paths of fields ("sched.sp").

    A struct or field the program's DWARF does not describe is left out; the result is empty if the file has
    no DWARF, more than can be searched quickly, or a damaged one.
    """
    try:
        entries = _open(binary)
        if entries is None:
            return {}
        found = {}
        for name, fields in wanted.items():
            die = _find_struct(entries, name)
            if die is not None:
                offsets = {f: offset for f in fields if (offset := _offset(entries, die, f)) is not None}
                found[name] = Struct(die.attributes["DW_AT_byte_size"].value, offsets)
        return found
    except _DAMAGED:
        return {}


def _open(binary: Binary) -> "_Entries | None":
    content = _section(binary, ".debug_info", _MAX_INFO_SIZE)
    abbreviations = _section(binary, ".debug_abbrev", _MAX_ABBREV_SIZE)
    if content is None or abbreviations is None:
        return None

    def described(name: str, data: bytes) -> DebugSectionDescriptor:
        return DebugSectionDescriptor(io.BytesIO(data), name, 0, len(data), 0)

    machine = "x64" if binary.arch is Arch.AMD64 else "AArch64"
    # Names of struct types and members are inline, so no other section is needed.
    absent = dict.fromkeys(_UNUSED_SECTIONS)
    dwarf = DWARFInfo(
        DwarfConfig(True, machine, 8),
        debug_info_sec=described(".debug_info", content),
        debug_abbrev_sec=described(".debug_abbrev", abbreviations),
        **absent,
    )
    return _Entries(dwarf, content)


def _section(binary: Binary, name: str, limit: int) -> bytes | None:
    section = binary.sections.get(name)
    if section is not None:
        return _decompressed(binary, section, limit)
    # Go up to 1.18 and old binutils: own name, "ZLIB", size as 8 bytes big-endian, data.
    section = binary.sections.get(".z" + name.removeprefix("."))
    if section is None:
        return None
    content = binary.content(section)
    if bytes(content[:4]) != b"ZLIB" or len(content) < 12:
        return None
    return _inflate(content[12:], int.from_bytes(content[4:12], "big"), limit)


def _decompressed(binary: Binary, section: Section, limit: int) -> bytes | None:
    content = binary.content(section)
    if not section.flags & _SHF_COMPRESSED:
        return bytes(content) if len(content) <= limit else None
    if len(content) < _COMPRESSION_HEADER.size:
        return None
    kind, _, size, _ = _COMPRESSION_HEADER.unpack(content[: _COMPRESSION_HEADER.size])
    if kind != _ELFCOMPRESS_ZLIB:
        return None
    return _inflate(content[_COMPRESSION_HEADER.size :], size, limit)


def _inflate(content: memoryview, size: int, limit: int) -> bytes | None:
    if size > limit:
        return None
    try:
        data = zlib.decompressobj().decompress(content, size + 1)
    except zlib.error:
        return None
    return data if len(data) == size else None


class _Entries:
    """Random access to the entries of .debug_info."""

    def __init__(self, dwarf: DWARFInfo, content: bytes) -> None:
        self.content = content
        self._dwarf = dwarf
        self._stream = io.BytesIO(content)
        self._starts = list(islice(_unit_starts(content), _MAX_UNITS))
        self._members: dict[int, dict[str, DIE]] = {}

    def at(self, offset: int) -> DIE:
        """The entry at ``offset``; raises one of _DAMAGED if there can be none."""
        start = self._starts[bisect.bisect_right(self._starts, offset) - 1]
        return DIE(self._dwarf.get_CU_at(start), self._stream, offset)

    def members(self, struct_die: DIE) -> Mapping[str, DIE]:
        """A struct's members by name: the entries behind it. None has entries of its own below."""
        known = self._members.get(struct_die.offset)
        if known is not None:
            return known
        found = self._members[struct_die.offset] = {}
        offset = struct_die.offset + struct_die.size
        for _ in range(_MAX_MEMBERS):
            die = self.at(offset)
            if die.tag != "DW_TAG_member" or die.has_children:
                break
            found.setdefault(_name(die), die)
            offset += die.size
        return found

    def type_of(self, die: DIE) -> DIE | None:
        """The struct that a member or a typedef is of; None if it is of anything else."""
        for _ in range(_MAX_TYPEDEFS):
            reference = die.attributes["DW_AT_type"]
            within_unit = reference.form != "DW_FORM_ref_addr"
            die = self.at(reference.value + (die.cu.cu_offset if within_unit else 0))
            if die.tag == "DW_TAG_structure_type":
                return die
            if die.tag != "DW_TAG_typedef":
                return None
        return None


def _unit_starts(content: bytes) -> Iterator[int]:
    start = 0
    while start + 4 <= len(content):
        (length,) = struct.unpack_from("<I", content, start)
        if length >= 0xFFFFFFF0:  # 64-bit DWARF: Go writes none
            return
        yield start
        start += 4 + length


def _find_struct(entries: _Entries, name: str) -> DIE | None:
    needle = name.encode() + b"\0"
    position = 0
    for _ in range(_MAX_CANDIDATES):
        position = entries.content.find(needle, position + 1)
        if position <= 0:
            return None
        # Right before is the abbreviation code; Go's table has fewer than 128, so it is one byte.
        if entries.content[position - 1] >= 0x80:
            continue
        try:
            die = entries.at(position - 1)
        except _DAMAGED:
            continue  # these bytes were part of another entry
        if die.tag == "DW_TAG_structure_type" and _name(die) == name and "DW_AT_byte_size" in die.attributes:
            return die
    return None


def _name(die: DIE) -> str:
    attribute = die.attributes.get("DW_AT_name")
    return attribute.value.decode("utf-8", "replace") if attribute else ""


def _offset(entries: _Entries, struct_die: DIE, path: str) -> int | None:
    first, _, rest = path.partition(".")
    member = entries.members(struct_die).get(first)
    if member is None:
        return None
    offset = int(member.attributes["DW_AT_data_member_location"].value)
    if not rest:
        return offset
    inner = entries.type_of(member)
    further = None if inner is None else _offset(entries, inner, rest)
    return None if further is None else offset + further
