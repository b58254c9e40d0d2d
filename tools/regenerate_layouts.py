"""Writes symbols/layouts.json anew, from the DWARF of one small program per Go release and architecture.

Run by ``make layouts``. Entries of releases whose toolchains can't be had are kept as they are, marked
unverified.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedtrace.symbols.binary import Arch, Binary
from schedtrace.symbols.layout import read_offsets
from schedtrace.symbols.reasons import read_stop_reasons, read_wait_reasons
from schedtrace.symbols.symtab import Symtab
from tools.toolchains import RELEASES, ToolchainError, build, minor

OUTPUT = Path(__file__).resolve().parent.parent / "symbols" / "layouts.json"
ABOUT = (
    "Offsets and sizes in bytes in structs of the Go runtime, and its reasons by number, by Go 1.<minor>. "
    'Written by `make layouts` from the DWARF of each toolchain; "verified": false marks numbers taken once '
    'from a build of the sources. "arm64" holds what differs there from amd64.'
)
_PROGRAM = """package main

import (
	"runtime"
	"time"
)

func main() {
	runtime.ReadMemStats(new(runtime.MemStats)) // stops the world, so that the reasons for it are linked in
\tdone := make(chan int)
\tgo func() { time.Sleep(1); close(done) }()
\t<-done
}
"""
# Fields that moved between patch releases: m.allpSnapshot came in during 1.24, before them (go.dev/issue/74414),
# and may have come into later releases of 1.23.
_BEHIND_ALLP_SNAPSHOT = frozenset({"m.alllink", "m.lockedg"})
UNSTABLE: Mapping[int, frozenset[str]] = {23: _BEHIND_ALLP_SNAPSHOT, 24: _BEHIND_ALLP_SNAPSHOT}


def measure(program: Path, version_minor: int) -> dict[str, Any]:
    """What one program's DWARF and symbol table say, in the form of an entry of the file."""
    with Binary.open(program) as binary:
        offsets, sizes = read_offsets(binary)
        symtab = Symtab.read(binary)
        waits = read_wait_reasons(binary, symtab, lambda _: {})
        stops = read_stop_reasons(binary, symtab)
    if not offsets or not waits or (version_minor > 20 and not stops):
        raise ToolchainError(f"{program}: layout or reasons are missing in it")
    unstable = UNSTABLE.get(version_minor, frozenset())
    return {
        "offsets": {name: offset for name, offset in offsets.items() if name not in unstable},
        "sizes": sizes,
        "wait_reasons": list(waits),
        "stw_reasons": list(stops),
    }


def entry(version: str, source: Path) -> dict[str, Any]:
    """The entry of one release: amd64's numbers, and under "arm64" what differs."""
    release_minor = minor(version)
    own = {arch: measure(build(version, source, goarch=arch.value), release_minor) for arch in Arch}
    amd64, arm64 = own[Arch.AMD64], own[Arch.ARM64]
    if any(amd64[kind] != arm64[kind] for kind in ("wait_reasons", "stw_reasons")):
        raise ToolchainError(f"Go {version}: reasons differ between architectures")
    differing: dict[str, dict[str, int]] = {}
    for kind in ("offsets", "sizes"):
        if amd64[kind].keys() != arm64[kind].keys():
            raise ToolchainError(f"Go {version}: fields differ between architectures")
        changed = {name: number for name, number in arm64[kind].items() if number != amd64[kind][name]}
        if changed:
            differing[kind] = changed
    result: dict[str, Any] = {"toolchain": f"go{RELEASES[version]}", "verified": True, **amd64}
    if differing:
        result["arm64"] = differing
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.regenerate_layouts", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="default: %(default)s")
    options = parser.parse_args(argv)
    kept = json.loads(OUTPUT.read_text("utf-8"))["versions"] if OUTPUT.exists() else {}
    versions = {key: value for key, value in kept.items() if not value["verified"]}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "layouts"
        source.mkdir()
        (source / "main.go").write_text(_PROGRAM)
        for version in RELEASES:
            try:
                versions[str(minor(version))] = entry(version, source)
            except ToolchainError as error:
                print(f"layouts: {error}", file=sys.stderr)
                return 1
            print(f"layouts: Go {RELEASES[version]}")
    options.output.write_text(_format({"about": ABOUT, "versions": dict(sorted(versions.items()))}), "utf-8")
    return 0


def _format(content: Mapping[str, Any]) -> str:
    """JSON with one line per struct and table, so that a change between versions shows in a diff."""
    lines = ["{", f' "about": {json.dumps(content["about"])},', ' "versions": {']
    versions = list(content["versions"].items())
    for number, (key, value) in enumerate(versions):
        lines.append(f'  "{key}": {{')
        parts = list(value.items())
        for place, (name, part) in enumerate(parts):
            comma = "," if place < len(parts) - 1 else ""
            lines.append(f"   {json.dumps(name)}: {_part(part)}{comma}")
        lines.append("  }" + ("," if number < len(versions) - 1 else ""))
    lines += [" }", "}", ""]
    return "\n".join(lines)


def _part(part: Any) -> str:
    if not isinstance(part, dict) or len(part) < 8:
        return json.dumps(part)
    by_struct: dict[str, list[str]] = {}
    for name, number in part.items():
        by_struct.setdefault(name.split(".")[0] if "." in name else "", []).append(f'"{name}": {number}')
    return "{\n    " + ",\n    ".join(", ".join(group) for group in by_struct.values()) + "}"


if __name__ == "__main__":
    sys.exit(main())
