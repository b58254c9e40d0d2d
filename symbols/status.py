"""Which functions of the runtime change a goroutine's status: by a call of casgstatus, or by code of their
own.

``runtime.casgstatus`` is meant to be the one place, and the compiler leaves it a function. With a profile
(PGO) it is copied into the callers that the profile calls hot, and a probe on it then misses most of what
happens. So the binary's own code is asked: every call of casgstatus, and every other compare-and-swap of
g.atomicstatus. Which field that is, casgstatus itself shows.

On amd64 it is ``lock cmpxchg %r32, offset(%reg)``. On arm64 Go writes an atomic operation twice and chooses
at run time; one of the two is ``casal`` on an address that an ``add`` with the offset made. Where that add
is not near, the constants tell: old and new state, moved into registers right before.
"""

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.code import Call, calls_in
from schedtrace.symbols.function import Function
from schedtrace.symbols.instructions import Instruction, Register, constant_before, instructions

_CHUNK = 4 << 20
_LEAD = 64  # longer than any pattern
_MAX_HITS = 50_000
_MAX_WRITERS = 256
# lock; REX?; 0f b1 /r with a 32-bit displacement; a SIB byte if the base is rsp or r12.
_WITH_SIB = bytes(range(0x84, 0xC0, 8))
_WITHOUT_SIB = bytes(modrm for modrm in range(0x80, 0xC0) if modrm not in _WITH_SIB)
_CMPXCHG = re.compile(
    rb"\xf0[\x40-\x47]?\x0f\xb1(?:["
    + re.escape(_WITHOUT_SIB)
    + rb"]|["
    + re.escape(_WITH_SIB)
    + rb"]\x24)(.{4})",
    re.DOTALL,
)
_ADD_DISTANCE = 8  # words between the add that makes the address and the casal
_Hit = TypeVar("_Hit")
# Transitions between plain states that casgstatus makes: (old, new).
_TRANSITIONS = frozenset(
    {(1, 2), (2, 1), (2, 3), (2, 4), (2, 6), (3, 1), (3, 2), (4, 1), (4, 2), (6, 1), (6, 4)}
)


@dataclass(frozen=True)
class Swap:
    """A compare-and-swap of a goroutine's status, with the states where they are constants."""

    vaddr: int
    old: int | None
    new: int | None


@dataclass(frozen=True)
class StatusWriter:
    """A function that changes the status of a goroutine: ``calls`` of casgstatus, and ``swaps`` of its
    own."""

    function: Function
    calls: tuple[Call, ...]
    swaps: tuple[Swap, ...]


@dataclass(frozen=True)
class StatusWrites:
    """All writers by name, casgstatus among them, and the offset of the status in runtime.g (0: not
    found)."""

    offset: int
    writers: dict[str, StatusWriter]


def find_status_writes(
    binary: Binary,
    ranges: Sequence[tuple[int, int]],
    casgstatus: Function,
    function_at: Callable[[int], Function | None],
) -> StatusWrites:
    """Search the code in ``ranges`` (first address, address behind the last) for what calls ``casgstatus`` or
    does the same. Functions of other packages than the runtime are left out: the status is none of
    theirs."""
    own = list(_swaps(binary, casgstatus.vaddr, casgstatus.vaddr + casgstatus.size))
    offset = own[0][1] if own and own[0][1] else 0
    functions: dict[str, Function] = {}
    calls: dict[str, list[Call]] = {}
    swaps: dict[str, list[Swap]] = {}

    def owner(vaddr: int) -> Function | None:
        function = function_at(vaddr)
        if function is None or not function.name.startswith("runtime."):
            return None
        if len(functions) == _MAX_WRITERS:
            raise NotTraceable(f"{binary.path}: damaged: too many functions change a goroutine's status")
        return functions.setdefault(function.name, function)

    called = chain.from_iterable(calls_in(binary, *code, casgstatus.vaddr) for code in ranges)
    for vaddr in _limited(binary, called):
        if function := owner(vaddr):
            calls.setdefault(function.name, []).append(Call(vaddr, casgstatus.vaddr))
    swapped = chain.from_iterable(_swaps(binary, *code) for code in ranges)
    for vaddr, at in _limited(binary, swapped) if offset else ():
        if at in (offset, None) and (function := owner(vaddr)):
            swap = _swap(binary, function, vaddr)
            if at == offset or _looks_like_status(function, swap):
                swaps.setdefault(function.name, []).append(swap)
    writers = {
        name: StatusWriter(function, tuple(calls.get(name, ())), tuple(swaps.get(name, ())))
        for name, function in functions.items()
        if name in calls or name in swaps
    }
    return StatusWrites(offset, writers)


def _limited(binary: Binary, hits: Iterator[_Hit]) -> Iterator[_Hit]:
    for count, hit in enumerate(hits):
        if count == _MAX_HITS:
            raise NotTraceable(f"{binary.path}: damaged: code that no compiler makes")
        yield hit


def _looks_like_status(function: Function, swap: Swap) -> bool:
    # Timers had a status with such numbers, too, up to Go 1.22.
    return (swap.old, swap.new) in _TRANSITIONS and "timer" not in function.name.lower()


def _swap(binary: Binary, function: Function, vaddr: int) -> Swap:
    code = instructions(binary, function)
    for index, instruction in enumerate(code):
        if instruction.vaddr == vaddr:
            old, new = _swap_registers(binary.arch, instruction)
            return Swap(
                vaddr,
                constant_before(binary.arch, code, index, old),
                constant_before(binary.arch, code, index, new),
            )
    return Swap(vaddr, None, None)


def _swap_registers(arch: Arch, instruction: Instruction) -> tuple[Register, Register]:
    """Which registers hold the old and the new state."""
    names = [name.strip() for name in instruction.operands.split(",")]
    if arch is Arch.ARM64:
        return frozenset({names[0], "x" + names[0][1:]}), frozenset({names[1], "x" + names[1][1:]})
    return frozenset({"eax", "rax"}), frozenset({names[-1], "r" + names[-1].strip("erd")})


def _swaps(binary: Binary, start: int, end: int) -> Iterator[tuple[int, int | None]]:
    """(address, offset from the base pointer, None if it does not show) of 32-bit compare-and-swaps."""
    find = _arm64_swaps if binary.arch is Arch.ARM64 else _amd64_swaps
    for vaddr in range(start, end, _CHUNK):
        # What an instruction at the border refers to, and the rest of it.
        before = min(_LEAD, vaddr - start)
        view = binary.view(vaddr - before, min(before + _CHUNK + _LEAD, end - vaddr + before))
        for place, offset in find(view):
            if before <= place < before + _CHUNK:
                yield vaddr - before + place, offset


def _amd64_swaps(code: memoryview) -> Iterator[tuple[int, int | None]]:
    for match in _CMPXCHG.finditer(code):
        yield match.start(), struct.unpack("<i", match[1])[0]


def _arm64_swaps(code: memoryview) -> Iterator[tuple[int, int | None]]:
    words = np.frombuffer(code[: len(code) & ~3], "<u4")
    for place in np.flatnonzero((words & 0xFFE0FC00) == 0x88E0FC00).tolist():  # casal, 32 bits
        base = int(words[place]) >> 5 & 31
        offset = None
        for word in reversed(words[max(0, place - _ADD_DISTANCE) : place].tolist()):
            if word & 0xFFC00000 == 0x91000000 and word & 31 == base:  # add base, xN, #immediate
                offset = word >> 10 & 0xFFF
                break
        yield 4 * place, offset
