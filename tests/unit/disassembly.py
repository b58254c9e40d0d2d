"""The runtime's functions as disassemblers print them that this project has no part in.

GNU objdump for amd64. For arm64 Go's own, because a Debian for amd64 has no other in its smaller packages.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools import toolchains


@dataclass(frozen=True)
class Line:
    """One instruction as a disassembler prints it."""

    vaddr: int
    mnemonic: str
    operands: str


@cache
def disassembly(path: Path, arch: str) -> dict[str, list[Line]]:
    """The runtime's functions, without "runtime.", as the oracle of that architecture prints them."""
    return dict(gnu_objdump(path) if arch == "amd64" else go_objdump(path))


def gnu_objdump(path: Path) -> Iterator[tuple[str, list[Line]]]:
    text = toolchains.run(["objdump", "-d", "--no-show-raw-insn", "-M", "intel", path], what="disassemble")
    for block in text.split("\n\n"):
        head, _, body = block.strip().partition("\n")
        if named := re.match(r"[0-9a-f]+ <runtime\.(.*)>:$", head):
            lines = (re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*?)\s*(?:#.*)?$", line) for line in body.split("\n"))
            yield named[1], [Line(int(m[1], 16), m[2], m[3]) for m in lines if m]


def go_objdump(path: Path) -> Iterator[tuple[str, list[Line]]]:
    text = toolchains.run([toolchains.go_tool("objdump"), "-s", r"^runtime\.", path], what="disassemble")
    for block in text.split("\n\n"):
        head, _, body = block.strip().partition("\n")
        if named := re.match(r"TEXT runtime\.(\S*?)\(SB\)", head):
            fields = (line.split("\t") for line in body.split("\n") if "\t" in line)
            parts = [[part.strip() for part in line if part.strip()] for line in fields]
            yield named[1], [Line(int(p[1], 16), *split_instruction(p[3])) for p in parts if len(p) > 3]


def split_instruction(text: str) -> tuple[str, str]:
    mnemonic, _, operands = text.partition(" ")
    return mnemonic, operands


def is_direct_call(line: Line) -> bool:
    """Whether it is a call of an address, and not through a register or memory."""
    return line.mnemonic in ("call", "CALL") and not re.search(r"\[|\(R\d+\)$|^r[a-z0-9]+$", line.operands)


def callee(line: Line) -> str:
    """The function that a direct call goes to, without "runtime."."""
    name = re.search(r"<runtime\.([^>]*)>|^runtime\.(.*)\(SB\)$", line.operands)
    return (name[1] or name[2]) if name else ""


def target(line: Line) -> int:
    """Where a branch goes."""
    words = re.search(r"(-?\d+)\(PC\)$", line.operands)
    return line.vaddr + 4 * int(words[1]) if words else int(line.operands.split()[0], 16)
