"""Names for addresses in a binary, for as long as something is being watched."""

import re
from types import TracebackType

from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import call_sites
from schedtrace.symbols.function import Function
from schedtrace.symbols.pclntab import Pclntab

# What the compiler makes of "go f(x)": a closure that holds the arguments (gowrap from 1.22, dwrap in 1.17; in between
# such closures have the names of those that people write, and keep them here).
_GO_STATEMENT = re.compile(r"\.(gowrap|dwrap[.·]?)\d+$")
# A prologue may call these; the others in the runtime can be what a go statement started.
_NOT_STARTED = re.compile(r"runtime\.(morestack|gcWriteBarrier|wbZero|wbMove|panic|duff|memmove|typedmemmove)")


class FunctionNames:
    """Names functions by address for as long as it is open; reads the table when first asked.

    A goroutine started by ``go f(x)`` begins in a closure that the compiler made and that only calls f: it goes by the
    name of f, unless f was inlined there or it isn't plain which of the calls is meant.

    Addresses are as linked: of a position-independent executable or a shared object the caller first
    subtracts the load bias (start of a mapping of the file - address as linked of what is mapped there).
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._binary: Binary | None = None
        self._table: Pclntab | None = None
        self._started: dict[str, str] = {}

    def name(self, vaddr: int) -> str | None:
        """Name of the function whose code includes ``vaddr``; None if none does. Raises NotTraceable."""
        if self._table is None:
            self._binary = Binary.open(self._path)
            self._table = Pclntab.find(self._binary)
        function = self._table.function_at(vaddr)
        if function is None:
            return None
        if function.name not in self._started:
            self._started[function.name] = self._started_by(function) or function.name
        return self._started[function.name]

    def _started_by(self, function: Function) -> str | None:
        """The one function that a go statement's closure calls."""
        if not _GO_STATEMENT.search(function.name) or self._binary is None or self._table is None:
            return None
        called = {self._table.name_at(call.target_vaddr) for call in call_sites(self._binary, function)}
        names = [name for name in called if name and not _NOT_STARTED.match(name)]
        return names[0] if len(names) == 1 else None

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
