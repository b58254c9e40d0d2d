"""Offsets of struct fields from a Go program's DWARF, without reading the rest of it.

Go's linker writes the type descriptions of the whole program into one compile unit, tens of thousands of
them, so walking there takes seconds. But it stores every name inline, right behind a one-byte abbreviation
code: the description of ``runtime.g`` is found by searching the section for those bytes, and that one
entry is read, its members and the types they lead to. Holds for 1.17 to 1.27, DWARF 4 and 5 (1.25 and later),
linked by Go or by gcc, sections compressed or not.

pyelftools reads the headers of units and the table of abbreviations. Entries are read here: it takes a tenth
of a millisecond for one, and a few hundred are needed.
"""

import bisect
import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from elftools.common.exceptions import DWARFError, ELFError
from elftools.construct import ConstructError
from elftools.dwarf.compileunit import CompileUnit
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


# Bytes of the forms that have a fixed size, as in 64-bit programs with 32-bit DWARF; DWARF 5, 7.5.6.
_FIXED_SIZES = {
    "DW_FORM_addr": 8, "DW_FORM_data1": 1, "DW_FORM_data2": 2, "DW_FORM_data4": 4, "DW_FORM_data8": 8,
    "DW_FORM_ref1": 1, "DW_FORM_ref2": 2, "DW_FORM_ref4": 4, "DW_FORM_ref8": 8, "DW_FORM_ref_addr": 4,
    "DW_FORM_flag": 1, "DW_FORM_flag_present": 0, "DW_FORM_sec_offset": 4, "DW_FORM_strp": 4,
}  # fmt: skip
_NUMBERS = frozenset({"DW_FORM_udata", "DW_FORM_ref_udata", "DW_FORM_addrx", "DW_FORM_strx"})


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
            entry = _find_struct(entries, name)
            if entry is not None:
                offsets = {f: offset for f in fields if (offset := _offset(entries, entry, f)) is not None}
                found[name] = Struct(entry.number("DW_AT_byte_size"), offsets)
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry without what is below it. ``attributes``: name -> (form, value), numbers and bytes of strings."""

    offset: int
    end: int
    unit_offset: int
    tag: str
    has_children: bool
    attributes: dict[str, tuple[str, int | bytes]] = field(default_factory=dict)

    def number(self, attribute: str) -> int:
        """Raises LookupError or ValueError if it has no such attribute that is a number."""
        _, value = self.attributes[attribute]
        if isinstance(value, bytes):
            raise ValueError(f"{attribute} is no number")
        return value

    @property
    def name(self) -> str:
        """Empty if it has none, or not inline."""
        _, value = self.attributes.get("DW_AT_name", ("", b""))
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


class _Entries:
    """Random access to the entries of .debug_info."""

    def __init__(self, dwarf: DWARFInfo, content: bytes) -> None:
        self.content = content
        self._dwarf = dwarf
        self._starts = list(islice(_unit_starts(content), _MAX_UNITS))
        self._units: dict[int, CompileUnit] = {}
        self._members: dict[int, dict[str, _Entry]] = {}

    def at(self, offset: int) -> _Entry:
        """The entry at ``offset``; raises one of _DAMAGED if there can be none, or one that Go doesn't write."""
        start = self._starts[bisect.bisect_right(self._starts, offset) - 1]
        if start not in self._units:
            self._units[start] = self._dwarf.get_CU_at(start)
        unit = self._units[start]
        code, position = _uleb128(self.content, offset)
        if not code:
            return _Entry(offset, position, start, "", False)  # the end of what is below another
        abbreviation = unit.get_abbrev_table().get_abbrev(code)
        attributes: dict[str, tuple[str, int | bytes]] = {}
        for spec in abbreviation["attr_spec"]:
            value, position = _value(self.content, position, spec.form)
            attributes[spec.name] = (spec.form, value)
        return _Entry(offset, position, start, abbreviation["tag"], abbreviation.has_children(), attributes)

    def members(self, struct: _Entry) -> Mapping[str, _Entry]:
        """A struct's members by name: the entries behind it. None has entries of its own below."""
        known = self._members.get(struct.offset)
        if known is not None:
            return known
        found = self._members[struct.offset] = {}
        offset = struct.end
        for _ in range(_MAX_MEMBERS):
            entry = self.at(offset)
            if entry.tag != "DW_TAG_member" or entry.has_children:
                break
            found.setdefault(entry.name, entry)
            offset = entry.end
        return found

    def type_of(self, entry: _Entry) -> _Entry | None:
        """The struct that a member or a typedef is of; None if it is of anything else."""
        for _ in range(_MAX_TYPEDEFS):
            form, _ = entry.attributes["DW_AT_type"]
            unit_offset = 0 if form == "DW_FORM_ref_addr" else entry.unit_offset
            entry = self.at(entry.number("DW_AT_type") + unit_offset)
            if entry.tag == "DW_TAG_structure_type":
                return entry
            if entry.tag != "DW_TAG_typedef":
                return None
        return None


def _value(content: bytes, position: int, form: str) -> tuple[int | bytes, int]:
    """An attribute's value, and where it ends. Raises ValueError for forms that entries of types don't have in Go."""
    size = _FIXED_SIZES.get(form)
    if size is not None:
        return int.from_bytes(content[position : position + size], "little"), position + size
    if form == "DW_FORM_string":
        end = content.index(b"\0", position)
        return content[position:end], end + 1
    if form in _NUMBERS:
        return _uleb128(content, position)
    if form == "DW_FORM_block1":
        end = position + 1 + content[position]
        return content[position + 1 : end], end
    raise ValueError(f"{form} is not known here")


def _uleb128(content: bytes, position: int) -> tuple[int, int]:
    """A number of variable length, of at most 64 bits, and where it ends."""
    number = shift = 0
    while True:
        byte = content[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _unit_starts(content: bytes) -> Iterator[int]:
    start = 0
    while start + 4 <= len(content):
        (length,) = struct.unpack_from("<I", content, start)
        if length >= 0xFFFFFFF0:  # 64-bit DWARF: Go writes none
            return
        yield start
        start += 4 + length


def _find_struct(entries: _Entries, name: str) -> _Entry | None:
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
            entry = entries.at(position - 1)
        except _DAMAGED:
            continue  # these bytes were part of another entry
        if entry.tag == "DW_TAG_structure_type" and entry.name == name and "DW_AT_byte_size" in entry.attributes:
            return entry
    return None


def _offset(entries: _Entries, struct: _Entry, path: str) -> int | None:
    first, _, rest = path.partition(".")
    member = entries.members(struct).get(first)
    if member is None:
        return None
    offset = member.number("DW_AT_data_member_location")
    if not rest:
        return offset
    inner = entries.type_of(member)
    further = None if inner is None else _offset(entries, inner, rest)
    return None if further is None else offset + further
