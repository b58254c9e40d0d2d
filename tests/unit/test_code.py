"""Probe sites, calls and data operands: recorded values, disassemblers, and code made to mislead."""

import re
import struct
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import Call, call_sites, cheapest_site, constant_arguments, data_operands, site_of_call
from schedtrace.symbols.function import Function
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.symtab import Symtab
from tests.unit.disassembly import Line, callee, disassembly, is_direct_call, target
from tests.unit.elfwriter import AMD64, ARM64, Elf
from tests.unit.forms import VERSIONS, built

FORM = {"amd64": "plain", "arm64": "arm64"}

# Function -> how many leading arguments a probe there reads.
ARGUMENTS = {
    "casgstatus": 3, "ready": 3, "execute": 2, "gopark": 5, "park_m": 1, "newproc1": 3, "goschedImpl": 1,
    "gosched_m": 1, "goexit0": 1, "gdestroy": 1, "injectglist": 1, "entersyscallblock": 0, "exitsyscall": 0,
    "exitsyscall0": 1, "exitsyscallNoP": 1, "preemptPark": 1, "goyield_m": 1, "(*timeHistogram).record": 2,
    "stopTheWorldWithSema": 1, "gcStart": 3, "preemptone": 1, "retake": 1, "schedule": 0,
}  # fmt: skip
# What a study of these releases by other means wrote down, one row a function, one column a version.
SITES = {
    "amd64": """
        casgstatus              nop31 push0  push0  push0  push0  push0  push0  push0
        ready                   je40  push10 push10 push10 push10 push10 push10 push10
        execute                 je45  push10 push10 push10 push10 push10 push10 push10
        gopark                  nop28 push10 push10 push10 push10 push10 push10 push10
        park_m                  je41  push10 push10 push10 push10 push10 push10 push10
        newproc1                jne47 push10 push10 push10 push10 push10 push10 push10
        goschedImpl             jne42 push10 push10 push10 push10 push10 push10 push10
        gosched_m               je27  push6  push6  push6  push6  push6  push6  push6
        goexit0                 call64 push10 push6 push6  push6  push6  push6  push6
        gdestroy                -     -      push10 push10 push10 push10 push10 push10
        injectglist             je35  push10 push10 push10 push10 push10 push10 push10
        entersyscallblock       call97 push0 push0  push0  push0  push0  push0  push0
        exitsyscall             jb36  push0  push0  push0  push0  push0  push0  push0
        exitsyscall0            call39 push10 push10 push10 push10 push10 -     -
        exitsyscallNoP          -     -      -      -      -      -      push10 push10
        preemptPark             je36  push10 push10 push10 push10 push10 push10 push10
        goyield_m               je36  push10 push10 push10 push10 push10 push10 push10
        (*timeHistogram).record -     push0  push0  push0  jl3    jl3    jl3    jl3
        stopTheWorldWithSema    jg35  push10 push15 push15 push15 push15 push15 push15
        gcStart                 nop28 push15 push15 push15 push15 push15 push18 push18
        preemptone              je35  push10 push10 push10 push10 push10 push10 push10
        retake                  nop29 push10 push10 push10 push10 push10 push10 push10
        schedule                jne35 push10 push10 push10 push10 push10 push10 push10
    """,
    "arm64": """
        casgstatus              tbnz24 tbnz24 tbnz24 tbnz24 tbnz24 tbnz24 tbnz24 tbnz24
        ready                   adrp32 adrp32 b.ne76 b.ne76 b.ne76 b.ne76 b.ne76 b.ne76
        execute                 adrp36 adrp40 adrp40 adrp40 adrp40 adrp40 adrp40 adrp40
        gopark                  b.eq76 b.eq72 b.eq72 b.eq72 b.eq72 b.eq72 b.ne80 b.ne80
        park_m                  adrp32 adrp36 adrp40 adrp36 adrp36 adrp36 adrp36 adrp36
        newproc1                cbnz40 cbnz36 cbnz36 cbnz44 cbnz44 cbnz44 cbnz44 cbnz44
        goschedImpl             b.ne52 b.ne52 adrp36 adrp28 adrp28 adrp28 adrp44 adrp44
        gosched_m               adrp24 adrp24 bl28   bl28   bl28   bl28   bl28   bl28
        goexit0                 bl52   bl52   bl24   bl24   bl24   bl24   bl24   bl24
        gdestroy                -      -      bl52   bl52   bl52   bl52   bl52   bl52
        injectglist             cbz28  cbz28  cbz32  cbz28  cbz28  cbz32  cbz32  cbz32
        entersyscallblock       bl96   bl96   bl96   bl92   bl92   bl92   tbnz92 tbnz88
        exitsyscall             b.hi40 b.hi40 b.hi40 b.hi40 b.hi40 b.hi40 b.hi40 b.hi40
        exitsyscall0            bl36   bl36   adrp32 adrp32 adrp32 adrp32 -      -
        exitsyscallNoP          -      -      -      -      -      -      adrp32 adrp32
        preemptPark             adrp28 adrp28 b.ne52 b.ne52 b.ne52 b.ne52 b.ne52 b.ne52
        goyield_m               adrp28 adrp28 adrp32 adrp28 adrp28 adrp28 adrp28 adrp28
        (*timeHistogram).record -      tbz12  tbz12  tbz12  tbz0   tbz0   tbz0   tbz0
        gcStart                 b.eq68 b.eq72 b.eq72 b.eq72 b.eq76 b.eq76 b.eq76 b.eq76
        preemptone              cbz28  cbz28  cbz28  cbz28  cbz28  cbz28  cbz28  cbz28
        retake                  adrp32 adrp36 adrp36 adrp36 adrp36 adrp36 adrp36 adrp36
        schedule                cbnz32 cbnz32 cbnz32 cbnz32 cbnz32 cbnz32 cbnz32 cbnz32
    """,
}


@cache
def functions_of(path: Path) -> dict[str, Function]:
    """The runtime's functions by name, without "runtime."; one of several of a name."""
    with Binary.open(path) as binary:
        return {f.name.removeprefix("runtime."): f for f in Pclntab.find(binary) if f.name.startswith("runtime.")}


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
@pytest.mark.parametrize("version", VERSIONS)
def test_sites_are_the_recorded_ones(version: str, arch: str) -> None:
    path = built(FORM[arch], version)
    functions = functions_of(path)
    expected, found = {}, {}
    with Binary.open(path) as binary:
        for row in SITES[arch].strip().splitlines():
            name, *columns = row.split()
            value = columns[VERSIONS.index(version)]
            if value != "-" and name in functions:  # the linker leaves out what a program does not use
                site = cheapest_site(binary, functions[name], ARGUMENTS[name])
                assert site is not None
                assert site.emulated
                assert site.vaddr == functions[name].vaddr + site.offset
                expected[name] = value
                found[name] = f"{site.instruction.split()[0]}{site.offset}"
    assert found == expected
    assert len(found) > 15


@pytest.mark.parametrize(
    ("version", "arch", "name", "site"),
    [
        # The first branch is in a loop (runqempty, inlined), so the first instruction behind the check has to do.
        ("1.19", "amd64", "handoffp", "+10 sub rsp, 0x20"),
        ("1.27", "arm64", "handoffp", "+12 str x30, [sp, #-0x30]!"),
        # Arguments are overwritten before anything emulated comes.
        ("1.19", "amd64", "gcMarkTermination", "+18 sub rsp, 0x1b0"),
    ],
)
def test_where_nothing_is_emulated_the_site_is_behind_the_stack_check(
    version: str, arch: str, name: str, site: str
) -> None:
    path = built(FORM[arch], version)
    with Binary.open(path) as binary:
        found = cheapest_site(binary, functions_of(path)[name], 1)
    assert str(found) == site
    assert found is not None
    assert not found.emulated


# --- against disassemblers ---

CHEAP = {
    "amd64": re.compile(r"(push|call|jmp|j[a-z]{1,2}|nop)$"),
    "arm64": re.compile(r"(CALL|JMP|B[A-Z]{2}|CBN?ZW?|TBN?Z|ADRP?|RET)$"),
}
# They have the first argument's register as an operand, in the place of a result, and don't write it.
READS_ONLY = {
    "amd64": {"cmp", "test", "bt", "push", "call", "nop", "jmp"},
    "arm64": {"CMP", "CMPW", "CMN", "CMNW", "TST", "TSTW", "STP", "MOVB", "NOP"},
}


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
@pytest.mark.parametrize("version", ["1.19", "1.23", "1.27"])
def test_sites_of_all_runtime_functions_against_a_disassembler(version: str, arch: str) -> None:
    path = built(FORM[arch], version)
    listing = disassembly(path, arch)
    checked = 0
    with Binary.open(path) as binary:
        for name, function in functions_of(path).items():
            lines = listing.get(name)
            if lines is None or lines[0].vaddr != function.vaddr:
                continue
            site = cheapest_site(binary, function, 1)
            if site is None:
                continue
            checked += 1
            before = [line for line in lines if line.vaddr < site.vaddr]
            (here,) = (line for line in lines if line.vaddr == site.vaddr)
            if site.emulated:
                assert CHEAP[arch].match(here.mnemonic), (name, here)
                assert not any(writes_first_argument(arch, line) for line in before), name
            # Straight line: nothing leaves it but the branch to where the stack grows.
            leaving = [line for line in before if re.match(r"(j|call|ret|ud2|B|CB|TB|CALL|JMP|RET)", line.mnemonic)]
            assert len(leaving) <= 2, name
            assert all(grows_stack(lines, line) for line in leaving), name
    assert checked > 800


def writes_first_argument(arch: str, line: Line) -> bool:
    if arch == "amd64":
        first, _, second = line.operands.partition(",")
        if line.mnemonic == "xchg" and first == second:  # how the assembler of that time wrote a nop of two bytes
            return False
        return line.mnemonic not in READS_ONLY[arch] and first in ("rax", "eax", "ax", "al")
    destination = line.operands.rsplit(", ", 1)[-1]
    return line.mnemonic not in READS_ONLY[arch] and destination in ("R0", "R0)")


def grows_stack(lines: list[Line], branch: Line) -> bool:
    """Whether a branch leads to a call of morestack, with nothing but stores before."""
    calls = (line for line in lines if line.vaddr >= target(branch) and is_direct_call(line))
    return callee(next(calls)).startswith("morestack")


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
@pytest.mark.parametrize("version", ["1.19", "1.23", "1.27"])
def test_calls_of_all_runtime_functions_against_a_disassembler(version: str, arch: str) -> None:
    path = built(FORM[arch], version)
    functions = functions_of(path)
    with Binary.open(path) as binary:
        symtab = Symtab.read(binary)
        assert symtab is not None
        casgstatus = symtab.functions_named(["runtime.casgstatus"])["runtime.casgstatus"].vaddr
        compared = 0
        for name, lines in disassembly(path, arch).items():
            function = functions.get(name)
            if function is None or lines[0].vaddr != function.vaddr:
                continue
            expected = [line for line in lines if is_direct_call(line)]
            found = call_sites(binary, function)
            assert [call.vaddr for call in found] == [line.vaddr for line in expected], name
            to_casgstatus = [line.vaddr for line in expected if callee(line) == "casgstatus"]
            assert [call.vaddr for call in found if call.target_vaddr == casgstatus] == to_casgstatus, name
            compared += len(found)
    assert compared > 3000


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
@pytest.mark.parametrize("version", VERSIONS)
def test_data_operands_name_the_runtimes_variables(version: str, arch: str) -> None:
    path = built(FORM[arch], version)
    functions = functions_of(path)
    with Binary.open(path) as binary:
        symtab = Symtab.read(binary)
        assert symtab is not None
        variables = symtab.data_named(["runtime.allp", "runtime.gomaxprocs", "runtime.waitReasonStrings"])
        first = {name: data_operands(binary, functions[name])[0].target_vaddr for name in ("preemptall", "procresize")}
        addresses = [o.target_vaddr for o in data_operands(binary, functions["waitReason.String"]) if o.address_of]
    assert first["preemptall"] == variables["runtime.allp"][0]
    assert first["procresize"] == variables["runtime.gomaxprocs"][0]
    assert addresses[1] == variables["runtime.waitReasonStrings"][0]


def test_constant_arguments_are_the_states_that_the_source_passes() -> None:
    for arch in ("amd64", "arm64"):
        path = built(FORM[arch], "1.27")
        functions = functions_of(path)
        with Binary.open(path) as binary:
            states = {
                name: [
                    constant_arguments(binary, functions[name], call, 3)[1:]
                    for call in call_sites(binary, functions[name])
                    if call.target_vaddr == functions["casgstatus"].vaddr
                ]
                for name in ("park_m", "ready", "execute", "gdestroy", "goyield_m", "needm", "casGToWaitingForSuspendG")
            }
        assert states["park_m"] == [(2, 4), (4, 1)], arch
        assert states["ready"] == [(4, 1)]
        assert states["execute"] == [(1, 2)]
        assert states["gdestroy"] == [(2, 6)]
        assert states["goyield_m"] == [(2, 1)]
        assert states["needm"] == [(11, 3)]
        assert states["casGToWaitingForSuspendG"] == [(None, 4)]  # its own argument, passed on


# --- code made for the test ---

TEXT = 0x401000


def made(tmp_path: Path, code: bytes, machine: int = AMD64) -> tuple[Binary, Function]:
    elf = Elf(machine=machine)
    elf.load(TEXT, code)
    path = tmp_path / "made"
    path.write_bytes(elf.to_bytes())
    return Binary.open(path), Function("made", TEXT, len(code))


def amd64(*parts: str) -> bytes:
    return bytes.fromhex("".join(parts))


CHECK = "493b6610 7606"  # cmp rsp, [r14+0x10]; jbe to the call 6 bytes on
PUSH, POP, RET, INC_RAX, SAVE = "55", "5d", "c3", "48ffc0", "4889442408"


def stack_growth(behind: int) -> str:
    """call; jmp to the entry, which lies ``behind`` + 5 bytes back."""
    return "e8 00100000" + "e9" + struct.pack("<i", -(behind + 10)).hex()


@pytest.mark.parametrize(
    ("code", "arguments", "site"),
    [
        pytest.param(amd64(PUSH, POP, RET), 1, "+0 push rbp", id="push"),
        pytest.param(amd64("4154", RET), 1, "+0 push r12", id="push of a high register"),
        pytest.param(amd64(SAVE, "6690", "90", RET), 1, "+7 nop", id="a prefixed nop is none"),
        pytest.param(amd64(SAVE, "0f1f00", "90", RET), 1, "+8 nop", id="a long nop is none"),
        pytest.param(amd64(SAVE, "f390", "90", RET), 1, "+7 nop", id="pause is none"),
        pytest.param(amd64(INC_RAX, PUSH, RET), 0, "+3 push rbp", id="no argument needed"),
        pytest.param(amd64(INC_RAX, PUSH, RET), 1, "+0 inc rax -", id="argument overwritten"),
        pytest.param(amd64("48f7e1", PUSH, RET), 1, "+0 mul rcx -", id="argument overwritten by no operand"),
        pytest.param(amd64("4887c3", PUSH, RET), 2, "+0 xchg rbx, rax -", id="arguments exchanged"),
        pytest.param(amd64("88e0", PUSH, RET), 1, "+0 mov al, ah -", id="part of an argument overwritten"),
        pytest.param(amd64(SAVE, "48ffc9", "75fb", RET), 1, "+0 mov qword ptr [rsp + 8], rax -", id="loop"),
        pytest.param(amd64("90", "48ffc9", "75fa", RET), 1, None, id="the entry is in the loop"),
        pytest.param(amd64(SAVE, "ffd0", PUSH, RET), 1, "+0 mov qword ptr [rsp + 8], rax -", id="call in between"),
        pytest.param(amd64("48ffc9", "ff24c500104000", PUSH), 1, None, id="jump that hides where it goes"),
        pytest.param(amd64(SAVE, RET), 1, "+0 mov qword ptr [rsp + 8], rax -", id="ret is single-stepped"),
        pytest.param(amd64(SAVE, "66e80000", RET), 1, "+0 mov qword ptr [rsp + 8], rax -", id="16-bit call"),
        pytest.param(
            amd64(CHECK, PUSH, SAVE.replace("4889442408", "4889e5"), POP, RET, stack_growth(12)), 1, "+6 push rbp",
            id="behind the stack check",
        ),
        pytest.param(
            amd64("493b6610 7608", "4883ec08", "4883c4", "08", stack_growth(14)), 1, "+6 sub rsp, 8 -",
            id="behind the stack check, not emulated",
        ),
    ],
)  # fmt: skip
def test_site_in_made_code(tmp_path: Path, code: bytes, arguments: int, site: str | None) -> None:
    binary, function = made(tmp_path, code)
    with binary:
        found = cheapest_site(binary, function, arguments)
    assert site == (None if found is None else f"{found}{'' if found.emulated else ' -'}")


def arm64(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}I", *words)


ADRP_X27, LDR_LITERAL, NOP, RET64 = 0x9000001B, 0x58000042, 0xD503201F, 0xD65F03C0
STR_X0, ADD_X0, LDAXR, STLXR, CBNZ_BACK = 0xF90007E0, 0x91000400, 0xC85FFC41, 0xC81BFC43, 0x35FFFFDB


@pytest.mark.parametrize(
    ("words", "site"),
    [
        pytest.param((STR_X0, ADRP_X27, RET64), "+4 adrp x27, #0x401000", id="adrp"),
        pytest.param((STR_X0, LDR_LITERAL, NOP, ADRP_X27), "+12 adrp x27, #0x401000", id="literal and nop are none"),
        pytest.param((STR_X0, RET64), "+4 ret", id="ret"),
        pytest.param((ADD_X0, ADRP_X27, RET64), "+0 add x0, x0, #1 -", id="argument overwritten"),
        pytest.param((STR_X0, LDAXR, STLXR, CBNZ_BACK, RET64), "+0 str x0, [sp, #8] -", id="exclusive access"),
    ],
)
def test_site_in_made_arm64_code(tmp_path: Path, words: Iterable[int], site: str) -> None:
    binary, function = made(tmp_path, arm64(*words), ARM64)
    with binary:
        found = cheapest_site(binary, function, 1)
    assert found is not None
    assert f"{found}{'' if found.emulated else ' -'}" == site


def test_goroutine_register_is_watched_when_it_is_needed(tmp_path: Path) -> None:
    binary, function = made(tmp_path, amd64("4d31f6", PUSH, RET))  # xor r14, r14
    with binary:
        without, with_goroutine = (cheapest_site(binary, function, 0, goroutine=g) for g in (False, True))
    assert str(without) == "+3 push rbp"
    assert str(with_goroutine) == "+0 xor r14, r14"


def test_constants_hold_only_where_no_other_way_leads(tmp_path: Path) -> None:
    mov_ebx_2, mov_ecx_4, xor_ecx = "bb02000000", "b904000000", "31c9"
    call = "e8 00000000"
    for code, expected in (
        (amd64(mov_ebx_2, mov_ecx_4, call), (None, 2, 4)),
        (amd64(mov_ebx_2, xor_ecx, call), (None, 2, 0)),
        (amd64(mov_ebx_2, "89d9", call), (None, 2, 2)),  # mov ecx, ebx
        (amd64("7405", mov_ebx_2, mov_ecx_4, call), (None, None, 4)),  # one way comes without the first
        (amd64(mov_ebx_2, "ffc3", mov_ecx_4, call), (None, None, 4)),  # inc ebx
        (amd64(mov_ebx_2, call, mov_ecx_4, call), (None, None, 4)),  # a call in between
    ):
        binary, function = made(tmp_path, code)
        with binary:
            last = call_sites(binary, function)[-1]
            assert constant_arguments(binary, function, last, 3) == expected, code.hex()


def test_damaged_functions_are_refused(tmp_path: Path) -> None:
    binary, function = made(tmp_path, amd64(PUSH, RET))
    with binary:
        with pytest.raises(NotTraceable, match="claims 1000000 bytes of code"):
            cheapest_site(binary, Function("made", TEXT, 1_000_000), 1)
        with pytest.raises(NotTraceable, match="no instruction at 0x401005"):
            site_of_call(binary, function, Call(TEXT + 5, TEXT), "x")
        with pytest.raises(NotTraceable):
            call_sites(binary, Function("made", TEXT + 4096, 16))
        assert cheapest_site(binary, Function("made", TEXT, 0), 1) is None
