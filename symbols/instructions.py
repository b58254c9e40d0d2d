"""Decoded machine code of one function: addresses, control flow, registers written, what the kernel emulates.

A uprobe replaces one instruction by a breakpoint. What the kernel then does with the replaced instruction
decides the price of a hit: some it carries out itself (x86 "emulated": ``push``, ``call``, ``jmp``, ``jcc``,
one-byte ``nop``; arm64 "simulated": branches, ``adr``, ``adrp``), every other one it runs out of line under a
single step, a second trap that costs several times as much.

Which instructions those are was read from the kernel's arch/x86/kernel/uprobes.c (``branch_setup_xol_ops``,
``push_setup_xol_ops``) and arch/arm64/kernel/probes/decode-insn.c, and restricted to what every kernel since
5.10 takes: a branch or ``nop`` with an operand-size prefix is *refused* by older ones, multi-byte ``nop`` is
emulated only by new ones, and ``ldr`` of a literal was withdrawn from uprobes on arm64 (CVE-2024-50099).
"""

import enum
import re
import struct
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import capstone

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.function import Function

# Names that alias one register.
Register = frozenset[str]


def _amd64_register(letters: str) -> Register:
    if letters.isdigit():
        return frozenset(f"r{letters}{width}" for width in ("", "d", "w", "b"))
    low = f"{letters}l" if letters in ("di", "si", "bp", "sp") else f"{letters[0]}l"
    high = {f"{letters[0]}h"} if letters.endswith("x") else set()
    return frozenset({f"r{letters}", f"e{letters}", letters, low} | high)


def _arm64_register(number: int) -> Register:
    return frozenset({f"x{number}", f"w{number}"})


# Go's calling convention (src/cmd/compile/abi-internal.md): leading integer arguments, and the running
# goroutine. In force on amd64 since Go 1.17, on arm64 since 1.18.
ARGUMENTS = {
    Arch.AMD64: tuple(_amd64_register(r) for r in ("ax", "bx", "cx", "di", "si", "8", "9", "10", "11")),
    Arch.ARM64: tuple(_arm64_register(n) for n in range(16)),
}
GOROUTINE = {Arch.AMD64: _amd64_register("14"), Arch.ARM64: _arm64_register(28)}

# Longer than any function of the runtime by far; more is a damaged or hostile function table.
_MAX_FUNCTION_SIZE = 32768


class Flow(enum.Enum):
    """How an instruction passes on control."""

    NEXT = enum.auto()
    JUMP = enum.auto()
    BRANCH = enum.auto()  # conditional: the target or the next instruction
    CALL = enum.auto()
    CALL_INDIRECT = enum.auto()
    JUMP_INDIRECT = enum.auto()
    END = enum.auto()  # return, trap


@dataclass(frozen=True, slots=True)
class Instruction:
    """A decoded instruction; ``target_vaddr`` is set for direct jumps, branches and calls."""

    vaddr: int
    code: bytes
    mnemonic: str
    operands: str
    flow: Flow
    target_vaddr: int | None

    def __str__(self) -> str:
        return f"{self.mnemonic} {self.operands}".rstrip()


def instructions(binary: Binary, function: Function) -> Sequence[Instruction]:
    """The function's instructions, in order of address. On amd64 it ends at bytes that are no instruction; on
    arm64 it steps over them, because constants may lie between the code. Raises NotTraceable."""
    return _decode(binary.arch, text(binary, function), function.vaddr)


def text(binary: Binary, function: Function) -> bytes:
    """The function's bytes. Raises NotTraceable if they aren't in the file or there are absurdly many."""
    if function.size > _MAX_FUNCTION_SIZE:
        raise NotTraceable(f"{binary.path}: damaged: {function.name} claims {function.size} bytes of code")
    return binary.read(function.vaddr, function.size)


def is_emulated(arch: Arch, code: bytes) -> bool:
    """Whether the kernel carries the instruction out itself at a uprobe, on every kernel since 5.10."""
    if arch is Arch.AMD64:
        return _amd64_emulated(code)
    return len(code) == 4 and _arm64_simulated(struct.unpack("<I", code)[0])


def written(arch: Arch, instruction: Instruction) -> set[str]:
    """Names of the registers the instruction writes, implicitly or explicitly; every argument's if
    unknown."""
    detailed = next(decoder(arch, detail=True).disasm(instruction.code, instruction.vaddr), None)
    if detailed is None:
        return set().union(*ARGUMENTS[arch], GOROUTINE[arch])
    return {detailed.reg_name(register) for register in detailed.regs_access()[1]}


_CONSTANT_MOVE = re.compile(r"(?:mov|movz|orr) (\w+), (?:[wx]zr, )?#?(0x[0-9a-f]+|\d+)$")
_ZERO_MOVE = re.compile(r"(?:xor (\w+), \1|mov (\w+), [wx]zr)$")
_COPY = re.compile(r"(?:mov|sxtw) (\w+), (\w+)$")


def constant_before(
    arch: Arch, code: Sequence[Instruction], index: int, register: Register, *, copies: int = 1
) -> int | None:
    """The constant that ``register`` holds before ``code[index]``, if one is moved there, directly or through
    ``copies`` other registers, in the same straight piece of code; else None."""
    landings = {instruction.target_vaddr for instruction in code}
    if code[index].vaddr in landings:
        return None
    for place in range(index - 1, -1, -1):
        instruction = code[place]
        if instruction.flow is not Flow.NEXT:
            return None
        if written(arch, instruction) & register:
            line = str(instruction)
            if move := _CONSTANT_MOVE.match(line):
                return int(move[2], 0) if move[1] in register else None
            if _ZERO_MOVE.match(line):
                return 0
            copy = _COPY.match(line)
            if copy and copies:
                return constant_before(arch, code, place, _register(arch, copy[2]), copies=copies - 1)
            return None
        if instruction.vaddr in landings:
            return None
    return None


def _register(arch: Arch, name: str) -> Register:
    known: Set[Register] = {*ARGUMENTS[arch], *(_arm64_register(n) for n in range(16, 29))}
    return next((register for register in known if name in register), frozenset({name}))


@lru_cache(maxsize=8)
def _decode(arch: Arch, code: bytes, vaddr: int) -> tuple[Instruction, ...]:
    flow_of = _amd64_flow if arch is Arch.AMD64 else _arm64_flow
    decoded = []
    for address, size, mnemonic, operands in decoder(arch).disasm_lite(code, vaddr):
        raw = code[address - vaddr : address - vaddr + size]
        flow, target = flow_of(raw, address)
        decoded.append(Instruction(address, raw, mnemonic, operands, flow, target))
    return tuple(decoded)


@lru_cache(maxsize=4)
def decoder(arch: Arch, detail: bool = False) -> Any:
    """A capstone decoder; with ``detail`` its instructions know their operands and registers."""
    if arch is Arch.AMD64:
        made = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    else:
        made = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
        made.skipdata = not detail
    made.detail = detail
    return made


def _amd64_emulated(code: bytes) -> bool:
    if len(code) == 1:
        return 0x50 <= code[0] <= 0x57 or code[0] == 0x90
    if len(code) == 2:
        pushes_high = code[0] == 0x41 and 0x50 <= code[1] <= 0x57
        return pushes_high or code[0] == 0xEB or 0x70 <= code[0] <= 0x7F
    if len(code) == 5:
        return code[0] in (0xE8, 0xE9)
    return len(code) == 6 and code[0] == 0x0F and 0x80 <= code[1] <= 0x8F


def _amd64_flow(code: bytes, vaddr: int) -> tuple[Flow, int | None]:
    body = code.lstrip(b"\x2e\x3e\xf2\x66")  # prefixes that don't change what a branch does
    if 0x40 <= body[0] <= 0x4F and len(body) > 1:
        body = body[1:]
    opcode, second = body[0], body[1] if len(body) > 1 else 0
    if opcode == 0x0F and 0x80 <= second <= 0x8F:
        return Flow.BRANCH, vaddr + len(code) + int.from_bytes(body[2:], "little", signed=True)
    if opcode in _AMD64_RELATIVE:
        return _AMD64_RELATIVE[opcode], vaddr + len(code) + int.from_bytes(body[1:], "little", signed=True)
    if opcode in (0xC2, 0xC3, 0xCC, 0xF4) or (opcode == 0x0F and second == 0x0B):
        return Flow.END, None  # ret, int3, hlt, ud2
    if opcode == 0xFF:
        return _AMD64_GROUP_5.get(second >> 3 & 7, Flow.NEXT), None
    return Flow.NEXT, None


_AMD64_RELATIVE = {
    0xE8: Flow.CALL,
    0xE9: Flow.JUMP,
    0xEB: Flow.JUMP,
    **dict.fromkeys((*range(0x70, 0x80), *range(0xE0, 0xE4)), Flow.BRANCH),
}
_AMD64_GROUP_5 = {
    2: Flow.CALL_INDIRECT,
    3: Flow.CALL_INDIRECT,
    4: Flow.JUMP_INDIRECT,
    5: Flow.JUMP_INDIRECT,
}


def _arm64_simulated(word: int) -> bool:
    return (
        word & 0x7C000000 == 0x14000000  # b, bl
        or word & 0xFF000010 == 0x54000000  # b.cond
        or word & 0x7C000000 == 0x34000000  # cbz, cbnz, tbz, tbnz
        or word & 0x1F000000 == 0x10000000  # adr, adrp
        or word & 0xFFFFFC1F in (0xD61F0000, 0xD63F0000, 0xD65F0000)  # br, blr, ret
    )


def signed(value: int, bits: int) -> int:
    """The two's complement value of a field of ``bits`` bits."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _arm64_flow(code: bytes, vaddr: int) -> tuple[Flow, int | None]:
    if len(code) != 4:
        return Flow.END, None
    (word,) = struct.unpack("<I", code)
    if word & 0x7C000000 == 0x14000000:
        target = vaddr + 4 * signed(word & 0x3FFFFFF, 26)
        return (Flow.CALL if word >> 31 else Flow.JUMP), target
    if word & 0xFF000010 == 0x54000000 or word & 0x7E000000 == 0x34000000:
        return Flow.BRANCH, vaddr + 4 * signed(word >> 5 & 0x7FFFF, 19)
    if word & 0x7E000000 == 0x36000000:
        return Flow.BRANCH, vaddr + 4 * signed(word >> 5 & 0x3FFF, 14)
    if word & 0xFFFFFC1F == 0xD63F0000:
        return Flow.CALL_INDIRECT, None
    if word & 0xFFFFFC1F == 0xD61F0000:
        return Flow.JUMP_INDIRECT, None
    if word & 0xFFFFFC1F == 0xD65F0000 or word & 0xFFE0001F == 0xD4200000 or word >> 16 == 0:
        return Flow.END, None  # ret, brk, udf
    return Flow.NEXT, None
