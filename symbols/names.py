"""Names for addresses in a binary, for as long as something is being watched."""

from types import TracebackType

from schedtrace.symbols.binary import Binary
from schedtrace.symbols.pclntab import Pclntab


class FunctionNames:
    """Names functions by address for as long as it is open; reads the table when first asked.

    Addresses are as linked: of a position-independent executable or a shared object the caller first
    subtracts the load bias (start of a mapping of the file - address as linked of what is mapped there).
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._binary: Binary | None = None
        self._table: Pclntab | None = None

    def name(self, vaddr: int) -> str | None:
        """Name of the function whose code includes ``vaddr``; None if none does. Raises NotTraceable."""
        if self._table is None:
            self._binary = Binary.open(self._path)
            self._table = Pclntab.find(self._binary)
        return self._table.name_at(vaddr)

    def close(self) -> None:
        """Let go of the file; it is opened again if a name is asked for."""
        self._table = None
        if self._binary is not None:
            self._binary.close()
            self._binary = None

    def __enter__(self) -> "FunctionNames":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
