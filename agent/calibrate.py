"""What a probe hit costs on this machine: measured, because it differs tenfold between machines.

This process maps a page of code of its own, puts the session's own programs on it, and runs a made-up goroutine through
park, ready and run: the trap, the program, its map look-ups and its user reads, just as the target pays them. Hot
caches and an idle machine make it the lower end of what a busy target pays, so that it is called an estimate.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
from dataclasses import dataclass
from time import thread_time_ns

from schedtrace import abi
from schedtrace.session import ProbeSite, Session

_ROUNDS = 5
_LOOPS = 400
_HITS_PER_LOOP = 3
_G_SIZE = 4096

CASGSTATUS = ("on_casgstatus", "on_casgstatus", "on_casgstatus")
FUNCTIONS = ("on_park_m", "on_ready", "on_execute")


@dataclass(frozen=True)
class _Code:
    """A function f(gp, loops) that goes through three sites a loop, with gp, old and new state in Go's argument
    registers; offsets of an emulated instruction at each site, and of one that the kernel must single-step."""

    text: bytes
    emulated: tuple[int, int, int]
    stepped: tuple[int, int, int]


def _amd64() -> _Code:
    # push rbx; loop: mov rax, rdi; { mov ebx, old; mov ecx, new; push rbp; pop rbp } x 3; dec rsi; jne loop;
    # pop rbx; ret
    text = b"\x53"
    loop = len(text)
    text += b"\x48\x89\xf8"
    emulated, stepped = [], []
    for old, new in ((2, 4), (4, 1), (1, 2)):
        text += b"\xbb" + old.to_bytes(4, "little") + b"\xb9" + new.to_bytes(4, "little")
        emulated.append(len(text))
        stepped.append(len(text) + 1)
        text += b"\x55\x5d"
    text += b"\x48\xff\xce"
    text += b"\x75" + (loop - len(text) - 2).to_bytes(1, "little", signed=True)
    return _Code(
        text + b"\x5b\xc3", (emulated[0], emulated[1], emulated[2]), (stepped[0], stepped[1], stepped[2])
    )


def _arm64() -> _Code:
    # mov x3, x1; loop: { movz w1, old; movz w2, new; b .+4; mov x4, x4 } x 3; subs x3, x3, 1; b.ne loop; ret
    words = [0xAA0103E3]
    emulated, stepped = [], []
    for old, new in ((2, 4), (4, 1), (1, 2)):
        words += [0x52800001 | old << 5, 0x52800002 | new << 5]
        emulated.append(len(words) * 4)
        stepped.append(len(words) * 4 + 4)
        words += [0x14000001, 0xAA0403E4]
    words.append(0xF1000463)
    words.append(0x54000001 | ((1 - len(words)) & 0x7FFFF) << 5)
    words.append(0xD65F03C0)
    text = b"".join(word.to_bytes(4, "little") for word in words)
    return _Code(text, (emulated[0], emulated[1], emulated[2]), (stepped[0], stepped[1], stepped[2]))


def cost_ns(session: Session, programs: tuple[str, str, str], *, stepped: bool = False) -> float:
    """CPU time of one hit in nanoseconds, median of several rounds.

    ``programs`` must be loaded in ``session``, which needs room for one more target: :data:`CASGSTATUS` or
    :data:`FUNCTIONS`. ``stepped``: on an instruction that the kernel single-steps. Takes some milliseconds, and leaves
    its probes, on a page nothing else maps, until the session is closed.
    """
    code = _arm64() if platform.machine() == "aarch64" else _amd64()
    fd = os.memfd_create("schedtrace-calibration")
    try:
        os.write(fd, code.text)
        address = _map_code(fd)
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)(address)
        made_up_g = ctypes.create_string_buffer(_G_SIZE)

        def measure() -> float:
            times = []
            for _ in range(_ROUNDS):
                start = thread_time_ns()
                run(ctypes.addressof(made_up_g), _LOOPS)
                times.append(thread_time_ns() - start)
            return statistics.median(times)

        run(ctypes.addressof(made_up_g), 1)  # maps the page, so that probes are put into it
        bare = measure()
        sites = code.stepped if stepped else code.emulated
        session.attach(fd, [ProbeSite(p, offset) for p, offset in zip(programs, sites, strict=True)])
        record = abi.Target(g_waitreason=0, g_preempt=1, g_schedlink=8, g_syscallsp=16, g_startpc=24)
        for i, site in enumerate(sites):
            record.sites[i] = address + site
        session.watch(os.getpid(), record)
        run(ctypes.addressof(made_up_g), _LOOPS)
        probed = measure()
        session.unwatch(os.getpid())
        return max(probed - bare, 0) / (_LOOPS * _HITS_PER_LOOP)
    finally:
        os.close(fd)


def _map_code(fd: int) -> int:
    """Address of the file mapped executable and not writable: the kernel puts no probe into a writable mapping, and
    Python's own mmap gives no address of a read-only one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)
