"""Perfetto packets of one form in bulk: numpy puts numbers into copies of a template. Pure.

A protobuf varint may be longer than it needs to be, so all packets of a form can be of one length. Field numbers come
from the descriptors of the ``perfetto`` package; a test decodes what is made here with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from schedtrace.events import Array

_VARINT, _FIXED64, _BYTES = 0, 1, 2
TIME_BYTES = 9
"""Of a padded varint: 63 bits."""


@dataclass(frozen=True)
class Number:
    """A field of ``bytes`` bytes, whose values are given as ``key``. A varint holds 7 bits a byte; without ``bytes``,
    it is a fixed64."""

    field: int
    key: str
    bytes: int = 0


@dataclass(frozen=True)
class Constant:
    """A varint field that is always the same."""

    field: int
    value: int


@dataclass(frozen=True)
class Message:
    """A field that is a message, of these."""

    field: int
    parts: tuple[Part, ...]


Part = Number | Constant | Message


def field_number(message: type, name: str) -> int:
    """The number of a field of one of perfetto's messages."""
    return int(message.DESCRIPTOR.fields_by_name[name].number)  # type: ignore[attr-defined]


def varint(value: int) -> bytes:
    """The shortest form."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


class Template:
    """Packets of a trace, one or several for each row of numbers."""

    def __init__(self, packets: Sequence[tuple[Part, ...]]) -> None:
        self._places: list[tuple[int, Number]] = []
        content = b""
        for parts in packets:
            content = self._append(content, Message(field_number(pb.Trace, "packet"), parts))
        self._row = np.frombuffer(content, np.uint8)

    def _append(self, content: bytes, part: Part) -> bytes:
        match part:
            case Constant(field, value):
                return content + varint(field << 3 | _VARINT) + varint(value)
            case Number(field, _, size):
                content += varint(field << 3 | (_VARINT if size else _FIXED64))
                self._places.append((len(content), part))
                return content + bytes(size or 8)
            case Message(field, parts):
                begin = content + varint(field << 3 | _BYTES) + varint(_length(parts))
                for inner in parts:
                    begin = self._append(begin, inner)
                return begin

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return len(self._row)

    def rows(self, count: int, **values: Array | int) -> Array:
        """The packets for ``count`` rows: bytes, a row each. Each value is an array of so many, or the same for all.
        Values must not be negative, and fit."""
        rows = np.empty((count, len(self._row)), np.uint8)
        rows[:] = self._row
        for place, number in self._places:
            value = np.broadcast_to(np.asarray(values[number.key]).astype(np.uint64), count)
            if not number.bytes:
                rows[:, place : place + 8] = np.ascontiguousarray(value, "<u8").view(np.uint8).reshape(count, 8)
                continue
            for i in range(number.bytes):
                digit = (value >> np.uint64(7 * i)).astype(np.uint8)
                rows[:, place + i] = digit & 0x7F if i == number.bytes - 1 else digit | 0x80
        return rows


def mixed(templates: Sequence[Template], which: Array, **values: Array) -> bytes:
    """Rows of different templates in one order: ``which`` is the place of each row's in ``templates``."""
    sizes = np.array([template.size for template in templates])
    rows = np.empty((len(which), int(sizes.max())), np.uint8)
    for i, template in enumerate(templates):
        some = np.flatnonzero(which == i)
        rows[some, : template.size] = template.rows(len(some), **{key: value[some] for key, value in values.items()})
    used = np.arange(rows.shape[1]) < sizes[which][:, None]
    return rows[used].tobytes()


def _length(parts: Sequence[Part]) -> int:
    total = 0
    for part in parts:
        total += len(varint(part.field << 3))
        match part:
            case Constant(_, value):
                total += len(varint(value))
            case Number(_, _, size):
                total += size or 8
            case Message(_, inner):
                length = _length(inner)
                total += len(varint(length)) + length
    return total
