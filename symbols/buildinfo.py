"""Which Go built a binary and with which settings.

The linker leaves that in .go.buildinfo: 16 bytes of magic, pointer size and flags, then, from Go 1.18 on, two strings
with their lengths in front of them (at byte 32), or, up to 1.17, two pointers to strings (at bytes 16 and 24).
Source: debug/buildinfo and cmd/link/internal/ld/data.go. A binary without it still has runtime.buildVersion.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary, Segment
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.scan import find_words
from schedtrace.symbols.symtab import Symtab

_SECTION = ".go.buildinfo"
_MAGIC = b"\xff Go buildinf:"
_ALIGNMENT = 16
_INLINE_STRINGS = 2  # flag, Go 1.18
_BIG_ENDIAN = 1  # flag
_MAX_VERSION = 256
_MAX_MODULES = 16 << 20
_SENTINEL_SIZE = 16  # before and after the module text; random bytes that the go command looks for
_PIECE = 1 << 20
_MAX_OCCURRENCES = 64
OLDEST_MINOR = 17

_RELEASE = re.compile(r"\bgo1\.(\d{1,3})(?!\d)")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{3}|.)", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


@dataclass(frozen=True, slots=True)
class GoVersion:
    """``minor`` is 27 for "go1.27.3"; ``text`` is what the toolchain calls itself, with patch and suffixes."""

    minor: int
    text: str

    @classmethod
    def parse(cls, text: str) -> "GoVersion | None":
        """From "go1.27.3", "go1.22rc1", "go1.24.1 X:boringcrypto", "devel go1.28-abcdef ..."; None from anything else."""
        release = _RELEASE.search(text)
        return None if release is None else cls(int(release[1]), text)


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """``version`` is None where the binary doesn't say; ``settings`` are those of `go version -m`, such as "-pgo".

    ``source``: where the version is from, ".go.buildinfo", "runtime.buildVersion" or "none".
    """

    version: GoVersion | None
    settings: Mapping[str, str]
    source: str


def read_buildinfo(binary: Binary) -> BuildInfo:
    """Version and settings of ``binary``.

    Raises NotTraceable, saying which, for a file that is not a Go program, is packed, is from gccgo, or is from Go 1.16
    or older.
    """
    for vaddr in _candidates(binary):
        try:
            found = _read_at(binary, vaddr)
        except NotTraceable:
            continue
        if found is not None:
            return _checked(binary, found)
    return _checked(binary, _without_buildinfo(binary))


def _checked(binary: Binary, info: BuildInfo) -> BuildInfo:
    if info.version is not None and info.version.minor < OLDEST_MINOR:
        raise NotTraceable(
            f"{binary.path}: built with {info.version.text}; Go 1.{OLDEST_MINOR} or newer is needed"
        )
    return info


def _candidates(binary: Binary) -> Iterator[int]:
    section = binary.sections.get(_SECTION)
    if section is not None:
        yield section.vaddr
    # The linker puts it at the start of the data; another program's, carried as data, is likelier in read-only parts.
    word = int.from_bytes(_MAGIC[:8], "little")
    for segment in sorted(binary.segments, key=_data_first):
        yield from find_words(binary, segment, word, alignment=_ALIGNMENT)


def _data_first(segment: Segment) -> tuple[bool, bool]:
    return (not segment.writable, segment.executable)


def _read_at(binary: Binary, vaddr: int) -> BuildInfo | None:
    header = binary.read(vaddr, 32)
    if header[:14] != _MAGIC:
        return None
    flags = header[15]
    if flags & _INLINE_STRINGS:
        version, after = _counted(binary, vaddr + 32, _MAX_VERSION)
        modules, _ = _counted(binary, after, _MAX_MODULES)
    elif header[14] == 8 and not flags & _BIG_ENDIAN:
        version = _go_string(binary, binary.pointer(vaddr + 16), _MAX_VERSION)
        modules = _go_string(binary, binary.pointer(vaddr + 24), _MAX_MODULES)
    else:
        return None
    text = version.decode("utf-8", "replace")
    if not text:
        return None
    return BuildInfo(GoVersion.parse(text), MappingProxyType(_settings(modules)), _SECTION)


def _counted(binary: Binary, vaddr: int, limit: int) -> tuple[bytes, int]:
    """A string behind its length (a varint), and the address behind the string."""
    length = 0
    for shift in range(0, 70, 7):
        byte = binary.read(vaddr, 1)[0]
        vaddr += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    if length > limit:
        raise NotTraceable(f"{binary.path}: damaged build information")
    return binary.read(vaddr, length), vaddr + length


def _go_string(binary: Binary, vaddr: int, limit: int) -> bytes:
    """What the Go string {pointer, length} at ``vaddr`` holds; empty if there is no string."""
    if vaddr == 0:
        return b""
    start, length = binary.pointer(vaddr), int.from_bytes(binary.view(vaddr + 8, 8), "little")
    if length > limit:
        raise NotTraceable(f"{binary.path}: damaged build information")
    return binary.read(start, length) if length else b""


def _settings(modules: bytes) -> dict[str, str]:
    """The `build` lines of the module text."""
    if len(modules) < 2 * _SENTINEL_SIZE + 1 or modules[-_SENTINEL_SIZE - 1] != ord("\n"):
        return {}
    text = modules[_SENTINEL_SIZE:-_SENTINEL_SIZE].decode("utf-8", "replace")
    settings: dict[str, str] = {}
    for line in text.split("\n"):
        kind, _, assignment = line.partition("\t")
        if kind == "build":
            key, rest = _token(assignment)
            if rest.startswith("="):
                settings[key] = _token(rest[1:])[0] if rest[1:2] in ('"', "`") else rest[1:]
    return settings


def _token(text: str) -> tuple[str, str]:
    """A key, quoted as by Go's strconv.Quote or plain up to "=", and what follows it."""
    if text.startswith("`"):
        inner, _, rest = text[1:].partition("`")
        return inner, rest
    quoted = re.match(r'"((?:[^"\\]|\\.)*)"', text)
    if quoted:
        return _ESCAPE.sub(_unescape, quoted[1]), text[quoted.end() :]
    key, sign, rest = text.partition("=")
    return key, sign + rest


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU":
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else "\N{REPLACEMENT CHARACTER}"
    if code[0] in "01234567" and len(code) == 3:
        return chr(int(code, 8))
    return _ESCAPED.get(code, code)


def _without_buildinfo(binary: Binary) -> BuildInfo:
    """From runtime.buildVersion. Raises NotTraceable if there is no Go function table either."""
    table = Pclntab.find(binary)
    text = _build_version_by_symbol(binary) or _build_version_by_content(binary, table)
    version = None if text is None else GoVersion.parse(text)
    if version is None and table.oldest_minor < OLDEST_MINOR:
        raise NotTraceable(f"{binary.path}: built with Go 1.{table.oldest_minor} or 1.{table.newest_minor}, and "
                           f"nothing says which; Go 1.{OLDEST_MINOR} or newer is needed")  # fmt: skip
    return BuildInfo(version, MappingProxyType({}), "none" if version is None else "runtime.buildVersion")


def _build_version_by_symbol(binary: Binary) -> str | None:
    symtab = Symtab.read(binary)
    place = symtab.data_named(["runtime.buildVersion"]).get("runtime.buildVersion") if symtab else None
    if place is None:
        return None
    try:
        return _go_string(binary, place[0], _MAX_VERSION).decode("utf-8", "replace")
    except NotTraceable:
        return None


def _build_version_by_content(binary: Binary, table: Pclntab) -> str | None:
    """The one release name among the constants that a variable points to and that fits the function table's format."""
    fitting: set[str] = set()
    for text in _pointed_release_names(binary):
        version = GoVersion.parse(text)
        newest = table.newest_minor
        if version and version.minor >= table.oldest_minor and (newest is None or version.minor <= newest):
            fitting.add(text)
    return fitting.pop() if len(fitting) == 1 else None


def _pointed_release_names(binary: Binary) -> Iterator[str]:
    for segment in binary.segments:
        if segment.writable or segment.executable:
            continue
        for vaddr in _occurrences(binary, segment, b"go1."):
            for holder in _holders(binary, vaddr):
                try:
                    text = _go_string(binary, holder, 64).decode("ascii")
                except (NotTraceable, UnicodeDecodeError):
                    continue
                if re.fullmatch(r"go1\.\d{1,3}(\.\d{1,3}|rc\d+|beta\d+)?([ -].*)?", text):
                    yield text


def _occurrences(binary: Binary, segment: Segment, wanted: bytes) -> Iterator[int]:
    """Addresses of ``wanted`` in the file part of ``segment``, up to 64."""
    hits = 0
    for start in range(0, segment.file_size, _PIECE):
        size = min(_PIECE + len(wanted) - 1, segment.file_size - start)
        piece = binary.read(segment.vaddr + start, size)
        position = piece.find(wanted)
        while position >= 0 and hits < _MAX_OCCURRENCES:
            hits += 1
            yield segment.vaddr + start + position
            position = piece.find(wanted, position + 1)


def _holders(binary: Binary, vaddr: int) -> Iterator[int]:
    """Addresses of the variables that hold a pointer to ``vaddr``."""
    yield from binary.relocations.vaddrs_of(vaddr)
    for segment in binary.segments:
        if segment.writable:
            yield from find_words(binary, segment, vaddr)
