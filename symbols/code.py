"""Where in a function a probe is cheap and hit exactly once, what the function calls, which data it names.

What makes an instruction cheap to probe: :mod:`schedtrace.symbols.instructions`.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.function import Function
from schedtrace.symbols.instructions import (
    ARGUMENTS,
    GOROUTINE,
    Flow,
    Instruction,
    Register,
    constant_before,
    decoder,
    instructions,
    is_emulated,
    signed,
    text,
    written,
)

_DISPLACEMENT = re.compile(r"\[(?!rip)\w+(?: \+|, #)\s?(0x[0-9a-f]+|\d+)\]")
_AMD64_RELATIVE_OPERAND = re.compile(r"\[rip(?: ([+-]) (0x[0-9a-f]+|\d+))?\]")
# The stack check is at most this many instructions from the entry.
_PROLOGUE_INSTRUCTIONS = 24
_PIECE_SIZE = 4 << 20  # bytes of code that are searched at once


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


def cheapest_site(binary: Binary, function: Function, arguments: int, *, goroutine: bool = False) -> Site | None:
    """The instruction of ``function`` at which a probe is hit exactly once a call, with its arguments intact.

    ``arguments`` is how many leading argument registers must still hold the caller's values there; with
    ``goroutine`` the goroutine register must, too. Sites lie behind the stack check, because the function
    starts anew from its entry after the stack has grown. A ``call`` is probed before it is carried out.

    Returns the first emulated instruction on the straight line from the entry. Where there is none, the first
    instruction behind the stack check (the entry, if there is no check), marked ``emulated=False``: dear, yet
    counted once. None if the function's own code can't be shown to pass there once a call.
    """
    code = instructions(binary, function)
    watched: list[Register] = list(ARGUMENTS[binary.arch][:arguments])
    if goroutine:
        watched.append(GOROUTINE[binary.arch])
    start = _behind_stack_check(code, function)
    return _cheapest(binary, function, start, frozenset().union(*watched))


def site_behind_call(binary: Binary, function: Function, call: Call) -> Site | None:
    """The cheapest instruction behind one of ``function``'s calls at which the callee's first result is
    still in its register, the same as that of the first argument; hit once for each time the call
    returns."""
    places = [place for place, instruction in enumerate(instructions(binary, function), start=1)
              if instruction.vaddr == call.vaddr]  # fmt: skip
    return _cheapest(binary, function, places[0], ARGUMENTS[binary.arch][0]) if places else None


def call_sites(binary: Binary, function: Function) -> tuple[Call, ...]:
    """Every direct call in ``function``, in order of address."""
    return tuple(
        Call(instruction.vaddr, instruction.target_vaddr)
        for instruction in instructions(binary, function)
        if instruction.flow is Flow.CALL and instruction.target_vaddr is not None
    )


def calls_in(binary: Binary, start: int, end: int, target: int) -> Iterator[int]:
    """Addresses of the direct calls of ``target`` in the code from ``start`` up to ``end``."""
    for vaddr in range(start, end, _PIECE_SIZE):
        if binary.arch is Arch.ARM64:
            words = np.frombuffer(binary.view(vaddr, min(_PIECE_SIZE, end - vaddr) & ~3), "<u4")
            places = np.flatnonzero((words & 0xFC000000) == 0x94000000)
            relative = ((words[places] & 0x3FFFFFF).astype(np.int64) ^ 0x2000000) - 0x2000000
            hits = 4 * places[vaddr + 4 * (places + relative) == target]
        else:
            content = np.frombuffer(binary.view(vaddr, min(_PIECE_SIZE + 4, end - vaddr)), np.uint8)
            places = np.flatnonzero(content[:-4] == 0xE8)
            relative = np.zeros(len(places), np.int64)
            for byte in range(4):
                relative |= content[places + 1 + byte].astype(np.int64) << (8 * byte)
            relative = (relative ^ 0x80000000) - 0x80000000
            hits = places[vaddr + places + 5 + relative == target]
        yield from (vaddr + place for place in hits.tolist())


def site_of_call(binary: Binary, function: Function, call: Call, callee: str) -> Site:
    """The site of one of ``function``'s calls, of the function named ``callee``. There the callee's
    arguments are in their registers, and a probe is hit once for each time the call is made. Raises
    NotTraceable if no instruction starts there."""
    for instruction in instructions(binary, function):
        if instruction.vaddr == call.vaddr:
            site = _site(binary, function, instruction)
            return replace(site, instruction=f"{instruction.mnemonic} {callee}")
    raise NotTraceable(f"{binary.path}: damaged: {function.name} has no instruction at {call.vaddr:#x}")


def constant_arguments(binary: Binary, function: Function, call: Call, count: int) -> tuple[int | None, ...]:
    """The leading ``count`` arguments of ``call``, each where the code moves a constant into its register
    shortly before; None for the others."""
    code = instructions(binary, function)
    for index, instruction in enumerate(code):
        if instruction.vaddr == call.vaddr:
            registers = ARGUMENTS[binary.arch][:count]
            return tuple(constant_before(binary.arch, code, index, register) for register in registers)
    return (None,) * count


def data_operands(binary: Binary, function: Function) -> tuple[DataOperand, ...]:
    """Every PC-relative reference to memory in ``function``, in order of address; targets of jumps are
    none."""
    find = _amd64_data_operands if binary.arch is Arch.AMD64 else _arm64_data_operands
    return tuple(find(text(binary, function), function.vaddr))


def displacements(binary: Binary, function: Function) -> frozenset[int]:
    """The constants that instructions of ``function`` add to a register to form an address: offsets of fields, and of
    places on the stack."""
    found = (_DISPLACEMENT.search(instruction.operands) for instruction in instructions(binary, function))
    return frozenset(int(match[1], 0) for match in found if match)


def _cheapest(binary: Binary, function: Function, start: int, watched: Register) -> Site | None:
    """From the instruction of index ``start`` on, the first emulated one that is passed as often as that
    one, with ``watched`` registers unchanged; else that one; None if the function's own jumps lead there,
    too."""
    code = instructions(binary, function)
    landings = _landings(code, function)
    if start >= len(code) or landings is None:
        return None
    for instruction in _intact_line(binary.arch, code[start:], watched):
        if is_emulated(binary.arch, instruction.code):
            if any(code[start].vaddr <= vaddr <= instruction.vaddr for vaddr in landings):
                break
            return _site(binary, function, instruction)
    return None if code[start].vaddr in landings else _site(binary, function, code[start])


def _site(binary: Binary, function: Function, instruction: Instruction) -> Site:
    return Site(
        offset=instruction.vaddr - function.vaddr,
        vaddr=instruction.vaddr,
        file_offset=binary.file_offset(instruction.vaddr),
        instruction=str(instruction),
        emulated=is_emulated(binary.arch, instruction.code),
    )


def _is_stack_growth(code: Sequence[Instruction], function: Function, branch: Instruction) -> bool:
    """Whether ``branch`` leads to where arguments are saved, morestack called and the function started
    anew."""
    called = False
    for instruction in code:
        if branch.target_vaddr is None or instruction.vaddr < branch.target_vaddr:
            continue
        if instruction.flow is Flow.CALL and not called:
            called = True
        elif instruction.flow is Flow.JUMP:
            return called and instruction.target_vaddr == function.vaddr
        elif instruction.flow is not Flow.NEXT:
            return False
    return False


def _behind_stack_check(code: Sequence[Instruction], function: Function) -> int:
    """Index of the first instruction behind the stack check; 0 if the function has none."""
    behind = 0
    for index, instruction in enumerate(code[:_PROLOGUE_INSTRUCTIONS]):
        if instruction.flow is Flow.BRANCH and _is_stack_growth(code, function, instruction):
            behind = index + 1  # a large frame has two checks
        elif instruction.flow is not Flow.NEXT:
            break
    return behind if behind < len(code) else 0


def _landings(code: Sequence[Instruction], function: Function) -> frozenset[int] | None:
    """Addresses that the function's own jumps lead to, without the start anew after stack growth.

    None if an indirect jump hides where it goes (Go makes one from a large ``switch``).
    """
    targets = set()
    for index, instruction in enumerate(code):
        if instruction.flow is Flow.JUMP_INDIRECT:
            return None
        if instruction.flow in (Flow.JUMP, Flow.BRANCH) and instruction.target_vaddr is not None:
            anew = instruction.target_vaddr == function.vaddr and _follows_call(code, index)
            if not anew:
                targets.add(instruction.target_vaddr)
    return frozenset(targets)


def _follows_call(code: Sequence[Instruction], index: int) -> bool:
    """Whether only reloads of registers lie between a call and the jump at ``index``: the end of stack
    growth.

    No loop looks like this: a function that calls another has a prologue, which a loop does not repeat.
    """
    for instruction in reversed(code[:index]):
        if instruction.flow is not Flow.NEXT:
            return instruction.flow is Flow.CALL
    return False


def _intact_line(arch: Arch, code: Sequence[Instruction], watched: Register) -> Iterator[Instruction]:
    """The straight line of ``code``, each instruction yielded before it is carried out, until a watched
    register is overwritten, control may leave the line, or (arm64) a load-exclusive opens a region in which
    a trap would make the store fail for ever."""
    for instruction in code:
        if arch is Arch.ARM64 and instruction.mnemonic.startswith(("ldx", "ldax")):
            return
        yield instruction
        if instruction.flow is not Flow.NEXT or written(arch, instruction) & watched:
            return


def _amd64_data_operands(code: bytes, vaddr: int) -> Iterator[DataOperand]:
    # From the instruction's text: takes a third of the time that asking for its operands does.
    for address, size, mnemonic, operands in decoder(Arch.AMD64).disasm_lite(code, vaddr):
        if "[rip" in operands and (relative := _AMD64_RELATIVE_OPERAND.search(operands)):
            distance = int(relative[2] or "0", 0)
            target = address + size + (-distance if relative[1] == "-" else distance)
            yield DataOperand(address, target, mnemonic == "lea")


def _arm64_data_operands(code: bytes, vaddr: int) -> Iterator[DataOperand]:
    # Go's linker relocates an adrp together with the instruction behind it, so the two are always neighbours.
    words = [word for (word,) in struct.iter_unpack("<I", code[: len(code) & ~3])]
    for index, (first, second) in enumerate(pairwise(words)):
        if first & 0x9F000000 != 0x90000000 or first & 31 != second >> 5 & 31:
            continue
        address = vaddr + 4 * index
        page = (address & ~0xFFF) + (signed((first >> 5 & 0x7FFFF) << 2 | first >> 29 & 3, 21) << 12)
        immediate = second >> 10 & 0xFFF
        if second & 0xFF800000 == 0x91000000:  # add, 64-bit, immediate
            shift = 12 if second >> 22 & 1 else 0
            yield DataOperand(address + 4, page + (immediate << shift), True)
        elif second & 0x3B000000 == 0x39000000:  # ldr, str: unsigned immediate, scaled by the size of access
            scale = second >> 30 | (4 if second >> 26 & 1 and second >> 23 & 1 else 0)
            yield DataOperand(address + 4, page + (immediate << scale), False)
