"""An ELF executable or shared object: architecture, build id, segments, sections, and bytes by address.

The file is mapped, never read whole. Every count and size in a header is a stranger's claim and is checked against the
file's length before anything is allocated or looped over. Headers are read with numpy record types and not with
pyelftools: a handful of fixed structures needs no parser, and a hostile header can't reach code that trusts it.

Field layouts and constants: System V ABI chapters 4 and 5 (elf.h); what the kernel accepts: fs/binfmt_elf.c.
"""

import bisect
import enum
import errno
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from schedtrace.errors import NotTraceable, PermissionDenied
from schedtrace.symbols.relocations import RelativeRelocations

_ET_EXEC, _ET_DYN = 2, 3
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_PF_X, _PF_W, _PF_R = 1, 2, 4
_SHT_NOBITS = 8
_NT_GNU_BUILD_ID = 3

_HEADER_SIZE = 64
_HEADER = struct.Struct("<HHIQQQIHHHHHH")  # from e_type, at byte 16
_PROGRAM_HEADER = np.dtype(
    [("type", "<u4"), ("flags", "<u4"), ("offset", "<u8"), ("vaddr", "<u8"), ("paddr", "<u8"),
     ("file_size", "<u8"), ("memory_size", "<u8"), ("align", "<u8")]
)  # fmt: skip
_SECTION_HEADER = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("vaddr", "<u8"), ("offset", "<u8"), ("size", "<u8"),
     ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry_size", "<u8")]
)  # fmt: skip

# The kernel refuses to execute a file whose program headers take more than 64 KiB.
_MAX_PROGRAM_HEADERS = 65536 // _PROGRAM_HEADER.itemsize
_PAGE_SIZE = 4096  # the smallest page of both architectures
_MAX_SECTION_NAME = 256
_MAX_NOTES_SIZE = 65536
_ADDRESS_LIMIT = 1 << 64

_MACHINE_NAMES = {3: "i386", 8: "MIPS", 20: "PowerPC", 21: "PowerPC64", 22: "S390", 40: "32-bit ARM", 243: "RISC-V",
                  258: "LoongArch"}  # fmt: skip


class Arch(enum.Enum):
    """Architectures that can be traced; the value is Go's name (GOARCH)."""

    AMD64 = "amd64"
    ARM64 = "arm64"


_MACHINES = {62: Arch.AMD64, 183: Arch.ARM64}
_RELATIVE_RELOCATION = {Arch.AMD64: 8, Arch.ARM64: 1027}  # R_X86_64_RELATIVE, R_AARCH64_RELATIVE


@dataclass(frozen=True, slots=True)
class Segment:
    """A PT_LOAD program header: ``file_size`` bytes at ``file_offset`` appear at ``vaddr``, the rest is zeroes."""

    vaddr: int
    file_offset: int
    file_size: int
    memory_size: int
    readable: bool
    writable: bool
    executable: bool


@dataclass(frozen=True, slots=True)
class Section:
    """A section header. ``vaddr`` is 0 if it is not loaded; ``link`` indexes ``Binary.section_table``."""

    name: str
    vaddr: int
    file_offset: int
    size: int
    type: int
    flags: int
    link: int
    entry_size: int


class Binary:
    """An open ELF file. A context manager; views taken from it stay valid after it is closed."""

    path: str
    arch: Arch
    position_independent: bool  # ET_DYN: PIE or shared object; addresses get a load bias
    segments: tuple[Segment, ...]  # PT_LOAD only, ascending by address, disjoint
    section_table: tuple[Section, ...]  # by index, empty if the file has none
    sections: Mapping[str, Section]  # by name, the first of a name

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        """Use :meth:`open`. Raises NotTraceable; ``mapping`` then is the caller's to close."""
        self.path = path
        self._mapping = mapping
        self._bytes = memoryview(mapping)
        self._relocations: RelativeRelocations | None = None
        fields = self._read_header()
        elf_type, machine, _, _, program_offset, section_offset, _, _, program_entry, program_count = fields[
            :10
        ]
        section_entry, section_count, name_index = fields[10:]
        arch = _MACHINES.get(machine)
        if arch is None:
            name = _MACHINE_NAMES.get(machine, f"machine {machine}")
            raise self._refusal(f"built for {name}; only amd64 and arm64 can be traced")
        if elf_type not in (_ET_EXEC, _ET_DYN):
            raise self._refusal(f"neither an executable nor a shared object (ELF type {elf_type})")
        self.arch = arch
        self.position_independent = elf_type == _ET_DYN
        headers = self._read_program_headers(program_offset, program_entry, program_count)
        self.segments = self._load_segments(headers)
        self._starts = [segment.vaddr for segment in self.segments]
        self._dynamic = [(h["offset"], h["file_size"]) for h in headers if h["type"] == _PT_DYNAMIC]
        self._notes = [(h["offset"], h["file_size"]) for h in headers if h["type"] == _PT_NOTE]
        self.section_table = self._read_sections(section_offset, section_entry, section_count, name_index)
        by_name: dict[str, Section] = {}
        for section in self.section_table:
            by_name.setdefault(section.name, section)
        self.sections = MappingProxyType(by_name)
        self.build_id: str | None = self._read_build_id()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Binary":
        """Map the ELF file at ``path``.

        Raises NotTraceable, naming the file and the reason, for anything but a whole, 64-bit, little-endian amd64 or
        arm64 executable or shared object; PermissionDenied if it may not be read. Never blocks on a FIFO or a device.
        """
        text = os.fspath(path)
        try:
            # O_NONBLOCK: opening a FIFO that nobody writes would hang, and so would some devices.
            descriptor = os.open(text, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            raise _open_failure(text, error) from None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise NotTraceable(f"{text}: not a regular file")
            if facts.st_size == 0:
                raise NotTraceable(f"{text}: empty file")
            mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _open_failure(text, error) from None
        finally:
            os.close(descriptor)
        try:
            return cls(text, mapping)
        except NotTraceable:
            _close(mapping)
            raise

    def close(self) -> None:
        """Give the mapping back; where views of it are still in use, it goes with the last of them."""
        self._bytes = memoryview(b"")
        _close(self._mapping)

    def __enter__(self) -> "Binary":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return len(self._bytes)

    def segment_at(self, vaddr: int) -> Segment | None:
        """The segment whose bytes in the file include ``vaddr``."""
        index = bisect.bisect_right(self._starts, vaddr) - 1
        if index < 0:
            return None
        segment = self.segments[index]
        return segment if vaddr - segment.vaddr < segment.file_size else None

    def file_offset(self, vaddr: int) -> int:
        """Where in the file the byte of address ``vaddr`` is. Raises NotTraceable if the file doesn't back it."""
        segment = self.segment_at(vaddr)
        if segment is None:
            raise self._refusal(f"no bytes in the file for address {vaddr:#x}")
        return segment.file_offset + vaddr - segment.vaddr

    def vaddr_at(self, file_offset: int) -> int:
        """The address at which the byte at ``file_offset`` is loaded. Raises NotTraceable if it isn't."""
        for segment in self.segments:
            if segment.file_offset <= file_offset < segment.file_offset + segment.file_size:
                return segment.vaddr + file_offset - segment.file_offset
        raise self._refusal(f"byte {file_offset} of the file is not loaded")

    def view(self, vaddr: int, size: int) -> memoryview:
        """``size`` bytes at ``vaddr``, without a copy. Raises NotTraceable if they aren't all in one segment's file part."""
        segment = self.segment_at(vaddr)
        if segment is None or size < 0 or size > segment.vaddr + segment.file_size - vaddr:
            raise self._refusal(f"no {size} bytes in the file for address {vaddr:#x}")
        start = segment.file_offset + vaddr - segment.vaddr
        return self._bytes[start : start + size]

    def read(self, vaddr: int, size: int) -> bytes:
        """Like :meth:`view`, as a copy."""
        return bytes(self.view(vaddr, size))

    def content(self, section: Section) -> memoryview:
        """The bytes of a section, loaded or not; empty for one that has none in the file (.bss)."""
        if section.type == _SHT_NOBITS:
            return self._bytes[:0]
        return self._bytes[section.file_offset : section.file_offset + section.size]

    def edge(self, size: int) -> tuple[bytes, bytes]:
        """The first and the last ``size`` bytes of the file (packers leave their marks there)."""
        return bytes(self._bytes[:size]), bytes(self._bytes[-size:])

    def pointer(self, vaddr: int) -> int:
        """The 8-byte pointer at ``vaddr`` as it is after loading at bias 0, so with its RELATIVE relocation applied.

        Raises NotTraceable if the file doesn't back it.
        """
        in_place = int.from_bytes(self.view(vaddr, 8), "little")
        return self.relocations.value(vaddr, in_place)

    def pointers(self, vaddr: int, count: int) -> npt.NDArray[np.uint64]:
        """``count`` consecutive words at ``vaddr``, each as :meth:`pointer` gives it. A copy."""
        words = np.frombuffer(self.view(vaddr, 8 * count), "<u8").astype(np.uint64)
        self.relocations.apply(vaddr, words)
        return words

    @property
    def relocations(self) -> RelativeRelocations:
        """The RELATIVE relocations, ordered by address; none where the file is not position independent."""
        if self._relocations is None:
            self._relocations = RelativeRelocations.none()
            if self.position_independent and self._dynamic:
                dynamic = self._file_bytes(*self._dynamic[0])
                kind = _RELATIVE_RELOCATION[self.arch]
                self._relocations = RelativeRelocations.read(dynamic, self.view, kind)
        return self._relocations

    def dynamic(self) -> memoryview:
        """The dynamic segment's bytes; empty if the file has none."""
        return self._file_bytes(*self._dynamic[0]) if self._dynamic else self._bytes[:0]

    def _refusal(self, reason: str) -> NotTraceable:
        return NotTraceable(f"{self.path}: {reason}")

    def _truncated(self, what: str, end: int) -> NotTraceable:
        return self._refusal(f"truncated: {what} up to byte {end}, the file has {len(self._bytes)}")

    def _file_bytes(self, offset: int, size: int) -> memoryview:
        if offset + size > len(self._bytes):
            raise self._truncated("a program header names data", offset + size)
        return self._bytes[offset : offset + size]

    def _read_header(self) -> tuple[int, ...]:
        identity = bytes(self._bytes[:16])
        if identity[:4] != b"\x7fELF"[: len(identity)] or len(identity) < 4:
            raise self._refusal("not an ELF file")
        if len(self._bytes) < _HEADER_SIZE:
            raise self._truncated("the ELF header goes", _HEADER_SIZE)
        if identity[4] != 2:
            raise self._refusal("not a 64-bit ELF file; only amd64 and arm64 can be traced")
        if identity[5] != 1:
            raise self._refusal("not little-endian; only amd64 and arm64 can be traced")
        return _HEADER.unpack(self._bytes[16:_HEADER_SIZE])

    def _records(self, kind: np.dtype[Any], offset: int, count: int, what: str) -> list[dict[str, int]]:
        end = offset + count * kind.itemsize
        if end > len(self._bytes):
            raise self._truncated(f"{what} go", end)
        rows = np.frombuffer(self._bytes, kind, count, offset).tolist() if count else []
        names = kind.names or ()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _read_program_headers(self, offset: int, entry_size: int, count: int) -> list[dict[str, int]]:
        if count == 0:
            raise self._refusal("no program headers: not something the kernel can run")
        if entry_size != _PROGRAM_HEADER.itemsize or count > _MAX_PROGRAM_HEADERS:
            raise self._refusal("damaged: the kernel would not accept its program headers")
        return self._records(_PROGRAM_HEADER, offset, count, "program headers")

    def _load_segments(self, headers: list[dict[str, int]]) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        for header in headers:
            if header["type"] != _PT_LOAD:
                continue
            vaddr, offset, flags = header["vaddr"], header["offset"], header["flags"]
            file_size, memory_size = header["file_size"], header["memory_size"]
            if file_size > memory_size or vaddr + memory_size > _ADDRESS_LIMIT:
                raise self._refusal(f"damaged: impossible sizes in the segment at {vaddr:#x}")
            if file_size and offset + file_size > len(self._bytes):
                raise self._truncated("a segment goes", offset + file_size)
            if file_size and (offset - vaddr) % _PAGE_SIZE:
                # The kernel maps whole pages: such a file has no rule from address to file offset.
                raise self._refusal(
                    f"damaged: the segment at {vaddr:#x} is not aligned with its place in the file"
                )
            segments.append(Segment(vaddr, offset, file_size, memory_size, bool(flags & _PF_R), bool(flags & _PF_W),
                                    bool(flags & _PF_X)))  # fmt: skip
        segments.sort(key=lambda segment: segment.vaddr)
        for one, following in zip(segments, segments[1:], strict=False):
            if one.vaddr + one.memory_size > following.vaddr:
                raise self._refusal(f"damaged: segments overlap at {following.vaddr:#x}")
        if not segments:
            raise self._refusal("nothing to load: no segment has content")
        return tuple(segments)

    def _read_sections(
        self, offset: int, entry_size: int, count: int, name_index: int
    ) -> tuple[Section, ...]:
        # A count of 0 with an offset means more than 65,279 sections, the real count in the first: no linked
        # program has that, so it reads as none.
        if offset == 0 or count == 0:
            return ()
        if entry_size != _SECTION_HEADER.itemsize:
            raise self._refusal("damaged: section headers of the wrong size")
        headers = self._records(_SECTION_HEADER, offset, count, "section headers")
        for header in headers:
            if header["type"] not in (0, _SHT_NOBITS) and header["offset"] + header["size"] > len(
                self._bytes
            ):
                raise self._truncated("a section goes", header["offset"] + header["size"])
        names = self._bytes[:0]
        if name_index < count and headers[name_index]["type"] not in (0, _SHT_NOBITS):
            start, size = headers[name_index]["offset"], headers[name_index]["size"]
            names = self._bytes[start : start + size]
        return tuple(
            Section(_section_name(names, h["name"]), h["vaddr"], h["offset"], h["size"], h["type"], h["flags"],
                    h["link"], h["entry_size"])
            for h in headers
        )  # fmt: skip

    def _read_build_id(self) -> str | None:
        for offset, size in self._notes[:16]:
            found = _build_id(self._bytes[offset : offset + min(size, _MAX_NOTES_SIZE)])
            if found is not None:
                return found
        section = self.sections.get(".note.gnu.build-id")
        return None if section is None else _build_id(self.content(section)[:_MAX_NOTES_SIZE])


def _section_name(names: memoryview, start: int) -> str:
    return bytes(names[start : start + _MAX_SECTION_NAME]).partition(b"\0")[0].decode("utf-8", "replace")


def _build_id(notes: memoryview) -> str | None:
    position = 0
    while position + 12 <= len(notes):
        name_size, description_size, kind = struct.unpack_from("<III", notes, position)
        name_start = position + 12
        start = name_start + (name_size + 3 & ~3)
        end = start + description_size
        if end > len(notes):
            return None
        if (
            kind == _NT_GNU_BUILD_ID
            and bytes(notes[name_start : name_start + 4]) == b"GNU\0"
            and name_size == 4
        ):
            return bytes(notes[start:end]).hex() if 0 < description_size <= 64 else None
        position = start + (description_size + 3 & ~3)
    return None


def _close(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        pass  # someone still looks at it; the mapping ends with the last view


def _open_failure(path: str, error: OSError | ValueError) -> NotTraceable | PermissionDenied:
    if not isinstance(error, OSError):
        return NotTraceable(f"{path}: not a usable path")
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            f"{path}: no permission to read it; run as root or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        )
    if error.errno in (errno.ENODEV, errno.ENXIO, errno.EINVAL, errno.EOVERFLOW):
        return NotTraceable(f"{path}: not a regular file that can be mapped")
    return NotTraceable(f"{path}: cannot be opened: {error.strerror}")
