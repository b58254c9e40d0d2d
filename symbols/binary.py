"""An ELF executable or shared object: what it is, and its bytes by address. Mapped, never read whole."""

import bisect
import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from schedtrace.errors import NodeUnsupported, NotTraceable, PermissionDenied
from schedtrace.symbols.elf import SHT_NOBITS, Arch, Section, Segment, read_headers
from schedtrace.symbols.relocations import RelativeRelocations

__all__ = ["Arch", "Binary", "Section", "Segment"]

_RELATIVE = {Arch.AMD64: 8, Arch.ARM64: 1027}  # R_X86_64_RELATIVE, R_AARCH64_RELATIVE


class Binary:
    """An open ELF file, a context manager. Views taken from it stay valid after it is closed.

    ``segments`` are the PT_LOAD ones, ascending by address and disjoint. ``section_table`` is by index
    and empty if the file has no section headers; ``sections`` is by name, the first of each.
    ``position_independent`` means ET_DYN (PIE or shared object): the loader adds a bias to every address.
    ``build_id`` is the GNU build id in hex.
    """

    path: str
    arch: Arch
    position_independent: bool
    segments: tuple[Segment, ...]
    section_table: tuple[Section, ...]
    sections: Mapping[str, Section]
    build_id: str | None

    def __init__(self, path: str, mapping: mmap.mmap) -> None:
        """See :meth:`open`. Raises NotTraceable; ``mapping`` then is still the caller's."""
        self.path = path
        self._mapping = mapping
        self._data = memoryview(mapping)
        self._relocations: RelativeRelocations | None = None
        try:
            headers = read_headers(self._data)
        except NotTraceable as error:
            raise NotTraceable(f"{path}: {error}") from None
        self.arch = headers.arch
        self.position_independent = headers.position_independent
        self.segments = headers.segments
        self.section_table = headers.sections
        self.build_id = headers.build_id
        offset, size = headers.dynamic
        self.dynamic = self._data[offset : offset + size]  # the dynamic segment's bytes
        self._starts = [segment.vaddr for segment in self.segments]
        by_name: dict[str, Section] = {}
        for section in self.section_table:
            by_name.setdefault(section.name, section)
        self.sections = MappingProxyType(by_name)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the ELF file at ``path``. Never blocks on a FIFO or a device.

        Raises NotTraceable, naming the file and the reason, for anything but a whole 64-bit little-endian
        executable or shared object for amd64 or arm64; PermissionDenied if it may not be read, NodeUnsupported
        if this process may open no more.
        """
        text = os.fspath(path)
        try:
            # O_NONBLOCK: to open a FIFO that nobody writes to would hang, and so would some devices.
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
        except (OSError, ValueError, OverflowError) as error:
            raise _open_failure(text, error) from None
        finally:
            os.close(descriptor)
        try:
            return cls(text, mapping)
        except NotTraceable:
            _close(mapping)
            raise

    def close(self) -> None:
        """Give the mapping back. Where views of it are still in use, it goes with the last of them."""
        self.dynamic.release()
        self._data.release()
        _close(self._mapping)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def segment_at(self, vaddr: int) -> Segment | None:
        """The segment whose part in the file includes ``vaddr``."""
        index = bisect.bisect_right(self._starts, vaddr) - 1
        if index < 0:
            return None
        segment = self.segments[index]
        return segment if vaddr - segment.vaddr < segment.file_size else None

    def file_offset(self, vaddr: int) -> int:
        """Where in the file the byte of address ``vaddr`` is; NotTraceable if the file doesn't back it."""
        segment = self.segment_at(vaddr)
        if segment is None:
            raise NotTraceable(f"{self.path}: the file has no content for address {vaddr:#x}")
        return segment.file_offset + vaddr - segment.vaddr

    def vaddr_at(self, file_offset: int) -> int:
        """The address at which the byte at ``file_offset`` is loaded. Raises NotTraceable if it isn't."""
        for segment in self.segments:
            if segment.file_offset <= file_offset < segment.file_offset + segment.file_size:
                return segment.vaddr + file_offset - segment.file_offset
        raise NotTraceable(f"{self.path}: byte {file_offset} of the file is not loaded")

    def view(self, vaddr: int, size: int) -> memoryview:
        """``size`` bytes at ``vaddr``, not copied; NotTraceable if one segment's file part hasn't all."""
        segment = self.segment_at(vaddr)
        if segment is None or not 0 <= size <= segment.vaddr + segment.file_size - vaddr:
            raise NotTraceable(f"{self.path}: the file has no {size} bytes for address {vaddr:#x}")
        start = segment.file_offset + vaddr - segment.vaddr
        return self._data[start : start + size]

    def read(self, vaddr: int, size: int) -> bytes:
        """Like :meth:`view`, as a copy."""
        return bytes(self.view(vaddr, size))

    def content(self, section: Section) -> memoryview:
        """The bytes of a section, loaded or not; none for one that has none in the file (.bss)."""
        size = 0 if section.type == SHT_NOBITS else section.size
        return self._data[section.file_offset : section.file_offset + size]

    def ends(self, size: int) -> tuple[bytes, bytes]:
        """The first and the last ``size`` bytes of the file, where packers leave their marks."""
        return bytes(self._data[:size]), bytes(self._data[-size:])

    def forget(self, vaddr: int, size: int) -> None:
        """Drop these bytes' pages from the process's memory; they come back when they are looked at again."""
        start = self.file_offset(vaddr) // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_DONTNEED, start, min(size, len(self._data) - start))

    @property
    def relocations(self) -> RelativeRelocations:
        """The RELATIVE relocations; none where the file is not position independent.

        Raises NotTraceable if the file names a table that it doesn't have, or one larger than any program's.
        """
        if self._relocations is None:
            if self.position_independent:
                kind = _RELATIVE[self.arch]
                self._relocations = RelativeRelocations.read(self.path, self.dynamic, self.view, kind)
            else:
                self._relocations = RelativeRelocations.none()
        return self._relocations

    def pointer(self, vaddr: int) -> int:
        """The 8-byte pointer at ``vaddr`` as it is once loaded at bias 0: with its RELATIVE relocation.

        Raises NotTraceable if the file doesn't back it.
        """
        in_place = int.from_bytes(self.view(vaddr, 8), "little")
        return self.relocations.value(vaddr, in_place)

    def pointers(self, vaddr: int, count: int) -> npt.NDArray[np.uint64]:
        """``count`` words in a row from ``vaddr`` on, each as :meth:`pointer` gives it. A copy."""
        words = np.frombuffer(self.view(vaddr, 8 * count), "<u8").astype(np.uint64)
        self.relocations.apply(vaddr, words)
        return words


def _close(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # someone still looks at it; the mapping ends with the last view
        mapping.close()


def _open_failure(path: str, error: Exception) -> NotTraceable | PermissionDenied | NodeUnsupported:
    if not isinstance(error, OSError):
        return NotTraceable(f"{path}: not a path to a file that can be read")
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            f"{path}: no permission to read it; run as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        )
    if error.errno in (
        errno.ENXIO,
        errno.ENODEV,
        errno.EINVAL,
    ):  # sockets; files of /sys that can't be mapped
        return NotTraceable(f"{path}: not a file that can be mapped")
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # no fault of the file's
        return NodeUnsupported(f"{path} can't be opened: {error.strerror}; raise this process's limits")
    return NotTraceable(f"{path}: {error.strerror}")
