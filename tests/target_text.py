"""The machine code of a running program, compared with its file: what a uprobe changes, and must give back."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elftools.elf.constants import P_FLAGS
from elftools.elf.elffile import ELFFile

# What the kernel writes where a uprobe is: int3, and on arm64 a brk of its own (BRK64_OPCODE_UPROBES).
BREAKPOINTS = {"x86_64": b"\xcc", "aarch64": (0xD4200000 | 5 << 5).to_bytes(4, "little")}


@dataclass(frozen=True)
class TargetText:
    """The executable segments of process ``pid``: addresses in its memory and the bytes that belong there."""

    pid: int
    segments: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, pid: int, program: Path, bias: int = 0) -> Self:
        """The text of ``program`` as process ``pid`` runs it, ``bias`` bytes from where it was linked."""
        with program.open("rb") as file:
            segments = [
                (bias + header["p_vaddr"], segment.data())
                for segment in ELFFile(file).iter_segments("PT_LOAD")
                if (header := segment.header)["p_flags"] & P_FLAGS.PF_X
            ]
        assert segments
        return cls(pid, tuple(segments))

    def differences(self) -> dict[int, bytes]:
        """Where memory differs from the file: address -> the bytes in memory, as long as a breakpoint is."""
        breakpoint_bytes = BREAKPOINTS[os.uname().machine]
        size = len(breakpoint_bytes)
        found: dict[int, bytes] = {}
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            for address, expected in self.segments:
                memory.seek(address)
                actual = memory.read(len(expected))
                assert len(actual) == len(expected)
                if actual != expected:
                    found |= {
                        address + i: actual[i : i + size]
                        for i in range(0, len(expected), size)
                        if actual[i : i + size] != expected[i : i + size]
                    }
        return found

    def breakpoints(self) -> set[int]:
        """Where breakpoints are. Every difference must be one."""
        differences = self.differences()
        assert set(differences.values()) <= {BREAKPOINTS[os.uname().machine]}, differences
        return set(differences)
