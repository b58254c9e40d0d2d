"""Why a file without a Go function table has none: packed, another compiler's, or simply no Go."""

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.relocations import dynamic_entries

_UPX_MARK = (
    b"UPX!"  # in the loader's record behind the program headers, and again in the last bytes of the file
)
_EDGE_BYTES = 4096
_DT_STRTAB, _DT_STRSZ = 5, 10
_MAX_STRINGS = 1 << 20


def why_not_go(binary: Binary) -> str:
    """One line: the reason and, where there is something to do, what."""
    if any(_UPX_MARK in edge for edge in binary.edge(_EDGE_BYTES)):
        return "packed with UPX: its code exists only in memory, where no probe can reach; run it unpacked (upx -d)"
    if ".go_export" in binary.sections or _needs_libgo(binary):
        return "built with gccgo (libgo.so), which has another runtime; build it with the go command's own compiler"
    return "not a Go program: no Go function table (pclntab) in it"


def _needs_libgo(binary: Binary) -> bool:
    strings = dynamic_entries(binary.dynamic())
    start, size = strings.get(_DT_STRTAB, 0), strings.get(_DT_STRSZ, 0)
    try:
        return b"\0libgo.so." in binary.read(start, min(size, _MAX_STRINGS))
    except NotTraceable:
        return False
