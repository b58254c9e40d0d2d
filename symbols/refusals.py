"""Why a file has no Go function table: packed, another compiler's, or no Go at all."""

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.relocations import dynamic_entries

UPX = "packed with UPX: its code exists only in memory, where no probe reaches it; run it unpacked (upx -d)"
GCCGO = "built with gccgo, whose runtime is another one (libgo); build it with Go's own compiler"
NO_TABLE = "not a Go program, or not of Go's own compiler: no function table (pclntab) in it"

_UPX_MARK = b"UPX!"  # in the loader's record behind the program headers, and in the last bytes of the file
_ENDS_SIZE = 4096
_DT_STRTAB, _DT_STRSZ = 5, 10
_MAX_STRINGS = 1 << 20


def why_not_go(binary: Binary) -> str:
    """One line: the reason and, where there is something to do, what."""
    if any(_UPX_MARK in end for end in binary.ends(_ENDS_SIZE)):
        return UPX
    if ".go_export" in binary.sections or _needs_libgo(binary):
        return GCCGO
    return NO_TABLE


def _needs_libgo(binary: Binary) -> bool:
    entries = dynamic_entries(binary.dynamic)
    try:
        strings = binary.read(entries.get(_DT_STRTAB, 0), min(entries.get(_DT_STRSZ, 0), _MAX_STRINGS))
    except NotTraceable:
        return False
    return b"\0libgo.so" in strings
