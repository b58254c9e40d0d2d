"""The names that the runtime itself gives to why a goroutine waits: its table ``waitReasonStrings``.

The numbers are renumbered between versions (last in 1.26), so that the target's own table beats any list of
ours. It is an array of Go strings {pointer, length}. With a symbol table it is found by name. Without one,
through ``waitReason.String`` (runtime/runtime2.go), whose code compares its argument with the number of
entries and names two data addresses: the text "unknown wait reason", then the table.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import data_operands
from schedtrace.symbols.function import Function
from schedtrace.symbols.instructions import instructions
from schedtrace.symbols.symtab import Symtab

WAIT_REASON_STRING = "runtime.waitReason.String"
_WAIT_TABLE = "runtime.waitReasonStrings"
_STOP_TABLE = "runtime.stwReasonStrings"
_STRING_SIZE = 16
_MIN_REASONS, _MAX_REASONS = 20, 128
_MAX_LENGTH = 64
# Present in every version from 1.17 to 1.27, under differing numbers.
_ANCHORS = frozenset({"select", "chan receive", "chan send", "sleep", "IO wait", "GC worker (idle)"})
_IMMEDIATE = re.compile(r"#?(0x[0-9a-f]+|\d+)$")

FindFunctions = Callable[[Iterable[str]], Mapping[str, Function]]


def read_wait_reasons(binary: Binary, symtab: Symtab | None, functions: FindFunctions) -> tuple[str, ...]:
    """The wait reasons by number, "" for the first; empty if the table can't be found or looks wrong.

    ``functions`` finds functions by name and is used where ``symtab`` doesn't have the table.
    """
    place = symtab.data_named([_WAIT_TABLE]).get(_WAIT_TABLE) if symtab else None
    try:
        if place is not None:
            vaddr, count = place[0], place[1] // _STRING_SIZE
        else:
            found = _through_code(binary, functions([WAIT_REASON_STRING]).get(WAIT_REASON_STRING))
            if found is None:
                return ()
            vaddr, count = found
        if not _MIN_REASONS <= count <= _MAX_REASONS:
            return ()
        reasons = _strings(binary, vaddr, count)
    except NotTraceable:
        return ()
    return reasons if reasons[0] == "" and set(reasons) >= _ANCHORS and all(reasons[1:]) else ()


def read_stop_reasons(binary: Binary, symtab: Symtab | None) -> tuple[str, ...]:
    """Reasons for stopping the world by number (1.21 and later); empty where no symbol says where they
    are."""
    place = symtab.data_named([_STOP_TABLE]).get(_STOP_TABLE) if symtab else None
    if place is None or place[1] // _STRING_SIZE > _MAX_REASONS:
        return ()
    try:
        return _strings(binary, place[0], place[1] // _STRING_SIZE)
    except NotTraceable:
        return ()


def _through_code(binary: Binary, function: Function | None) -> tuple[int, int] | None:
    """Address and length of the table that ``waitReason.String`` indexes."""
    if function is None:
        return None
    addresses = [operand.target_vaddr for operand in data_operands(binary, function) if operand.address_of]
    bounds = [
        int(immediate[1], 0)
        for instruction in instructions(binary, function)
        if instruction.mnemonic == "cmp" and (immediate := _IMMEDIATE.search(instruction.operands))
    ]
    if len(addresses) != 2 or not bounds:
        return None
    return addresses[1], bounds[0]


def _strings(binary: Binary, vaddr: int, count: int) -> tuple[str, ...]:
    strings = []
    for entry in range(vaddr, vaddr + count * _STRING_SIZE, _STRING_SIZE):
        pointer, length = binary.pointer(entry), int.from_bytes(binary.view(entry + 8, 8), "little")
        if length > _MAX_LENGTH:
            raise NotTraceable(f"{binary.path}: a reason of {length} bytes")
        text = binary.read(pointer, length).decode("ascii", "replace") if length else ""
        if not text.isascii() or not text.isprintable():
            raise NotTraceable(f"{binary.path}: a reason that is no text")
        strings.append(text)
    return tuple(strings)
