"""A function of the target, as the symbol table or the function table (pclntab) describes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Function:
    """``vaddr`` is the first instruction's address as linked, before any load bias; ``size`` is in bytes.

    From .symtab the size is the code's own; from pclntab it reaches to the next function, so it counts
    the padding between the two.
    """

    name: str
    vaddr: int
    size: int
