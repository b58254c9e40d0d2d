"""Which functions of the runtime change a goroutine's status, and how: by calling casgstatus, or by code of
their own.

``runtime.casgstatus`` is meant to be the one place, and the compiler leaves it a function. With a profile
(PGO) it is copied into the callers that the profile calls hot, and a probe on it then misses most of what
happens. So the binary's own code is asked: every call of casgstatus, and every other compare-and-swap at
the offset at which casgstatus itself does one.

On amd64 that is ``lock cmpxchg %r32, offset(%reg)``. On arm64 Go writes two versions of an atomic operation
and chooses at run time; one of them is ``casal``, on an address that an ``add`` with the offset has made.
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.code import Call
from schedtrace.symbols.function import Function

_CHUNK = 4 << 20
# lock; REX?; 0f b1 /r with a 32-bit displacement; a SIB byte if the base is rsp or r12.
_CMPXCHG = re.compile(rb"\xf0[\x40-\x47]?\x0f\xb1(?:[\x80-\xbf])\x24?(.{4})", re.DOTALL)
_LONGEST_CMPXCHG = 10
_ADD_DISTANCE = 8  # words between the add that makes the address and the casal


@dataclass(frozen=True)
class StatusWriter:
    """A function that changes the status of a goroutine: ``calls`` of casgstatus, and ``swaps``, the
    addresses of compare-and-swap instructions of its own."""

    function: Function
    calls: tuple[Call, ...]
    swaps: tuple[int, ...]


@dataclass(frozen=True)
class StatusWrites:
    """All writers by name, casgstatus itself among them, and the offset in runtime.g that they write (0:
    unknown)."""

    offset: int
    writers: dict[str, StatusWriter]


def find_status_writes(
    binary: Binary,
    text: tuple[int, int],
    casgstatus: Function,
    function_at: Callable[[int], Function | None],
) -> StatusWrites:
    """Search ``text`` (first address, address behind the last) for what calls ``casgstatus`` or does the
    same."""
    own = list(_swaps(binary, casgstatus.vaddr, casgstatus.vaddr + casgstatus.size, None))
    offset = own[0][1] if own else 0
    calls: dict[str, list[Call]] = {}
    swaps: dict[str, list[int]] = {}
    functions: dict[str, Function] = {}

    def owner(vaddr: int) -> str | None:
        function = function_at(vaddr)
        if function is None:
            return None
        functions[function.name] = function
        return function.name

    for vaddr in _calls(binary, *text, casgstatus.vaddr):
        if name := owner(vaddr):
            calls.setdefault(name, []).append(Call(vaddr, casgstatus.vaddr))
    if offset:
        for vaddr, _ in _swaps(binary, *text, offset):
            name = owner(vaddr)
            if name and name.startswith("runtime."):
                swaps.setdefault(name, []).append(vaddr)
    writers = {
        name: StatusWriter(function, tuple(calls.get(name, ())), tuple(swaps.get(name, ())))
        for name, function in functions.items()
        if name in calls or name in swaps
    }
    return StatusWrites(offset, writers)


def _calls(binary: Binary, start: int, end: int, target: int) -> Iterator[int]:
    """Addresses of the direct calls of ``target``. On amd64 a byte pattern: the caller checks against
    decoded code."""
    for vaddr in range(start, end, _CHUNK):
        if binary.arch is Arch.ARM64:
            words = np.frombuffer(binary.view(vaddr, min(_CHUNK, end - vaddr) & ~3), "<u4")
            places = np.flatnonzero((words & 0xFC000000) == 0x94000000)
            offsets = ((words[places] & 0x3FFFFFF).astype(np.int64) ^ 0x2000000) - 0x2000000
            hits = places[vaddr + 4 * (places + offsets) == target] * 4
        else:
            content = np.frombuffer(binary.view(vaddr, min(_CHUNK + 4, end - vaddr)), np.uint8)
            places = np.flatnonzero(content[:-4] == 0xE8)
            relative = np.zeros(len(places), np.int64)
            for byte in range(4):
                relative |= content[places + 1 + byte].astype(np.int64) << (8 * byte)
            relative = (relative ^ 0x80000000) - 0x80000000
            hits = places[vaddr + places + 5 + relative == target]
        for place in hits.tolist():
            yield vaddr + place


def _swaps(binary: Binary, start: int, end: int, offset: int | None) -> Iterator[tuple[int, int]]:
    """(address, offset) of the 32-bit compare-and-swap instructions at ``offset``; at any if None."""
    for vaddr in range(start, end, _CHUNK):
        size = min(_CHUNK + 64, end - vaddr)
        find = _arm64_swaps if binary.arch is Arch.ARM64 else _amd64_swaps
        for place, at in find(binary.view(vaddr, size)):
            if place < _CHUNK and (offset is None or at == offset):
                yield vaddr + place, at


def _amd64_swaps(code: memoryview) -> Iterator[tuple[int, int]]:
    for match in _CMPXCHG.finditer(code):
        yield match.start(), struct.unpack("<i", match[1])[0]


def _arm64_swaps(code: memoryview) -> Iterator[tuple[int, int]]:
    words = np.frombuffer(code[: len(code) & ~3], "<u4")
    for place in np.flatnonzero((words & 0xFFE0FC00) == 0x88E0FC00).tolist():  # casal, 32 bits
        base = int(words[place]) >> 5 & 31
        for before in range(place - 1, max(-1, place - 1 - _ADD_DISTANCE), -1):
            word = int(words[before])
            if word & 0xFFC00000 == 0x91000000 and word & 31 == base:  # add base, xN, #immediate
                yield 4 * place, word >> 10 & 0xFFF
                break
