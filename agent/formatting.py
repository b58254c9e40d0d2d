"""Text for people: durations, counts, names, aligned columns, under 80 columns wide. Pure.

What is printed is one :class:`rich.text.Text`. Its styles show on a terminal and vanish in a pipe; its
lines are laid out here, not by rich, so that both hold the same lines, none wider than :data:`WIDTH` or
with blanks at its end.
"""

import textwrap
from collections.abc import Iterable, Sequence

from rich.text import Text

WIDTH = 79

_INDENT = "  "
_GAP = "  "
_UNITS = (("ns", 1.0), ("µs", 1e3), ("ms", 1e6), ("s", 1e9))
_SMALL_SHARE = 0.001


def duration(ns: float) -> str:
    """Nanoseconds with a unit that suits them, three digits: "850 ns", "1.05 ms", "12.3 s", "4,321 s"."""
    if ns == 0:
        return "0"
    for unit, scale in _UNITS:
        value = ns / scale
        if value < 999.5:  # what is more would be rounded to 1000
            decimals = 0 if unit == "ns" else 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{decimals}f} {unit}"
    return f"{ns / 1e9:,.0f} s"


def rough_duration(seconds: float | None) -> str:
    """Seconds to the two digits that an estimate deserves: "6.5 µs", "24 ms", "590 ms"; a dash for None."""
    if seconds is None:
        return "-"
    scales = [(seconds * 1e9 / scale, unit) for unit, scale in _UNITS]
    value, unit = next(((value, unit) for value, unit in scales if value < 999.5), scales[-1])
    return f"{value:,.{1 if 0 < value < 9.95 and unit != 'ns' else 0}f} {unit}"


def bound(seconds: float) -> str:
    """A power of two of microseconds: "1 µs", "512 µs", "1.02 ms", "8.39 s"."""
    microseconds = seconds * 1e6
    return f"{microseconds:.0f} µs" if microseconds < 1000 else duration(seconds * 1e9)


def count(number: int) -> str:
    """A number with its thousands grouped."""
    return f"{number:,}"


def amount(number: float) -> str:
    """A number of cores or goroutines that needn't be whole: "0", "< 0.001", "0.004", "0.31", "12.4", "1,234"."""
    if number == 0:
        return "0"
    if number < 0.0005:
        return "< 0.001"
    decimals = 3 if number < 0.0995 else 2 if number < 9.995 else 1 if number < 999.5 else 0
    return f"{number:,.{decimals}f}"


def share(part: float) -> str:
    """A fraction of one as a percentage: "62 %", "0.4 %", "< 0.1 %"."""
    if 0 < part < _SMALL_SHARE:
        return "< 0.1 %"
    return f"{part * 100:.{0 if part >= 0.0995 or part == 0 else 1}f} %"


def plural(number: int, noun: str) -> str:
    """ "1 thread", "2 threads"."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Names come from strangers' binaries and file systems: nothing in them may reach the terminal as a
    command."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def short_function(name: str) -> str:
    """A Go function without the directories of its package's path: "server.(*Server).accept.func1"."""
    end = min((at for at in (name.find("("), name.find("[")) if at >= 0), default=len(name))
    return name[name.rfind("/", 0, end) + 1 :]


def keep_end(text: str, width: int) -> str:
    """At most ``width`` characters, of a longer text its end, which in paths and functions says the
    most."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def lines(parts: Iterable[Text]) -> Text:
    """Parts one below the other. Never folded by rich: lines are narrow already, and a terminal folds by
    itself."""
    joined = Text("\n").join(parts)
    joined.no_wrap, joined.overflow = True, "ignore"
    return joined


def heading(title: str, remark: str = "") -> Text:
    """A section's title, with a remark beside it that is less prominent."""
    return Text.assemble((title, "bold"), (f"  {remark}" if remark else "", "dim"))


def paragraph(text: str, style: str = "", bullet: str = "") -> Text:
    """Text folded at :data:`WIDTH`, indented; behind ``bullet``, if there is one."""
    first, rest = _INDENT + bullet, _INDENT + " " * len(bullet)
    folded = textwrap.fill(printable(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return Text(folded, style)


def columns(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    align: str,
    flexible: int = 0,
    *,
    width: int = WIDTH,
    indent: str = _INDENT,
    title_style: str = "dim",
) -> Text:
    """A table. ``align`` has "<" or ">" per column; column ``flexible`` gives way, at its beginning, where
    a line would be wider than ``width``. Columns in which no row says anything are left out."""
    kept = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    cells = [[printable(row[i]) for i in kept] for row in rows]
    heads = [titles[i] for i in kept]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    if flexible in kept:
        at = kept.index(flexible)
        others = len(indent) + sum(widths) - widths[at] + len(_GAP) * (len(widths) - 1)
        widths[at] = min(widths[at], max(width - others, 8))
    sides = [align[i] for i in kept]

    def line(texts: Sequence[str]) -> str:
        shapes = zip(texts, sides, widths, strict=True)
        return (indent + _GAP.join(f"{keep_end(t, w):{side}{w}}" for t, side, w in shapes)).rstrip()

    return Text("\n").join([Text(line(heads), title_style), *(Text(line(row)) for row in cells)])
