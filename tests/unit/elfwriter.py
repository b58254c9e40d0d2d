"""ELF files written in memory, so that tests of the readers need no compiler and can be wrong in any way.

:class:`Elf` writes headers, segments, sections and relocations; :func:`go_program` fills one with what Go's
linker writes and the readers look at: build information, function table, moduledata, symbols. Layouts are
those that symbols/ documents.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

AMD64, ARM64 = 62, 183
EXECUTABLE, SHARED = 2, 3
READ, WRITE, EXECUTE = 4, 2, 1
PT_LOAD, PT_DYNAMIC, PT_NOTE = 1, 2, 4
SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_DYNAMIC, SHT_NOBITS = 1, 2, 3, 6, 8
FUNCTION, OBJECT = 2, 1
_GLOBAL = 1 << 4
PAGE = 4096

_RELATIVE = {AMD64: 8, ARM64: 1027}


def aligned(position: int, alignment: int = 16) -> int:
    return -(-position // alignment) * alignment


@dataclass
class _Section:
    name: str
    vaddr: int
    size: int
    content: bytes | None  # None: part of a segment
    kind: int
    link: str
    entry_size: int


@dataclass
class Elf:
    """An ELF file in the making; :meth:`to_bytes` may be called any number of times."""

    machine: int = AMD64
    elf_type: int = EXECUTABLE
    program_headers: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    contents: dict[int, bytes] = field(default_factory=dict)
    sections: list[_Section] = field(default_factory=list)

    def load(self, vaddr: int, content: bytes, flags: int = READ | EXECUTE, *, memory_size: int | None = None) -> None:
        """A PT_LOAD segment with that content, zeroes behind it up to ``memory_size``."""
        self.contents[vaddr] = content
        self.program_headers.append((PT_LOAD, flags, vaddr, len(content), memory_size or len(content)))

    def mark(self, kind: int, vaddr: int, size: int) -> None:
        """Another program header for bytes that a segment has loaded: PT_DYNAMIC, PT_NOTE."""
        self.program_headers.append((kind, READ, vaddr, size, size))

    def section(self, name: str, vaddr: int, size: int, kind: int = SHT_PROGBITS) -> None:
        """A name for bytes that a segment has loaded."""
        self.sections.append(_Section(name, vaddr, size, None, kind, "", 0))

    def extra(self, name: str, content: bytes, kind: int = SHT_PROGBITS, *, link: str = "",
              entry_size: int = 0) -> None:  # fmt: skip
        """A section that isn't loaded; ``link`` names another one."""
        self.sections.append(_Section(name, 0, len(content), content, kind, link, entry_size))

    def symbols(self, symbols: Iterable[tuple[str, int, int, int]]) -> None:
        """.symtab and .strtab with symbols (name, vaddr, size, FUNCTION or OBJECT), all defined."""
        names, table = bytearray(1), bytearray(24)
        for name, vaddr, size, kind in symbols:
            table += struct.pack("<IBBHQQ", len(names), _GLOBAL | kind, 0, 1, vaddr, size)
            names += name.encode() + b"\0"
        self.extra(".symtab", bytes(table), SHT_SYMTAB, link=".strtab", entry_size=24)
        self.extra(".strtab", bytes(names), SHT_STRTAB)

    def relocate(self, vaddr: int, targets: dict[int, int]) -> None:
        """A segment at ``vaddr`` of RELATIVE relocations: address of a word -> what it points to."""
        table = b"".join(
            struct.pack("<QQq", place, _RELATIVE[self.machine], target) for place, target in targets.items()
        )
        start = vaddr + 64
        self.load(vaddr, struct.pack("<8Q", 7, start, 8, len(table), 9, 24, 0, 0) + table)
        self.mark(PT_DYNAMIC, vaddr, 64)
        self.sections.append(_Section(".dynamic", vaddr, 64, None, SHT_DYNAMIC, ".shstrtab", 16))

    def to_bytes(self, *, with_sections: bool = True) -> bytes:
        """The file. Without sections it is what the kernel needs and no more."""
        headers_end = 64 + 56 * len(self.program_headers)
        offsets: dict[int, int] = {}
        end = headers_end
        for vaddr, content in self.contents.items():
            offsets[vaddr] = aligned(end, PAGE) + vaddr % PAGE
            end = offsets[vaddr] + len(content)
        table = self._section_headers(offsets, end) if with_sections and self.sections else None
        image = bytearray(self._elf_header(table))
        for kind, flags, vaddr, size, memory_size in self.program_headers:
            offset = self._offset(offsets, vaddr)
            image += struct.pack("<IIQQQQQQ", kind, flags, offset, vaddr, vaddr, size, memory_size, PAGE)
        for vaddr, content in self.contents.items():
            image += bytes(offsets[vaddr] - len(image)) + content
        if table:
            image += bytes(table.content_start - len(image)) + table.content
            image += bytes(table.start - len(image)) + table.headers
        return bytes(image)

    def _offset(self, offsets: dict[int, int], vaddr: int) -> int:
        for start, content in self.contents.items():
            if start <= vaddr <= start + len(content):
                return offsets[start] + vaddr - start
        return 0

    def _elf_header(self, table: "_SectionTable | None") -> bytes:
        start, count = (table.start, len(table.headers) // 64) if table else (0, 0)
        identity = b"\x7fELF\x02\x01\x01" + bytes(9)
        return identity + struct.pack(
            "<HHIQQQIHHHHHH", self.elf_type, self.machine, 1, 0, 64, start, 0, 64, 56,
            len(self.program_headers), 64, count, max(count - 1, 0),
        )  # fmt: skip

    def _section_headers(self, offsets: dict[int, int], end: int) -> "_SectionTable":
        content_start = aligned(end)
        content = bytearray()
        names = bytearray(1)
        headers = bytearray(64)
        sections = [*self.sections, _Section(".shstrtab", 0, 0, None, SHT_STRTAB, "", 0)]
        index = {section.name: number for number, section in enumerate(sections, start=1)}
        for section in sections:
            name_at = len(names)
            names += section.name.encode() + b"\0"
            if section.name == ".shstrtab":
                section.content, section.size = bytes(names), len(names)
            if section.content is None:
                offset = self._offset(offsets, section.vaddr)
            else:
                content += bytes(aligned(len(content)) - len(content))
                offset = content_start + len(content)
                content += section.content
            headers += struct.pack(
                "<IIQQQQIIQQ", name_at, section.kind, 2 if section.vaddr else 0, section.vaddr, offset,
                section.size, index.get(section.link, 0), int(section.kind == SHT_SYMTAB), 1,
                section.entry_size,
            )  # fmt: skip
        start = aligned(content_start + len(content))
        return _SectionTable(content_start, bytes(content), start, bytes(headers))


@dataclass
class _SectionTable:
    content_start: int
    content: bytes
    start: int
    headers: bytes


@dataclass(frozen=True)
class Function:
    """``size`` is in bytes; ``func_id`` is the runtime's: 0 for ordinary ones, 21 to 23 for ABI wrappers."""

    name: str
    size: int = 64
    func_id: int = 0


FUNCTIONS = (
    Function("internal/cpu.Initialize", 96),
    Function("runtime.casgstatus", 416),
    Function("runtime.execute", 224),
    Function("runtime.ready", 384),
    Function("runtime.newproc"),
    Function("runtime.newproc", 32, func_id=21),
    Function("main.main", 128),
)


@dataclass
class FunctionTable:
    """``pointers``: the offset in ``content`` of each word that is one, and what it points to."""

    content: bytes
    pointers: dict[int, int]
    names_offset: int


MAGICS = {"1.16": 0xFFFFFFFA, "1.18": 0xFFFFFFF0, "1.20": 0xFFFFFFF1}


def function_table(
    form: str,
    functions: Sequence[Function],
    text_vaddr: int,
    *,
    quantum: int = 1,
    text_in_header: bool = True,
) -> FunctionTable:
    """A pclntab of the format that Go 1.16, 1.18 or 1.20 began to write."""
    absolute = form == "1.16"
    names = bytearray(1)
    name_offsets: dict[str, int] = {}
    for function in functions:
        if function.name not in name_offsets:
            name_offsets[function.name] = len(names)
            names += function.name.encode() + b"\0"
    header_size = 64 if absolute else 72
    parts = [header_size]
    for size in (len(names), 4, 8, 4):  # names, then stand-ins for compilation units, files and pc data
        parts.append(aligned(parts[-1] + size, 8))
    entry = "<QQ" if absolute else "<II"
    record_size = 48 if absolute else 44
    functab_size = aligned(struct.calcsize(entry) * len(functions) + (8 if absolute else 4), 8)
    functab, records = bytearray(), bytearray()
    pointers: dict[int, int] = {}
    place = 0
    for function in functions:
        record = functab_size + len(records)
        start = place + (text_vaddr if absolute else 0)
        if absolute:
            pointers[parts[-1] + len(functab)] = start
            pointers[parts[-1] + record] = start
        functab += struct.pack(entry, start, record)
        body = bytearray(record_size)
        struct.pack_into("<Qi" if absolute else "<Ii", body, 0, start, name_offsets[function.name])
        body[36 if form == "1.18" else 40] = function.func_id
        records += body
        place += function.size
    if absolute:
        pointers[parts[-1] + len(functab)] = place + text_vaddr
    functab += struct.pack(entry[:2], place + (text_vaddr if absolute else 0))
    functab += bytes(functab_size - len(functab))
    words = [len(functions), 1, *([] if absolute else [text_vaddr if text_in_header else 0]), *parts]
    if not absolute and text_in_header:
        pointers[24] = text_vaddr
    content = struct.pack("<IHBB", MAGICS[form], 0, quantum, 8) + struct.pack(f"<{len(words)}Q", *words)
    for start, part in ((parts[0], bytes(names)), (parts[-1], bytes(functab + records))):
        content += bytes(start - len(content)) + part
    return FunctionTable(content, pointers, header_size)


def build_information(version: str, modules: str = "") -> bytes:
    """.go.buildinfo as Go 1.18 and newer write it."""
    text = b"0w\xaf\x0c\x92t\x08\x02A\xe1\xc1\x07\xe6\xd6\x18\xe6" + modules.encode()
    text += b"\xf92C1\x86\x18 r\x00\x82B\x10A\x16\xd8\xf2"
    content = b"\xff Go buildinf:\x08\x02" + bytes(16)
    for string in (version.encode(), text if modules else b""):
        content += varint(len(string)) + string
    return content


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


@dataclass
class GoProgram:
    """The file and where things are in it: the truth that tests compare with."""

    elf: Elf
    text_vaddr: int
    pclntab_vaddr: int
    moduledata_vaddr: int
    functions: tuple[Function, ...]

    def vaddr_of(self, index: int) -> int:
        return self.text_vaddr + sum(function.size for function in self.functions[:index])


def go_program(
    form: str = "1.20",
    functions: Sequence[Function] = FUNCTIONS,
    *,
    version: str = "go1.22.10",
    modules: str = "path\tmain\nbuild\t-compiler=gc\n",
    machine: int = AMD64,
    position_independent: bool = False,
    text_in_header: bool = True,
    named_sections: bool = True,
    build_info: bool = True,
    symbols: bool = False,
    code_before_text: int = 0,
    constants: bytes = b"",
) -> GoProgram:
    """A program with a table of that format, as Go's linker would write it but with breakpoints for code.

    Position independent ones have zeroes where pointers are relocated, as GNU ld leaves them. ``constants``
    is put into the read-only segment, 16-byte aligned.
    """
    elf = Elf(machine, SHARED if position_independent else EXECUTABLE)
    base = 0x1000 if position_independent else 0x401000
    text = base + code_before_text
    text_end = text + sum(function.size for function in functions)
    elf.load(base, b"\xcc" * (text_end - base), READ | EXECUTE)
    table = function_table(form, functions, text, quantum=4 if machine == ARM64 else 1,
                           text_in_header=text_in_header)  # fmt: skip
    version_text = version.encode()
    rodata = aligned(text_end, PAGE) + PAGE + 0x40
    table_offset = aligned(len(version_text) + 64, 32)
    readonly = bytes(16) + version_text + b"go1.2 and others"
    readonly += bytes(table_offset - len(readonly)) + table.content
    readonly += bytes(aligned(rodata + len(readonly)) - rodata - len(readonly)) + constants
    pclntab = rodata + table_offset
    elf.load(rodata, readonly, READ)
    data = aligned(rodata + len(readonly), PAGE) + PAGE + 0x120
    info = build_information(version, modules) if build_info else b""
    moduledata = data + aligned(len(info), 64) + 64
    places = {data + aligned(len(info), 64): rodata + 16}  # runtime.buildVersion {pointer, length}
    places |= {pclntab + offset: target for offset, target in table.pointers.items()}
    for offset, target in ((0, pclntab), (8, pclntab + table.names_offset), (160, text), (168, text_end),
                           (176, text), (184, text_end)):  # fmt: skip
        places[moduledata + offset] = target
    content = bytearray(moduledata + 552 - data)
    content[: len(info)] = info
    struct.pack_into("<Q", content, aligned(len(info), 64) + 8, len(version_text))
    elf.load(data, bytes(content), READ | WRITE, memory_size=len(content) + 0x2000)
    if position_independent:
        _fill(elf, dict.fromkeys(places, 0))
        elf.relocate(aligned(data + len(content) + 0x2000, PAGE) + PAGE, places)
    else:
        _fill(elf, places)
    elf.section(".text", base, text_end - base)
    if named_sections:
        elf.section(".data.rel.ro.gopclntab" if position_independent else ".gopclntab", pclntab, len(table.content))
        elf.section(".go.module", moduledata, 552)
        if build_info:
            elf.section(".go.buildinfo", data, len(info))
    program = GoProgram(elf, text, pclntab, moduledata, tuple(functions))
    if symbols:
        named = [(f.name + (".abi0" if f.func_id else ""), program.vaddr_of(i), f.size - 3, FUNCTION)
                 for i, f in enumerate(functions)]  # fmt: skip
        elf.symbols([*named, ("runtime.buildVersion", data + aligned(len(info), 64), 16, OBJECT)])
    return program


def _fill(elf: Elf, words: dict[int, int]) -> None:
    for start, content in elf.contents.items():
        filled = bytearray(content)
        for place, value in words.items():
            if start <= place <= start + len(content) - 8:
                struct.pack_into("<Q", filled, place - start, value)
        elf.contents[start] = bytes(filled)
