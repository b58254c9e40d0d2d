"""The text of the BPF programs as BCC is given it, and in it the check that both sides have the same structs. Pure but
for reading bpf/."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from schedtrace import abi, bpf

FOLDER = Path(next(iter(bpf.__path__)))
PROBE = "on_probe"
"""The program for all kinds of probes but those that need one of their own."""
RECORD = "on_record"
"""The program of the sampled level."""
_OWN_PROGRAMS = {
    abi.ProbeKind.READY_LIST: "on_ready_list",
    abi.ProbeKind.COROUTINE_SWITCH: "on_coroutine_switch",
    abi.ProbeKind.RECORD: RECORD,
}
OPTIONAL_PROGRAMS = frozenset({"on_ready_list", RECORD})
"""Those that are compiled only if they are asked for: they cost time, and few need them."""
DIFFERENT_TYPES = "bpf/types.h and abi.py are of different versions: install schedtrace anew"


def program_of(kind: abi.ProbeKind) -> str:
    """The BPF function for probes of that kind."""
    return _OWN_PROGRAMS.get(kind, PROBE)


def all_programs() -> tuple[str, ...]:
    """The BPF functions for uprobes."""
    return (PROBE, *_OWN_PROGRAMS.values())


def source_text() -> str:
    """The programs as one text, local includes put in their places.

    BCC rewrites map accesses and tracepoint arguments in the main file only, so that headers with code must be in it.
    #line keeps the compiler's messages pointing at the files.
    """
    included: set[str] = set()

    def expand(name: str) -> Iterator[str]:
        yield f'#line 1 "{name}"'
        for number, line in enumerate((FOLDER / name).read_text().splitlines(), 1):
            include = re.match(r'#include "(\w+\.h)"', line)
            if not include:
                yield line
            elif include[1] not in included:
                included.add(include[1])
                yield from expand(include[1])
                yield f'#line {number + 1} "{name}"'

    return "\n".join(expand("schedtrace.c")) + "\n" + shared_type_assertions()


def shared_type_assertions() -> str:
    """C that compiles only if types.h is what :mod:`schedtrace.abi` says, struct by struct, field by field."""
    lines = []
    for name, twin in abi.STRUCTS.items():
        lines.append(_assertion(f"sizeof(struct {name})", ctypes.sizeof(twin)))
        for field, *_ in twin._fields_:
            place = getattr(twin, field)
            lines.append(_assertion(f"__builtin_offsetof(struct {name}, {field})", place.offset))
            lines.append(_assertion(f"sizeof(((struct {name} *)0)->{field})", place.size))
    for prefix, enumeration in abi.ENUMS.values():
        lines += [_assertion(prefix + member.name, member.value) for member in enumeration]
    return "\n".join(lines) + "\n"


def _assertion(expression: str, value: int) -> str:
    return f'_Static_assert({expression} == {value}, "{DIFFERENT_TYPES}");'
