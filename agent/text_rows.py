"""Lines of text in bulk: columns of bytes, in which 0 stands for nothing, side by side. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedtrace.events import Array

_GROUP = 10_000
_GROUPS = np.array([f"{i:04}" for i in range(_GROUP)], "S4").view(np.uint8).reshape(_GROUP, 4)
_POWERS = np.array([10**k for k in range(1, 19)], np.int64)
_MINUS = ord("-")

Column = Array | bytes
"""A row of bytes for each line, or the same bytes for all."""


def integers(values: Array) -> Array:
    """Numbers (int64) in decimal."""
    values = np.asarray(values).astype(np.int64)
    positive = np.abs(values)
    digits = np.searchsorted(_POWERS, positive, "right") + 1
    width = int(digits.max()) if len(digits) else 1
    rows = padded(positive, width)
    rows[np.arange(width) < (width - digits)[:, None]] = 0
    if (values < 0).any():
        rows = np.concatenate([np.where(values < 0, _MINUS, 0).astype(np.uint8)[:, None], rows], axis=1)
    return rows


def padded(values: Array, width: int) -> Array:
    """Numbers that are not negative, in so many digits, with zeros in front."""
    groups, left = [], values
    for _ in range(-(-width // 4)):
        left, low = np.divmod(left, _GROUP)
        groups.append(_GROUPS[low])
    return np.ascontiguousarray(np.concatenate(groups[::-1], axis=1)[:, -width:])


def thousandths(values: Array) -> list[Column]:
    """Numbers (int64, not negative) divided by 1000: "12.345"."""
    whole, rest = np.divmod(np.asarray(values).astype(np.int64), 1000)
    return [integers(whole), b".", padded(rest, 3)]


def texts(choices: Sequence[str], places: Array) -> Array:
    """For each line the text at a place of ``choices``, in UTF-8. A character of code 0 would be nothing."""
    table = np.array([choice.encode() for choice in choices] or [b""])
    width = max(table.itemsize, 1)
    return table.astype(f"S{width}")[places].view(np.uint8).reshape(len(places), width)


def where(condition: Array, column: Array) -> Array:
    """The column where the condition holds, and nothing elsewhere."""
    return np.where(condition[:, None], column, np.uint8(0))


def joined(count: int, columns: Sequence[Column]) -> Array:
    """Columns side by side, as one of ``count`` lines."""
    rows: Array = np.concatenate([_spread(column, count) for column in columns], axis=1)
    return rows


def lines(count: int, columns: Sequence[Column]) -> bytes:
    """The columns side by side, in ``count`` lines."""
    flat: Array = joined(count, columns).reshape(-1)
    content: bytes = flat[flat != 0].tobytes()
    return content


def _spread(column: Column, count: int) -> Array:
    if isinstance(column, bytes):
        return np.broadcast_to(np.frombuffer(column, np.uint8), (count, len(column)))
    return column
