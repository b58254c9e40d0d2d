"""The texts of /proc/PID, parsed; nothing here opens a file.

Sources: proc(5), getauxval(3), and the kernel's fs/proc/array.c and fs/proc/task_mmu.c.
"""

import os
import struct
from dataclasses import dataclass

AT_ENTRY = 9

_AT_NULL = 0
_PF_KTHREAD = 0x00200000
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Stat:
    """/proc/PID/stat, the fields in use. ``image`` tells two programs of one process apart (start of its
    code and of its stack: random at every exec where address randomisation is on)."""

    comm: str
    state: str
    is_kernel_thread: bool
    thread_count: int
    start_time_ticks: int
    cpu_seconds: float
    image: tuple[int, int]


@dataclass(frozen=True)
class SchedStat:
    """/proc/PID/task/TID/schedstat: time on a CPU, time runnable but not running, number of turns."""

    run_ns: int
    wait_ns: int
    timeslices: int


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps. ``path`` is the file's name without the kernel's " (deleted)" mark, which
    is ``deleted``; for memory without a file it is empty or a name such as ``[heap]``, and ``inode`` is
    0."""

    start: int
    end: int
    permissions: str
    file_offset: int
    device: int
    inode: int
    path: str
    deleted: bool

    @property
    def executable(self) -> bool:
        return "x" in self.permissions


@dataclass(frozen=True)
class MappedFile:
    """A file of which a process maps code: its executable or a shared object. ``start`` is the lowest
    address any part of it is mapped at, ``file_offset`` the offset mapped there."""

    path: str
    device: int
    inode: int
    deleted: bool
    start: int
    file_offset: int


def parse_stat(text: bytes) -> Stat:
    """The text of /proc/PID/stat. The command in parentheses may itself hold parentheses, spaces and
    newlines."""
    opening, closing = text.index(b"("), text.rindex(b")")
    fields = text[closing + 1 :].split()  # fields[0] is field 3 of proc(5)
    return Stat(
        comm=os.fsdecode(text[opening + 1 : closing]),
        state=fields[0].decode(),
        is_kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
        thread_count=int(fields[17]),
        start_time_ticks=int(fields[19]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        image=(int(fields[23]), int(fields[25])),
    )


def parse_status(text: bytes) -> dict[str, str]:
    """The text of /proc/PID/status: values by name, whitespace trimmed."""
    lines = (line.partition(":") for line in os.fsdecode(text).split("\n") if ":" in line)
    return {name: value.strip() for name, _, value in lines}


def parse_schedstat(text: bytes) -> SchedStat | None:
    """The text of /proc/PID/task/TID/schedstat, None if it is empty."""
    fields = [int(value) for value in text.split()]
    return SchedStat(*fields[:3]) if len(fields) >= 3 else None


def auxiliary_value(auxv: bytes, wanted: int) -> int | None:
    """A value of /proc/PID/auxv, by its AT_ number; None if it is not there. 64-bit processes only."""
    for kind, value in struct.iter_unpack("=QQ", auxv[: len(auxv) // 16 * 16]):
        if kind == wanted:
            return int(value)
        if kind == _AT_NULL:
            break
    return None


def parse_maps(text: bytes) -> tuple[Mapping, ...]:
    """The text of /proc/PID/maps. File names may hold anything; the kernel writes a newline in one as
    ``\\012`` and escapes nothing else, so a name that really holds these four characters comes out with a
    newline."""
    return tuple(_parse_mapping(line) for line in text.split(b"\n") if line)


def mapped_files(mappings: tuple[Mapping, ...]) -> tuple[MappedFile, ...]:
    """The files of which code is mapped, each once, by ascending address of their lowest mapping."""
    lowest: dict[tuple[int, int], Mapping] = {}
    for mapping in mappings:
        if mapping.inode:
            lowest.setdefault((mapping.device, mapping.inode), mapping)
    with_code = {(mapping.device, mapping.inode) for mapping in mappings if mapping.executable}
    return tuple(
        MappedFile(at.path, at.device, at.inode, at.deleted, at.start, at.file_offset)
        for key, at in lowest.items()
        if key in with_code
    )


def _parse_mapping(line: bytes) -> Mapping:
    # "start-end permissions offset device inode", one space between; then blanks and the name, if any
    addresses, permissions, offset, device, rest = line.split(b" ", 4)
    inode_text, _, name = rest.partition(b" ")
    start, _, end = addresses.partition(b"-")
    major, _, minor = device.partition(b":")
    path = os.fsdecode(name.lstrip(b" ").replace(b"\\012", b"\n"))
    inode = int(inode_text)
    deleted = inode != 0 and path.endswith(_DELETED)
    return Mapping(
        start=int(start, 16),
        end=int(end, 16),
        permissions=permissions.decode(),
        file_offset=int(offset, 16),
        device=os.makedev(int(major, 16), int(minor, 16)),
        inode=inode,
        path=path.removesuffix(_DELETED) if deleted else path,
        deleted=deleted,
    )
