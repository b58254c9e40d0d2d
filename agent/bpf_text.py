"""The text of the BPF programs as BCC is given it, and the check that BCC understood the shared structs. Pure but for
reading bpf/."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def all_programs(folder: Path) -> tuple[str, ...]:
    """The BPF functions for uprobes: those that are compiled only when asked for."""
    return tuple(re.findall(r"(?m)^int (on_\w+)\(struct pt_regs", (folder / "schedtrace.c").read_text()))


def source_text(folder: Path) -> str:
    """The programs as one text, local includes put in their places.

    BCC rewrites map accesses and tracepoint arguments in the main file only, so that headers with code must be in it.
    #line keeps the compiler's messages pointing at the files.
    """
    included: set[str] = set()

    def expand(name: str) -> Iterator[str]:
        yield f'#line 1 "{name}"'
        for number, line in enumerate((folder / name).read_text().splitlines(), 1):
            include = re.match(r'#include "(\w+\.h)"', line)
            if not include:
                yield line
            elif include[1] not in included:
                included.add(include[1])
                yield from expand(include[1])
                yield f'#line {number + 1} "{name}"'

    return "\n".join(expand("schedtrace.c")) + "\n"


def struct_difference(derived: Any, ours: Any, name: str = "") -> str:
    """Where two ctypes types differ in size, field names or offsets; empty if they don't."""
    if ctypes.sizeof(derived) != ctypes.sizeof(ours):
        return f"{name or 'size'}: {ctypes.sizeof(derived)} bytes, expected {ctypes.sizeof(ours)}"
    if hasattr(ours, "_length_"):
        return struct_difference(derived._type_, ours._type_, name)
    if not hasattr(ours, "_fields_"):
        return ""
    theirs = [field[0] for field in derived._fields_]
    expected = [field[0] for field in ours._fields_]
    if theirs != expected:
        return f"{name or 'fields'}: {theirs}, expected {expected}"
    for (field, kind), (_, wanted) in zip(derived._fields_, ours._fields_, strict=True):
        if getattr(derived, field).offset != getattr(ours, field).offset:
            return f"{name}.{field}: offset {getattr(derived, field).offset}"
        difference = struct_difference(kind, wanted, f"{name}.{field}")
        if difference:
            return difference
    return ""
