"""Which BPF programs, maps and links a process holds, and whether the kernel still has them when it is gone."""

import ctypes
import errno
import os
import platform
import struct
from contextlib import suppress
from pathlib import Path

_BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
# The line of /proc/PID/fdinfo/N with the object's id -> the command of bpf(2) that opens it by id.
_OPEN_BY_ID = {"prog_id": 13, "map_id": 14, "link_id": 30}

Objects = frozenset[tuple[str, int]]


def held_by(pid: int) -> Objects:
    """(kind, id) of every BPF object that process ``pid`` has open; none if it is gone."""
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for file in Path(f"/proc/{pid}/fdinfo").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                for line in file.read_text().splitlines():
                    kind, _, value = line.partition(":")
                    if kind in _OPEN_BY_ID:
                        found.add((kind, int(value)))
    return frozenset(found)


def left(objects: Objects) -> Objects:
    """Those that are still in the kernel."""
    return frozenset((kind, number) for kind, number in objects if _exists(_OPEN_BY_ID[kind], number))


def _exists(command: int, number: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = struct.pack("<III", number, 0, 0)
    descriptor = libc.syscall(
        ctypes.c_long(_BPF_SYSCALL[platform.machine()]),
        ctypes.c_int(command),
        ctypes.c_char_p(attributes),
        len(attributes),
    )
    if descriptor >= 0:
        os.close(descriptor)
        return True
    error = ctypes.get_errno()
    assert error == errno.ENOENT, os.strerror(error)
    return False
