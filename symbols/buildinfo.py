"""Which Go built a binary, and with which settings.

The linker leaves that in .go.buildinfo: 16 bytes of magic, pointer size and flags, then, from Go 1.18 on, two
strings with their lengths in front of them (at byte 32), up to 1.17 two pointers to strings (at bytes 16 and
24). Source: debug/buildinfo, and cmd/link/internal/ld/data.go. A binary without it still has the variable
runtime.buildVersion.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.refusals import GCCGO
from schedtrace.symbols.scan import find_bytes, find_words
from schedtrace.symbols.symtab import Symtab

OLDEST_MINOR = 17

_SECTION = ".go.buildinfo"
_BUILD_VERSION = "runtime.buildVersion"
_MAGIC = b"\xff Go buildinf:"
_ALIGNMENT = 16
_BIG_ENDIAN, _INLINE_STRINGS = 1, 2  # flags; the second is Go 1.18's
_MAX_VERSION_SIZE = 256
_MAX_MODULES_SIZE = 16 << 20
_SENTINEL_SIZE = 16  # bytes before and after the module text, by which the go command finds it in memory
_MAX_CONSTANTS = 64

_RELEASE = re.compile(r"\bgo1\.(\d{1,3})(?!\d)")
_WHOLE_RELEASE = re.compile(r"go1\.\d{1,3}(\.\d{1,3}|rc\d{1,2}|beta\d{1,2})?([ -][ -~]*)?")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{3}|.)", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


@dataclass(frozen=True, slots=True)
class GoVersion:
    """``minor`` is 27 for "go1.27.3"; ``text`` is what the toolchain calls itself, all of it."""

    minor: int
    text: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """From "go1.27.3", "go1.22rc1", "go1.24.1 X:boringcrypto", "devel go1.28-abc ..."; else None."""
        release = _RELEASE.search(text)
        return None if release is None else cls(int(release[1]), text)


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """``version`` is None where nothing says it; ``settings`` are `go version -m`'s "build" lines, as "-pgo".

    ``source`` is where the version is from: ".go.buildinfo", "runtime.buildVersion" or "none".
    """

    version: GoVersion | None
    settings: Mapping[str, str]
    source: str


def read_buildinfo(binary: Binary) -> BuildInfo:
    """Version and settings of ``binary``.

    Raises NotTraceable, saying which, for a file that is no Go program, is packed with UPX, is from gccgo, or
    is from Go 1.16 or older. A version newer than any known is no error here.
    """
    for vaddr in _places(binary):
        try:
            found = _read_at(binary, vaddr)
        except NotTraceable:
            continue  # damaged, or only bytes that look like it
        if found is not None:
            return _accepted(binary, found)
    return _accepted(binary, _without_buildinfo(binary))


def _accepted(binary: Binary, info: BuildInfo) -> BuildInfo:
    text = "" if info.version is None else info.version.text
    if "gccgo" in text or info.settings.get("-compiler") == "gccgo":
        raise NotTraceable(f"{binary.path}: {GCCGO}")
    if info.version is not None and info.version.minor < OLDEST_MINOR:
        raise NotTraceable(f"{binary.path}: built with {text}; Go 1.{OLDEST_MINOR} or newer is needed")
    return info


def _places(binary: Binary) -> Iterator[int]:
    section = binary.sections.get(_SECTION)
    if section is not None:
        yield section.vaddr
    # The linker puts it into the data. One that another program, carried along as a constant, has is
    # read-only.
    start = int.from_bytes(_MAGIC[:8], "little")
    for segment in sorted(binary.segments, key=lambda s: (not s.writable, s.executable)):
        yield from find_words(binary, segment, [start], alignment=_ALIGNMENT)


def _read_at(binary: Binary, vaddr: int) -> BuildInfo | None:
    header = binary.read(vaddr, 32)
    if header[:14] != _MAGIC:
        return None
    pointer_size, flags = header[14], header[15]
    if flags & _INLINE_STRINGS:
        version, after = _counted(binary, vaddr + 32, _MAX_VERSION_SIZE)
        modules, _ = _counted(binary, after, _MAX_MODULES_SIZE)
    elif pointer_size == 8 and not flags & _BIG_ENDIAN:
        version = _go_string(binary, binary.pointer(vaddr + 16), _MAX_VERSION_SIZE)
        modules = b""
        variable = binary.pointer(vaddr + 24)
        if binary.segment_at(variable) is not None:  # without modules it is zero, so in .bss
            modules = _go_string(binary, variable, _MAX_MODULES_SIZE)
    else:
        return None
    if not version:
        return None
    parsed = GoVersion.parse(version.decode("utf-8", "replace"))
    return BuildInfo(parsed, _settings(modules), _SECTION)


def _counted(binary: Binary, vaddr: int, limit: int) -> tuple[bytes, int]:
    """The string behind its length (a varint) at ``vaddr``, and the address behind the string."""
    length = 0
    for shift in range(0, 70, 7):
        byte = binary.read(vaddr, 1)[0]
        vaddr += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return binary.read(vaddr, _bounded(binary, length, limit)), vaddr + length


def _go_string(binary: Binary, vaddr: int, limit: int) -> bytes:
    """What the Go string {pointer, length} at ``vaddr`` holds; nothing if ``vaddr`` is 0."""
    if vaddr == 0:
        return b""
    start, length = binary.pointer(vaddr), int.from_bytes(binary.view(vaddr + 8, 8), "little")
    return binary.read(start, _bounded(binary, length, limit)) if length else b""


def _bounded(binary: Binary, length: int, limit: int) -> int:
    if length > limit:
        raise NotTraceable(f"{binary.path}: damaged build information: a string of {length} bytes")
    return length


def _settings(modules: bytes) -> dict[str, str]:
    """The "build" lines of the module text. Keys and values may be quoted, as Go's strconv.Quote does it."""
    if len(modules) <= 2 * _SENTINEL_SIZE or modules[-_SENTINEL_SIZE - 1] != ord("\n"):
        return {}
    settings: dict[str, str] = {}
    for line in modules[_SENTINEL_SIZE:-_SENTINEL_SIZE].decode("utf-8", "replace").split("\n"):
        if line.startswith("build\t"):
            assignment = line.removeprefix("build\t")
            quoted = _QUOTED.match(assignment)
            if quoted:
                key, value = _unquoted(quoted[0]), assignment[quoted.end() :].removeprefix("=")
            else:
                key, _, value = assignment.partition("=")
            settings[key] = _unquoted(value)
    return settings


def _unquoted(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == "`":
        return text[1:-1]
    quoted = _QUOTED.fullmatch(text)
    return text if quoted is None else _ESCAPE.sub(_unescaped, quoted[1])


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) == 1:
        return _ESCAPED.get(code, code)
    number = int(code, 8) if code[0].isdigit() else int(code[1:], 16)
    return chr(number) if number < 0x110000 else "\N{REPLACEMENT CHARACTER}"


def _without_buildinfo(binary: Binary) -> BuildInfo:
    """From the runtime's variable; NotTraceable if there is no function table to tell that this is Go."""
    table = Pclntab.find(binary)
    text = _version_by_symbol(binary) or _version_by_content(binary, table)
    version = None if text is None else GoVersion.parse(text)
    if version is None and table.oldest_minor < OLDEST_MINOR:
        raise NotTraceable(
            f"{binary.path}: built with Go 1.{table.oldest_minor} or 1.{table.newest_minor}, and nothing "
            f"says which; Go 1.{OLDEST_MINOR} or newer is needed"
        )
    return BuildInfo(version, {}, "none" if version is None else _BUILD_VERSION)


def _version_by_symbol(binary: Binary) -> str | None:
    symtab = Symtab.read(binary)
    place = None if symtab is None else symtab.data_named([_BUILD_VERSION]).get(_BUILD_VERSION)
    if place is None:
        return None
    try:
        return _go_string(binary, place[0], _MAX_VERSION_SIZE).decode("utf-8", "replace") or None
    except NotTraceable:
        return None


def _version_by_content(binary: Binary, table: Pclntab) -> str | None:
    """The release that a string variable names, if exactly one does that fits the function table's format."""
    newest = table.newest_minor
    fitting: set[str] = set()
    for text in _release_strings(binary):
        version = GoVersion.parse(text)
        if version and version.minor >= table.oldest_minor and (newest is None or version.minor <= newest):
            fitting.add(text)
    return fitting.pop() if len(fitting) == 1 else None


def _release_strings(binary: Binary) -> Iterator[str]:
    """What string variables that start with "go1." hold; constants lie close, none ends by itself."""
    constants: list[int] = []
    for segment in binary.segments:
        if not segment.writable:
            constants.extend(find_bytes(binary, segment, b"go1."))
    constants = constants[:_MAX_CONSTANTS]
    holders = [holder for vaddr in constants for holder in binary.relocations.vaddrs_of(vaddr)]
    for segment in binary.segments:
        if segment.writable:
            holders.extend(find_words(binary, segment, constants))
    for holder in holders:
        try:
            text = _go_string(binary, holder, _MAX_VERSION_SIZE).decode("ascii", "replace")
        except NotTraceable:
            continue
        if _WHOLE_RELEASE.fullmatch(text):
            yield text
