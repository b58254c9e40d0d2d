"""Machine code of a function: where a probe is cheap and safe, what it calls, which data it names.

A uprobe replaces one instruction by a breakpoint. What the kernel then does with the replaced instruction
decides the price of a hit: some it carries out itself (x86 "emulated": ``push``, ``call``, ``jmp``,
``jcc``, one-byte ``nop``; arm64 "simulated": branches, ``adr``, ``adrp``), every other one it runs out of
line under a single step, a second trap that costs several times as much.

Which instructions those are was read from the kernel's arch/x86/kernel/uprobes.c (``branch_setup_xol_ops``,
``push_setup_xol_ops``) and arch/arm64/kernel/probes/decode-insn.c, and restricted to what every kernel
since 5.10 takes: a branch or ``nop`` with an operand-size prefix is *refused* by older ones, multi-byte
``nop`` is emulated only by new ones, and ``ldr`` of a literal was withdrawn from uprobes on arm64
(CVE-2024-50099).

Go's calling convention: the first integer arguments are in registers on both architectures (amd64 since 1.17,
arm64 since 1.18), and the goroutine the thread runs is in R14 or X28.
"""

import enum
import re
import struct
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import capstone
from capstone import x86_const

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.function import Function

# Leading integer argument registers of Go's ABI (abi-internal.md), as families of names that alias each
# other.
_ARGUMENTS = {
    Arch.AMD64: (
        ("rax", "eax", "ax", "al", "ah"),
        ("rbx", "ebx", "bx", "bl", "bh"),
        ("rcx", "ecx", "cx", "cl", "ch"),
        ("rdi", "edi", "di", "dil"),
        ("rsi", "esi", "si", "sil"),
        ("r8", "r8d", "r8w", "r8b"),
        ("r9", "r9d", "r9w", "r9b"),
        ("r10", "r10d", "r10w", "r10b"),
        ("r11", "r11d", "r11w", "r11b"),
    ),
    Arch.ARM64: tuple((f"x{n}", f"w{n}") for n in range(16)),
}
# Longer than any function of the runtime by far; more is a damaged or hostile function table.
_MAX_FUNCTION_SIZE = 65536
_GOROUTINE = {Arch.AMD64: ("r14", "r14d", "r14w", "r14b"), Arch.ARM64: ("x28", "w28")}


@dataclass(frozen=True)
class Site:
    """One instruction to probe. ``offset`` counts from the function's entry; ``emulated`` says that the
    kernel carries the instruction out itself instead of single-stepping it."""

    offset: int
    vaddr: int
    file_offset: int
    instruction: str
    emulated: bool

    def __str__(self) -> str:
        return f"+{self.offset} {self.instruction}"


@dataclass(frozen=True)
class Call:
    """A direct call: where the instruction is and where it goes."""

    vaddr: int
    target_vaddr: int


@dataclass(frozen=True)
class DataOperand:
    """A PC-relative reference to data. ``address_of`` is true where the address itself is taken (``lea``,
    ``adrp``+``add``) and false where the instruction reads or writes there."""

    vaddr: int
    target_vaddr: int
    address_of: bool


class Flow(enum.Enum):
    """How an instruction passes on control."""

    NEXT = enum.auto()
    JUMP = enum.auto()
    BRANCH = enum.auto()  # conditional: the target or the next instruction
    CALL = enum.auto()
    CALL_INDIRECT = enum.auto()
    JUMP_INDIRECT = enum.auto()
    END = enum.auto()  # return, trap


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction; ``target_vaddr`` is set for direct jumps, branches and calls."""

    vaddr: int
    code: bytes
    mnemonic: str
    operands: str
    flow: Flow
    target_vaddr: int | None

    @property
    def next_vaddr(self) -> int:
        return self.vaddr + len(self.code)

    def __str__(self) -> str:
        return f"{self.mnemonic} {self.operands}".rstrip()


def cheapest_site(
    binary: Binary, function: Function, arguments: int, *, goroutine: bool = False
) -> Site | None:
    """The instruction of ``function`` at which a probe is hit exactly once a call, cheaply, with arguments
    intact.

    ``arguments`` is how many leading argument registers must still hold the caller's values there; with
    ``goroutine`` the goroutine register must, too. Sites lie behind the stack check, because the function
    starts anew from its entry after the stack has grown. A ``call`` is probed before it is carried out.

    Returns the first emulated instruction on the straight line from the entry. Where there is none, the first
    instruction behind the stack check (the entry, if there is no check), marked ``emulated=False``: dear, yet
    counted once. None if the function's own code can't be shown to pass there once a call.
    """
    code = instructions(binary, function)
    if not code:
        return None
    watched: list[tuple[str, ...]] = list(_ARGUMENTS[binary.arch][:arguments])
    if goroutine:
        watched.append(_GOROUTINE[binary.arch])
    start = _behind_stack_check(code, function)
    landing = _landing_sites(code, function)
    if landing is None:
        return None
    for instruction in _intact_line(binary.arch, code[start:], watched):
        if is_emulated(binary.arch, instruction.code):
            # A branch back to this instruction, or to one between the stack check and it, would hit it again.
            if any(code[start].vaddr <= vaddr <= instruction.vaddr for vaddr in landing):
                break
            return _site(binary, function, instruction, emulated=True)
    if code[start].vaddr in landing:
        return None
    return _site(binary, function, code[start], emulated=False)


def call_sites(binary: Binary, function: Function) -> tuple[Call, ...]:
    """Every direct call in ``function``, in order of address."""
    return tuple(
        Call(instruction.vaddr, instruction.target_vaddr)
        for instruction in instructions(binary, function)
        if instruction.flow is Flow.CALL and instruction.target_vaddr is not None
    )


def site_of_call(binary: Binary, function: Function, call: Call) -> Site:
    """The site of one of ``function``'s calls. There the callee's arguments are in their registers, and the
    probe is hit once for each time the call is made."""
    for instruction in instructions(binary, function):
        if instruction.vaddr == call.vaddr:
            return _site(binary, function, instruction, emulated=is_emulated(binary.arch, instruction.code))
    raise ValueError(f"{function.name} has no instruction at {call.vaddr:#x}")


def constant_arguments(binary: Binary, function: Function, vaddr: int, count: int) -> tuple[int | None, ...]:
    """What the leading ``count`` argument registers hold before the instruction at ``vaddr``, where that is
    plain from a constant moved there in the same straight piece of code; None for each where it is not."""
    code = instructions(binary, function)
    index = next((i for i, instruction in enumerate(code) if instruction.vaddr == vaddr), None)
    if index is None:
        return (None,) * count
    landings = {instruction.target_vaddr for instruction in code}
    return tuple(
        _constant(binary.arch, code[: index + 1], landings, family)
        for family in _ARGUMENTS[binary.arch][:count]
    )


def data_operands(binary: Binary, function: Function) -> tuple[DataOperand, ...]:
    """Every PC-relative reference to memory in ``function``, in order of address; targets of branches are
    none.

    On arm64 an ``adrp`` is joined with the instruction that uses its register next.
    """
    if binary.arch is Arch.AMD64:
        return tuple(_amd64_data_operands(_text(binary, function), function.vaddr))
    return tuple(_arm64_data_operands(_text(binary, function), function.vaddr))


def is_emulated(arch: Arch, code: bytes) -> bool:
    """Whether the kernel carries the instruction out itself at a uprobe, on every kernel since 5.10."""
    if arch is Arch.AMD64:
        return _amd64_emulated(code)
    return _arm64_simulated(struct.unpack("<I", code)[0])


def instructions(binary: Binary, function: Function) -> Sequence[Instruction]:
    """The function's instructions, in order of address. Stops at bytes that are no instruction (amd64);
    steps over them one word at a time (arm64, where constants may lie between the code)."""
    return _decode(binary.arch, _text(binary, function), function.vaddr)


def _text(binary: Binary, function: Function) -> bytes:
    if function.size > _MAX_FUNCTION_SIZE:
        raise NotTraceable(f"{binary.path}: damaged: {function.name} claims {function.size} bytes of code")
    return binary.read(function.vaddr, function.size)


@lru_cache(maxsize=256)
def _decode(arch: Arch, code: bytes, vaddr: int) -> tuple[Instruction, ...]:
    flow_of = _amd64_flow if arch is Arch.AMD64 else _arm64_flow
    decoded = []
    for address, size, mnemonic, operands in _decoder(arch).disasm_lite(code, vaddr):
        raw = code[address - vaddr : address - vaddr + size]
        flow, target = flow_of(raw, address)
        decoded.append(Instruction(address, raw, mnemonic, operands, flow, target))
    return tuple(decoded)


@lru_cache(maxsize=4)
def _decoder(arch: Arch, detail: bool = False) -> Any:
    if arch is Arch.AMD64:
        decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    else:
        decoder = capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM)
        decoder.skipdata = not detail
    decoder.detail = detail
    return decoder


def _site(binary: Binary, function: Function, instruction: Instruction, *, emulated: bool) -> Site:
    return Site(
        offset=instruction.vaddr - function.vaddr,
        vaddr=instruction.vaddr,
        file_offset=binary.file_offset(instruction.vaddr),
        instruction=str(instruction),
        emulated=emulated,
    )


def _is_stack_growth(code: Sequence[Instruction], function: Function, branch: Instruction) -> bool:
    """Whether ``branch`` leads to the block that saves the arguments, calls morestack and starts the
    function anew."""
    called = False
    for instruction in code:
        if branch.target_vaddr is None or instruction.vaddr < branch.target_vaddr:
            continue
        if instruction.flow is Flow.CALL:
            if called:
                return False
            called = True
        elif instruction.flow is Flow.JUMP:
            return called and instruction.target_vaddr == function.vaddr
        elif instruction.flow is not Flow.NEXT:
            return False
    return False


def _behind_stack_check(code: Sequence[Instruction], function: Function) -> int:
    """Index of the first instruction behind the stack check; 0 if the function has none."""
    behind = 0
    for index, instruction in enumerate(code[:24]):
        if instruction.flow is Flow.BRANCH:
            if not _is_stack_growth(code, function, instruction):
                break
            behind = index + 1
        elif instruction.flow is not Flow.NEXT:
            break
    return behind if behind < len(code) else 0


def _landing_sites(code: Sequence[Instruction], function: Function) -> frozenset[int] | None:
    """Addresses inside the function that its own jumps reach, without the restart after stack growth.

    None if an indirect jump hides where it goes (Go makes one from a large ``switch``).
    """
    targets = set()
    for index, instruction in enumerate(code):
        if instruction.flow is Flow.JUMP_INDIRECT:
            return None
        if instruction.flow not in (Flow.JUMP, Flow.BRANCH) or instruction.target_vaddr is None:
            continue
        restart = instruction.target_vaddr == function.vaddr and _follows_call(code, index)
        if not restart:
            targets.add(instruction.target_vaddr)
    return frozenset(targets)


def _follows_call(code: Sequence[Instruction], index: int) -> bool:
    """Whether only reloads of registers lie between a call and the jump at ``index``: the end of stack
    growth."""
    for instruction in reversed(code[:index]):
        if instruction.flow is Flow.CALL:
            return True
        if instruction.flow is not Flow.NEXT:
            return False
    return False


def _intact_line(
    arch: Arch, code: Sequence[Instruction], watched: Sequence[tuple[str, ...]]
) -> Iterator[Instruction]:
    """The straight line of ``code``, each instruction yielded before it is carried out, until a watched
    register is overwritten, control may leave the line, or a load-exclusive opens a region that must not be
    interrupted."""
    names = {name for family in watched for name in family}
    for instruction in code:
        if instruction.mnemonic.startswith(("ldx", "ldax")) and arch is Arch.ARM64:
            return
        yield instruction
        if instruction.flow is not Flow.NEXT or _written(arch, instruction) & names:
            return


def _written(arch: Arch, instruction: Instruction) -> set[str]:
    """Names of the registers the instruction writes, implicitly or explicitly."""
    detailed = next(_decoder(arch, detail=True).disasm(instruction.code, instruction.vaddr), None)
    if detailed is None:
        return {name for family in _ARGUMENTS[arch] for name in family} | set(_GOROUTINE[arch])
    return {detailed.reg_name(register) for register in detailed.regs_access()[1]}


_CONSTANT_MOVE = re.compile(r"(?:mov|movz|orr) (\w+), (?:[wx]zr, )?#?(0x[0-9a-f]+|\d+)$")
_ZEROED = re.compile(r"(?:xor (\w+), \1|mov (\w+), [wx]zr)$")


def _constant(
    arch: Arch, code: Sequence[Instruction], landings: Set[int | None], family: tuple[str, ...]
) -> int | None:
    *before, last = code
    if last.vaddr in landings:
        return None
    for instruction in reversed(before):
        if instruction.flow is not Flow.NEXT:
            return None
        if _written(arch, instruction) & set(family):
            text = str(instruction)
            if move := _CONSTANT_MOVE.match(text):
                return int(move[2], 0) if move[1] in family else None
            return 0 if _ZEROED.match(text) else None
        if instruction.vaddr in landings:
            return None
    return None


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
    after = vaddr + len(code)
    opcode = body[0] if body else 0
    if opcode == 0xEB or 0x70 <= opcode <= 0x7F or 0xE0 <= opcode <= 0xE3:
        target = after + int.from_bytes(body[1:2], "little", signed=True)
        return (Flow.JUMP if opcode == 0xEB else Flow.BRANCH), target
    if opcode in (0xE8, 0xE9):
        target = after + int.from_bytes(body[1:5], "little", signed=True)
        return (Flow.CALL if opcode == 0xE8 else Flow.JUMP), target
    if opcode == 0x0F and len(body) > 1:
        if 0x80 <= body[1] <= 0x8F:
            return Flow.BRANCH, after + int.from_bytes(body[2:6], "little", signed=True)
        return (Flow.END if body[1] == 0x0B else Flow.NEXT), None  # ud2
    if opcode in (0xC2, 0xC3, 0xCC, 0xF4):
        return Flow.END, None
    if 0x40 <= opcode <= 0x4F and len(body) > 1:
        body = body[1:]
    if body[0] == 0xFF and len(body) > 1:
        group = body[1] >> 3 & 7
        if group in (2, 3):
            return Flow.CALL_INDIRECT, None
        if group in (4, 5):
            return Flow.JUMP_INDIRECT, None
    return Flow.NEXT, None


def _amd64_data_operands(code: bytes, vaddr: int) -> Iterator[DataOperand]:
    for instruction in _decoder(Arch.AMD64, detail=True).disasm(code, vaddr):
        for operand in instruction.operands:
            if operand.type == x86_const.X86_OP_MEM and operand.mem.base == x86_const.X86_REG_RIP:
                target = instruction.address + instruction.size + operand.mem.disp
                yield DataOperand(instruction.address, target, instruction.id == x86_const.X86_INS_LEA)


def _arm64_simulated(word: int) -> bool:
    return (
        word & 0x7C000000 == 0x14000000  # b, bl
        or word & 0xFF000010 == 0x54000000  # b.cond
        or word & 0x7C000000 == 0x34000000  # cbz, cbnz, tbz, tbnz
        or word & 0x1F000000 == 0x10000000  # adr, adrp
        or word & 0xFFFFFC1F in (0xD61F0000, 0xD63F0000, 0xD65F0000)  # br, blr, ret
    )


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _arm64_flow(code: bytes, vaddr: int) -> tuple[Flow, int | None]:
    if len(code) != 4:
        return Flow.END, None
    (word,) = struct.unpack("<I", code)
    if word & 0x7C000000 == 0x14000000:
        target = vaddr + 4 * _signed(word & 0x3FFFFFF, 26)
        return (Flow.CALL if word >> 31 else Flow.JUMP), target
    if word & 0xFF000010 == 0x54000000 or word & 0x7E000000 == 0x34000000:
        return Flow.BRANCH, vaddr + 4 * _signed(word >> 5 & 0x7FFFF, 19)
    if word & 0x7E000000 == 0x36000000:
        return Flow.BRANCH, vaddr + 4 * _signed(word >> 5 & 0x3FFF, 14)
    if word & 0xFFFFFC1F == 0xD63F0000:
        return Flow.CALL_INDIRECT, None
    if word & 0xFFFFFC1F == 0xD61F0000:
        return Flow.JUMP_INDIRECT, None
    if word & 0xFFFFFC1F == 0xD65F0000 or word & 0xFFE0001F == 0xD4200000 or word >> 16 == 0:
        return Flow.END, None  # ret, brk, udf
    return Flow.NEXT, None


def _arm64_data_operands(code: bytes, vaddr: int) -> Iterator[DataOperand]:
    # Go's linker relocates an adrp together with the instruction behind it, so the two are always neighbours.
    words = [word for (word,) in struct.iter_unpack("<I", code[: len(code) & ~3])]
    for index, (first, second) in enumerate(pairwise(words)):
        if first & 0x9F000000 != 0x90000000 or first & 31 != second >> 5 & 31:
            continue
        address = vaddr + 4 * index
        page = (address & ~0xFFF) + (_signed((first >> 5 & 0x7FFFF) << 2 | first >> 29 & 3, 21) << 12)
        immediate = second >> 10 & 0xFFF
        if second & 0xFF800000 == 0x91000000:  # add, 64-bit, immediate
            shift = 12 if second >> 22 & 1 else 0
            yield DataOperand(address + 4, page + (immediate << shift), True)
        elif (
            second & 0x3B000000 == 0x39000000
        ):  # ldr, str with an unsigned immediate, scaled by the access size
            scale = second >> 30 | (4 if second >> 26 & 1 and second >> 23 & 1 else 0)
            yield DataOperand(address + 4, page + (immediate << scale), False)
