"""Figures in the documents, which come from benches: a marker before each block says of which, and what of its output.

In Markdown: a comment ``<!-- python -m bench.NAME -->``, or ``<!-- python -m bench.NAME: TEXT -->`` for those sections
of its output (what blank lines divide) that begin with TEXT, and then a fenced block, which is replaced.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.measurement import BenchError

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "docs/performance.md", ROOT / "README.md")

_MARKED = re.compile(
    r"^(?P<marker><!-- python -m bench\.(?P<name>\w+)(: (?P<begin>.+?))? -->)\n+```\n(?:.*\n)*?```$", re.MULTILINE
)
_MARKER = re.compile(r"^<!-- python -m bench\b", re.MULTILINE)


def benches_named(text: str) -> list[str]:
    """The benches (NAME) whose output a document shows, in its order. Raises BenchError if a marker has no block."""
    found = [match["name"] for match in _MARKED.finditer(text)]
    if len(found) != len(_MARKER.findall(text)):
        raise BenchError("a marker without a block behind it, or one that names no bench")
    return list(dict.fromkeys(found))


def with_output(text: str, name: str, output: str) -> str:
    """The document with all blocks of one bench replaced. Raises BenchError if the output has no such section."""

    def block(match: re.Match[str]) -> str:
        if match["name"] != name:
            return match[0]
        shown = output if match["begin"] is None else section(output, match["begin"])
        return f"{match['marker']}\n\n```\n{shown.strip(chr(10))}\n```"

    return _MARKED.sub(block, text)


def section(output: str, begin: str) -> str:
    """Those sections of a bench's output that begin so. Raises BenchError if there is none."""
    sections = [part for part in re.split(r"\n\s*\n", output.strip("\n")) if part.startswith(begin)]
    if not sections:
        raise BenchError(f"no section of the output begins with {begin!r}")
    return "\n\n".join(sections)


def write(run: Callable[[str], str], documents: Iterable[Path] = DOCUMENTS, only: Iterable[str] = ()) -> None:
    """Run each bench that a document shows with ``run`` (NAME -> output), once, and replace its blocks as soon as it
    has ended. ``only``: the names of some. Raises BenchError."""
    paths, wanted = list(documents), set(only)
    shown = [name for path in paths for name in benches_named(path.read_text())]
    if wanted - set(shown):
        raise BenchError(f"no document shows {', '.join(sorted(wanted - set(shown)))}")
    for name in dict.fromkeys(shown):
        if not wanted or name in wanted:
            output = run(name)
            for path in paths:
                path.write_text(with_output(path.read_text(), name, output))
