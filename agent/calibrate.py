"""What a probe hit costs on this machine: measured, because it differs tenfold between machines.

This process maps a page of code of its own, puts the session's own programs on it, and runs a made-up goroutine through
park, ready and run: the trap, the program, its map look-ups and its user reads, just as the target pays them. What the
target's own work does to the caches differs from target to target: so the programs time themselves at one hit in some
tens, here and there, and what they take longer there tells by how much the whole hit is dearer
(:data:`schedtrace.target.COLD_TRAP`). It is called an estimate.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic, thread_time_ns
from typing import Self

from schedtrace import abi
from schedtrace.abi import ProbeKind
from schedtrace.bpf_text import program_of
from schedtrace.session import ProbeSite, Session

_ROUNDS = 9
_LOOPS = 100
_STEPPED_LOOPS = 20
_KEPT = 15
_EVERY_SECONDS = 3.0
_SELDOM_SECONDS = 15.0
HITS_PER_LOOP = 3
FEWEST_TIMED = 30
"""Of fewer hits it isn't known how long programs take."""
_G_SIZE = 4096
_FREE = 64  # where in a made-up struct nothing else is
_RUNNING = abi.GoroutineState.RUNNING


@dataclass(frozen=True)
class Costs:
    """Of a hit. ``hit_ns``: CPU time, by "does the kernel emulate the probed instruction"; ``program_ns``: how long of
    that the program took, None where that isn't known."""

    hit_ns: Mapping[bool, float]
    program_ns: float | None = None


Kinds = tuple[ProbeKind, ProbeKind, ProbeKind]
"""What the probes on a page's sites mean: all of one transition each."""
_Case = tuple[Kinds, bool]
"""With "on emulated instructions"."""
CASGSTATUS: Kinds = (ProbeKind.CASGSTATUS, ProbeKind.CASGSTATUS, ProbeKind.CASGSTATUS)
FUNCTIONS: Kinds = (ProbeKind.PARK, ProbeKind.READY, ProbeKind.RUN)
RECORDS: Kinds = (ProbeKind.RECORD, ProbeKind.RECORD, ProbeKind.RECORD)


@dataclass(frozen=True)
class _Code:
    """Machine code of a function f(first, loops, stride, end) that passes three sites a loop with a goroutine, its old
    and its new state in Go's argument registers: to park, to be readied, to run. After each site it goes on to the
    goroutine ``stride`` bytes further, at ``end`` to the first again, which is in the goroutine register. Offsets of an
    emulated instruction at each site, and of one that the kernel must single-step."""

    text: bytes
    emulated: tuple[int, int, int]
    stepped: tuple[int, int, int]


_STATES = ((2, 4), (4, 1), (1, 2))  # running -> waiting -> runnable -> running


def _amd64() -> _Code:
    text = b"\x53\x41\x56\x49\x89\xfe"  # push rbx; push r14; mov r14, rdi
    text += b"\x49\x89\xf8\x49\x89\xc9"  # mov r8, rdi; mov r9, rcx
    loop = len(text)
    emulated, stepped = [], []
    for old, new in _STATES:
        text += b"\x48\x89\xf8"  # mov rax, rdi
        text += b"\xbb" + old.to_bytes(4, "little") + b"\xb9" + new.to_bytes(4, "little")  # mov ebx, old; mov ecx, new
        emulated.append(len(text))
        stepped.append(len(text) + 1)
        text += b"\x55\x5d"  # push rbp; pop rbp
        text += b"\x48\x01\xd7\x4c\x39\xcf\x49\x0f\x43\xf8"  # add rdi, rdx; cmp rdi, r9; cmovae rdi, r8
    text += b"\x48\xff\xce"  # dec rsi
    text += b"\x75" + (loop - len(text) - 2).to_bytes(1, "little", signed=True)  # jne loop
    text += b"\x41\x5e\x5b\xc3"  # pop r14; pop rbx; ret
    return _Code(text, (emulated[0], emulated[1], emulated[2]), (stepped[0], stepped[1], stepped[2]))


def _arm64() -> _Code:
    words = [0xF81F0FFC, 0xAA0003FC]  # str x28, [sp, -16]!; mov x28, x0
    words += [0xAA0103E4, 0xAA0203E5, 0xAA0003E6]  # mov x4, x1; mov x5, x2; mov x6, x0
    loop = len(words)
    emulated, stepped = [], []
    for old, new in _STATES:
        words += [0x52800001 | old << 5, 0x52800002 | new << 5]  # mov w1, old; mov w2, new
        emulated.append(len(words) * 4)
        stepped.append(len(words) * 4 + 4)
        words += [0x14000001, 0xAA0703E7]  # b to the next instruction; mov x7, x7
        words += [0x8B050000, 0xEB03001F, 0x9A8020C0]  # add x0, x0, x5; cmp x0, x3; csel x0, x6, x0, hs
    words.append(0xF1000484)  # subs x4, x4, 1
    words.append(0x54000001 | ((loop - len(words)) & 0x7FFFF) << 5)  # b.ne loop
    words += [0xF84107FC, 0xD65F03C0]  # ldr x28, [sp], 16; ret
    text = b"".join(word.to_bytes(4, "little") for word in words)
    return _Code(text, (emulated[0], emulated[1], emulated[2]), (stepped[0], stepped[1], stepped[2]))


class CodePage:
    """A page of code mapped into this process alone, for probes to sit on. Close it, or use it in ``with``.

    ``fd``: the file it is mapped from. ``emulated``, ``stepped``: where in that file the sites are.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        code = _arm64() if platform.machine() == "aarch64" else _amd64()
        self.emulated, self.stepped = code.emulated, code.stepped
        self.fd = os.memfd_create("schedtrace-calibration")
        try:
            os.write(self.fd, code.text)
            self._address = _map_code(self.fd)
        except OSError:
            self.close()
            raise
        self._run = ctypes.CFUNCTYPE(None, *([ctypes.c_uint64] * 4))(self._address)
        self._one = ctypes.create_string_buffer(_G_SIZE)
        self.pass_sites(1)  # maps the page, so that probes are put into it

    def pass_sites(self, loops: int, goroutines: ctypes.Array[ctypes.c_char] | None = None, stride: int = 0) -> None:
        """Pass the three sites ``loops`` times: always with one goroutine, or at each site with the next of those that
        lie ``stride`` bytes apart in memory, round and round. For each to come to the sites in turn, their number
        divided by three must leave one."""
        memory = self._one if goroutines is None else goroutines
        first = ctypes.addressof(memory)
        self._run(first, loops, stride, first + len(memory))

    def target(self, sites: Sequence[int], kinds: Sequence[ProbeKind]) -> abi.Target:
        """What BPF must know of this process to count hits at ``sites``: the made-up goroutines are all zero."""
        record = abi.Target(g_waitreason=0, g_preempt=1, g_schedlink=8, g_syscallsp=16, g_startpc=24, timed_often=1)
        self.note_sites(record, sites, kinds)
        return record

    def note_sites(self, record: abi.Target, sites: Sequence[int], kinds: Sequence[ProbeKind], first: int = 0) -> None:
        """Note in the record that there are probes at ``sites``, as its ``first`` and following."""
        for i, (site, kind) in enumerate(zip(sites, kinds, strict=True), first):
            record.sites[i] = self._address + site
            record.kinds[i] = kind

    def sampler(self) -> abi.Sampler:
        """What BPF must know besides for :data:`RECORDS`: the made-up goroutine is the histogram of times to run, and
        the g that runs; the one about to run was parked."""
        g = ctypes.addressof(self._one)
        m, gp = g + _G_SIZE // 4, g + _G_SIZE // 2
        for place, word in ((g + _FREE, m), (m + _FREE, gp), (gp + _FREE, _RUNNING), (gp + _FREE + 8, gp)):
            ctypes.c_uint64.from_address(place).value = word
        sampler = abi.Sampler(g_m=_FREE, m_curg=_FREE, g_status=_FREE, g_pc=_FREE + 8)
        sampler.histograms[abi.Duration.RUN] = g
        sampler.stops[0], sampler.places[0] = gp, abi.StopPlace.PARK
        return sampler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The code stays mapped for as long as the process lives."""
        os.close(self.fd)


@dataclass(frozen=True)
class _Measured:
    """Of a hit; of some hits together, how long the programs took."""

    hit_ns: float
    timed_ns: int
    timed: int


class Calibration:
    """Probes on pages of this process, for as long as the session has them, to measure what a hit costs now: that
    depends on what else the machine does (two hardware threads of a core share it), so that it changes."""

    def __init__(self, session: Session, kinds: Sequence[Kinds], emulated: Collection[bool]) -> None:
        """``kinds``: one or more of :data:`CASGSTATUS`, :data:`FUNCTIONS` and :data:`RECORDS`, the last only as the
        last; ``emulated``: on which instructions, those that the kernel emulates or those that it single-steps.
        ``session`` has one target more from now on, this process.

        Raises AttachFailed or OSError if it can't be measured.
        """
        cases = [(kinds[0], each) for each in emulated] + [(each, next(iter(emulated))) for each in kinds[1:]]
        self._pages: dict[_Case, CodePage] = {}
        self._recent: deque[_Measured] = deque(maxlen=_KEPT)
        self._session, self._timed_before = session, (0, 0)
        sampler = None
        with ExitStack() as stack:
            self._bare = stack.enter_context(CodePage())
            record = self._bare.target((), ())
            for i, (each, is_emulated) in enumerate(cases):
                page = self._pages[each, is_emulated] = stack.enter_context(CodePage())
                sites = page.emulated if is_emulated else page.stepped
                programs = [program_of(kind) for kind in each]
                session.attach(page.fd, [ProbeSite(*site) for site in zip(programs, sites, strict=True)])
                page.note_sites(record, sites, each, HITS_PER_LOOP * i)
                sampler = page.sampler() if each == RECORDS else sampler
            session.threads.watch(os.getpid(), abi.Process())  # as a target's are
            session.watch(os.getpid(), record, sampler=sampler, time_before=False)
        self._usual = cases[0]
        first = {each: self._measure(each, _ROUNDS) for each in cases}
        self._recent.append(first[self._usual])
        self._measured = monotonic()
        self._ratios = {each: cost.hit_ns / first[self._usual].hit_ns for each, cost in first.items()}
        enough = {each: cost.timed_ns / cost.timed for each, cost in first.items() if cost.timed >= FEWEST_TIMED}
        usual_ns = enough.get(self._usual)
        self._programs = {each: program_ns / usual_ns for each, program_ns in enough.items()} if usual_ns else {}

    def measure(self, *, seldom: bool = False) -> None:
        """Measure once more, if that was three seconds ago or longer; ``seldom``: a quarter of a minute. Takes a
        millisecond of CPU time, more where there are many CPUs."""
        if monotonic() - self._measured >= (_SELDOM_SECONDS if seldom else _EVERY_SECONDS):
            self._measured = monotonic()
            self._recent.append(self._measure(self._usual, 1))

    def costs(self, kinds: Kinds) -> Costs:
        """CPU time of a hit of those kinds, of the first if these were not asked for: the median of the last
        measurements."""
        first, usual_emulated = self._usual
        case = (kinds, usual_emulated)
        recent = tuple(self._recent)  # another thread may measure meanwhile
        usual_ns = statistics.median(each.hit_ns for each in recent) * self._ratios.get(case, 1.0)
        hit_ns = {emulated: usual_ns * ratio for (each, emulated), ratio in self._ratios.items() if each == first}
        timed = sum(each.timed for each in recent)
        ratio = self._programs.get(case if case in self._ratios else self._usual)
        if timed < FEWEST_TIMED or ratio is None:
            return Costs(hit_ns)
        return Costs(hit_ns, sum(each.timed_ns for each in recent) / timed * ratio)

    def _measure(self, case: _Case, rounds: int) -> _Measured:
        hit_ns = statistics.median(self._hit_ns(case) for _ in range(rounds))
        (before_ns, before), now = self._timed_before, self._session.timed(os.getpid())
        self._timed_before = now
        return _Measured(hit_ns, now[0] - before_ns, now[1] - before)

    def _hit_ns(self, case: _Case) -> float:
        loops = _LOOPS if case[1] else _STEPPED_LOOPS
        bare_ns, probed_ns = _passing_ns(self._bare, loops), _passing_ns(self._pages[case], loops)
        return max(probed_ns - bare_ns, 1) / (loops * HITS_PER_LOOP)


def _passing_ns(page: CodePage, loops: int) -> int:
    """CPU time to pass the page's sites, with some work of the interpreter in between: a target, too, does something
    else between two hits, which leaves the caches less hot."""
    began_ns = thread_time_ns()
    for _ in range(loops):
        page.pass_sites(1)
    return thread_time_ns() - began_ns


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
