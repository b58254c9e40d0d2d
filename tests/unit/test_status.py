"""Who changes a goroutine's status: in code made for the test; real binaries are in test_plan.py."""

import struct
from pathlib import Path

import pytest

from schedtrace.errors import NotTraceable
from schedtrace.symbols import status
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.function import Function
from schedtrace.symbols.status import StatusWrites, find_status_writes
from tests.unit.elfwriter import AMD64, ARM64, Elf

TEXT = 0x401000
SIZE = 64  # of each function


def writes(tmp_path: Path, machine: int, **functions: bytes) -> StatusWrites:
    """What is found in functions of package runtime laid out one after the other; the first must be casgstatus."""
    padding = b"\xcc" if machine == AMD64 else b"\0"
    elf = Elf(machine=machine)
    elf.load(TEXT, b"".join(code.ljust(SIZE, padding) for code in functions.values()))
    path = tmp_path / "made"
    path.write_bytes(elf.to_bytes())
    names = [name.replace("__", ".") for name in functions]
    made = [Function(name if "." in name else f"runtime.{name}", TEXT + n * SIZE, SIZE) for n, name in enumerate(names)]
    with Binary.open(path) as binary:
        code = [(TEXT, TEXT + SIZE * len(made))]
        return find_status_writes(binary, code, made[0], lambda vaddr: made[(vaddr - TEXT) // SIZE])


def shown(found: StatusWrites) -> dict[str, tuple[list[int], list[tuple[int, int | None, int | None]]]]:
    """By name: offsets of calls in the function; of swaps, with their states."""
    return {
        name.removeprefix("runtime."): (
            [call.vaddr - writer.function.vaddr for call in writer.calls],
            [(swap.vaddr - writer.function.vaddr, swap.old, swap.new) for swap in writer.swaps],
        )
        for name, writer in found.writers.items()
    }


def call(place: int, number: int) -> bytes:
    """A call of casgstatus at byte ``place`` of the function of that number."""
    return b"\xe8" + struct.pack("<i", -(number * SIZE + place + 5))


OWN = bytes.fromhex("f00fb18f90000000")  # lock cmpxchg [rdi+0x90], ecx
EAX_4, R9D_1 = bytes.fromhex("b804000000"), bytes.fromhex("41b901000000")
SWAP_R9D = bytes.fromhex("f0440fb18a90000000")  # lock cmpxchg [rdx+0x90], r9d


@pytest.mark.parametrize("chunk", [4 << 20, 16, 64])
def test_amd64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(status, "_CHUNK", chunk)  # so that what lies across a border is found, and once
    found = writes(
        tmp_path,
        AMD64,
        casgstatus=b"\x89\xd8" + OWN,
        calls=b"\x90" + call(1, 1) + b"\x90\x90" + call(8, 1),
        copy=EAX_4 + R9D_1 + SWAP_R9D,
        elsewhere=bytes.fromhex("f00fb18f98000000"),  # another field
        unlocked=bytes.fromhex("0fb18f90000000"),
        wide=bytes.fromhex("f0480fb18f90000000"),  # 64 bits
        stack_based=bytes.fromhex("f0410fb18c2490000000"),  # [r12+0x90], which needs another byte
        main__f=OWN + call(8, 7),  # not the runtime's
        near_the_end=bytes(SIZE - 8) + OWN,
    )
    assert found.offset == 0x90
    assert shown(found) == {
        "casgstatus": ([], [(2, None, None)]),
        "calls": ([1, 8], []),
        "copy": ([], [(11, 4, 1)]),
        "stack_based": ([], [(0, None, None)]),
        "near_the_end": ([], [(56, None, None)]),
    }


def arm64(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


ADD_X3_144, ADD_X3_56 = 0x91024003, 0x9100E003  # add x3, x0, #...
SXTW_X27_W1, SXTW_X27_W9 = 0x93407C3B, 0x93407D3B
CASAL_X3, CASAL_X4 = 0x88FBFC62, 0x88FBFC8A  # casal w27, w2, [x3]; casal w27, w10, [x4]
W9_4, W10_1, W9_1, W10_7 = 0x321E03E9, 0x320003EA, 0x320003E9, 0x32000BEA  # orr wN, wzr, #...
NOP = 0xD503201F


def bl(place: int, number: int) -> int:
    return 0x94000000 | (-(number * SIZE + 4 * place) // 4 & 0x3FFFFFF)


@pytest.mark.parametrize("chunk", [4 << 20, 16, 64])
def test_arm64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(status, "_CHUNK", chunk)
    by_constants = (NOP, W9_4, W10_1, SXTW_X27_W9, CASAL_X4)
    found = writes(
        tmp_path,
        ARM64,
        casgstatus=arm64(ADD_X3_144, SXTW_X27_W1, CASAL_X3),
        calls=arm64(NOP, bl(1, 1), bl(2, 1)),
        copy=arm64(ADD_X3_144, NOP, NOP, SXTW_X27_W1, CASAL_X3),
        by_constants=arm64(*by_constants),
        other_field=arm64(ADD_X3_56, SXTW_X27_W1, CASAL_X3),
        other_numbers=arm64(W9_1, W10_7, SXTW_X27_W9, CASAL_X4),
        unknown_numbers=arm64(SXTW_X27_W9, CASAL_X4),
        modtimer=arm64(*by_constants),  # timers had such a status up to 1.22
        main__f=arm64(*by_constants),
    )
    assert found.offset == 0x90
    assert shown(found) == {
        "casgstatus": ([], [(8, None, None)]),
        "calls": ([4, 8], []),
        "copy": ([], [(16, None, None)]),
        "by_constants": ([], [(16, 4, 1)]),
    }


def test_without_a_swap_in_casgstatus_only_calls_are_found(tmp_path: Path) -> None:
    found = writes(tmp_path, AMD64, casgstatus=b"\xc3", calls=call(0, 1), swaps=OWN)
    assert found.offset == 0
    assert shown(found) == {"calls": ([0], [])}


def test_code_that_no_compiler_makes_is_refused_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_MAX_HITS", 5)
    with pytest.raises(NotTraceable, match="code that no compiler makes"):
        writes(tmp_path, AMD64, casgstatus=OWN, calls=b"".join(call(5 * n, 1) for n in range(6)))
    monkeypatch.setattr(status, "_MAX_WRITERS", 3)
    with pytest.raises(NotTraceable, match="too many functions"):
        writes(tmp_path, AMD64, casgstatus=OWN, **{f"f{n}": call(0, n) for n in range(1, 5)})
