"""The forms in which Go programs come: how each is built from tests/golang, and without section headers at
all."""

import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.workload import binary
from tools import toolchains

_STATIC = ("-linkmode", "external", "-extldflags", "-static")
_STATIC_PIE = ("-linkmode", "external", "-extldflags", "-static-pie")

# Form -> (program, flags as for toolchains.build).
FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("hello", {}),
    "stripped": ("hello", {"strip": True}),
    "trimpath": ("hello", {"trimpath": True}),
    "pie": ("hello", {"buildmode": "pie"}),
    "arm64": ("hello", {"goarch": "arm64"}),
    "arm64-pie": ("hello", {"goarch": "arm64", "buildmode": "pie"}),
    "cgo": ("cgohello", {"cgo": True}),
    "cgo-static": ("cgohello", {"cgo": True, "ldflags": _STATIC}),
    "cgo-pie": ("cgohello", {"cgo": True, "buildmode": "pie"}),
    "static-pie": ("cgohello", {"cgo": True, "buildmode": "pie", "ldflags": _STATIC_PIE}),
    "c-shared": ("cshared", {"cgo": True, "buildmode": "c-shared"}),
}
VERSIONS = ("1.19", "1.21", "1.22", "1.23", "1.24", "1.25", "1.26", "1.27")
# Where the formats and what is found in them changed; the others are built plain.
LANDMARKS = ("1.19", "1.21", "1.24", "1.26", "1.27")
MATRIX: Sequence[tuple[str, str]] = [
    (form, version) for version in VERSIONS for form in FORMS if version in LANDMARKS or form == "plain"
]


def built(form: str, version: str) -> Path:
    """The program in that form, from that toolchain, from the cache if it is there."""
    name, flags = FORMS[form]
    return binary(name, version, **flags)


def old_extension(version: str) -> Path:
    """The Python extension "dockerfile", in Go and built as c-shared: 3.1.0 by Go 1.13.8, 3.2.0 by 1.17.1."""
    package = f"dockerfile=={version}"

    def fetch(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
        toolchains.run([*pip, "--target", folder, package], what=f"fetch {package} from PyPI")

    folder = toolchains.made_once(toolchains.cache_dir() / "wheel" / f"dockerfile-{version}", fetch)
    return folder / "dockerfile.abi3.so"


def without_sections(image: bytes) -> bytes:
    """The same ELF file with no section headers: the table's bytes zeroed, and the header naming none."""
    stripped = bytearray(image)
    start, entry_size, count = (*struct.unpack_from("<Q", image, 40), *struct.unpack_from("<HH", image, 58))
    stripped[start : start + entry_size * count] = bytes(entry_size * count)
    struct.pack_into("<Q", stripped, 40, 0)
    struct.pack_into("<HHH", stripped, 58, 64, 0, 0)
    return bytes(stripped)
