"""Recordings: the file format (docs/recording.md), written and read.

A file is a stream of msgpack objects: a magic string, the version, then frames, each a msgpack extension object of
32-bit length, whose type says what it is. Frames of events hold the bytes of :mod:`schedtrace.events`; the others,
msgpack maps (:mod:`schedtrace.recording_frames`).

>>> with Recording.open("x.rec") as recording:
...     for events in recording.events():
...         moves = of_type(events, EventType.TRANSITION)
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO, FileIO
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgpack
import numpy as np

from schedtrace import recording_frames
from schedtrace.abi import REASON_COUNT, GoroutineState, WakeCause
from schedtrace.errors import SchedtraceError, UnreadableRecording
from schedtrace.events import EVENT, EVENT_BYTES, Array, EventType, of_type
from schedtrace.recording_frames import (
    BadFrame,
    Footer,
    Frame,
    FrameKind,
    Gap,
    Header,
    Lost,
    RecordedTarget,
    Symbols,
    TargetEnd,
    Trigger,
)

MAGIC: bytes = msgpack.packb("schedtrace recording")
VERSION = 1
OLDEST_VERSION = 1
EVENTS_MOST_BYTES = 1 << 22
"""Of the events in one frame."""
_ARRAY_LEAST_BYTES = 1 << 20  # of several frames; what is made of an array takes a millisecond, however small it is
_EXTENSION = struct.Struct(">BIb")  # msgpack's ext 32: 0xc9, length, type
_EXT_32 = 0xC9
CONTROL_MOST_BYTES = 1 << 23
"""Of all frames without events: what they become in memory is bounded by that."""
MOST_TARGETS = 64
_MOST_SYMBOLS = 1 << 16
_SYMBOLS_MOST_BYTES = CONTROL_MOST_BYTES // 2
_SYMBOLS_A_FRAME = 256
_LONGEST_NAME = 400
_TIME_LIMIT = np.uint64(1 << 63)


class Writer:
    """Writes a recording to a file that is open for writing, in binary and without a buffer, frame by frame."""

    def __init__(self, file: FileIO | BytesIO, header: Header) -> None:
        """Raises SchedtraceError if the file can't be written, as all methods do."""
        self._file = file
        self.bytes_written = 0
        self.control_bytes = 0
        """Of frames without events."""
        self.events_written = 0
        self._symbols = self._symbol_bytes = 0
        self._write(MAGIC, msgpack.packb(VERSION))
        self.frame(header)

    def frame(self, frame: Frame) -> None:
        """Write a frame that holds no events."""
        content = recording_frames.pack(frame)
        self.control_bytes += len(content)
        self._write(_EXTENSION.pack(_EXT_32, len(content), recording_frames.kind_of(frame)), content)

    def events(self, events: Array) -> None:
        """Write an array of :data:`EVENT`, in the order in which the kernel sent them."""
        content = np.ascontiguousarray(events).view(np.uint8).data
        for start in range(0, len(content), _EVENTS_FRAME_BYTES):
            piece = content[start : start + _EVENTS_FRAME_BYTES]
            self._write(_EXTENSION.pack(_EXT_32, len(piece), FrameKind.EVENTS), piece)
        self.events_written += len(events)

    def symbols(self, slot: int, names: Mapping[int, str]) -> None:
        """Write names of start functions, in as many frames as it takes. Very long ones are cut, and those left out
        that a reader would find too many."""
        items = sorted(names.items())
        for start in range(0, len(items), _SYMBOLS_A_FRAME):
            if self._symbols + _SYMBOLS_A_FRAME > _MOST_SYMBOLS or self._symbol_bytes > _SYMBOLS_MOST_BYTES:
                return
            piece = items[start : start + _SYMBOLS_A_FRAME]
            before = self.control_bytes
            self.frame(Symbols(slot, {pc: name[:_LONGEST_NAME] for pc, name in piece}))
            self._symbols += len(piece)
            self._symbol_bytes += self.control_bytes - before

    def _write(self, *pieces: Any) -> None:
        # The length of what was written is not that of the pieces only when the disk is full.
        for piece in pieces:
            left = memoryview(piece)
            try:
                while len(left):
                    left = left[self._file.write(left) :]
            except OSError as error:
                path = getattr(self._file, "name", "recording")
                said = f"{path}: can't be written: {error.strerror}; what is in it can be read"
                raise SchedtraceError(said) from None
            self.bytes_written += len(piece)


_EVENTS_FRAME_BYTES = EVENTS_MOST_BYTES // EVENT_BYTES * EVENT_BYTES


@dataclass
class _Contents:
    """What the frames without events say."""

    header: Header | None = None
    targets: dict[int, RecordedTarget] = field(default_factory=dict)
    symbols: dict[tuple[int, int], str] = field(default_factory=dict)
    ends: dict[int, TargetEnd] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    triggers: list[Trigger] = field(default_factory=list)
    footer: Footer | None = None

    def add(self, frame: Frame) -> None:
        match frame:
            case Header():
                self.header = frame
            case RecordedTarget():
                self.targets[frame.slot] = frame
            case Symbols():
                self.symbols |= {(frame.slot, pc): name for pc, name in frame.names.items()}
            case TargetEnd():
                self.ends[frame.slot] = frame
            case Lost():
                self.lost.append(frame)
            case Gap():
                self.gaps.append(frame)
            case Trigger():
                self.triggers.append(frame)
            case Footer():
                self.footer = frame
        if len(self.symbols) > _MOST_SYMBOLS or len(self.targets) > MOST_TARGETS:
            raise BadFrame(f"more than {_MOST_SYMBOLS} symbols or {MOST_TARGETS} targets")
        if not self.ends.keys() <= self.targets.keys():
            raise BadFrame("the end of a target that it does not have")


class Recording:
    """A recording that is read. Close it, or use it in ``with``.

    All but the events is read at once; events, frame by frame, as often as they are asked for.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """``file``: open for reading in binary, can be sought in. It is closed with the recording. ``name`` is for
        messages. Raises UnreadableRecording, OSError."""
        self._file, self.name = file, name
        contents = _Contents()
        self.event_count = 0
        """Events that can be read here."""
        self.cut = ""
        """What is wrong at the file's end, if anything: it was cut, or never ended. What is before can be read."""
        self._read_preamble()
        self._start = self._end = file.tell()
        control_bytes = 0
        for kind, length in self._frames(os.fstat(file.fileno()).st_size):
            if kind == FrameKind.EVENTS:
                self.event_count += length // EVENT_BYTES
            elif kind in recording_frames.KINDS:
                control_bytes += length
                if control_bytes > CONTROL_MOST_BYTES:
                    raise self._bad(f"more than {CONTROL_MOST_BYTES >> 20} MiB of names and totals")
                self._add(contents, FrameKind(kind), file.read(length))
            elif contents.header is None:
                raise self._bad("its first frame is no header")
        if contents.header is None:
            raise self._bad("it ends before its header does")
        self.header: Header = contents.header
        self.targets: Mapping[int, RecordedTarget] = contents.targets
        """By slot."""
        self.symbols: Mapping[tuple[int, int], str] = contents.symbols
        """Names of start functions by (slot, start_pc)."""
        self.ends: Mapping[int, TargetEnd] = contents.ends
        """By slot; none where the file was cut."""
        self.lost: tuple[Lost, ...] = tuple(contents.lost)
        self.gaps: tuple[Gap, ...] = tuple(contents.gaps)
        self.triggers: tuple[Trigger, ...] = tuple(contents.triggers)
        self.footer: Footer | None = contents.footer
        if not self.footer and not self.cut:
            self.cut = f"it was never ended: the last frame ends at byte {self._end}"

    @classmethod
    def open(cls, path: str) -> Self:
        """Raises UnreadableRecording, also if the file can't be opened or is no file."""
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 (a pipe would have to be waited for)
                raise UnreadableRecording(f"{path}: not a file")
            file = open(path, "rb")  # noqa: PTH123, SIM115 (closed with the recording)
        except OSError as error:
            raise UnreadableRecording(f"{path}: {error.strerror}") from None
        try:
            return cls(file, path)
        except OSError as error:
            file.close()
            raise UnreadableRecording(f"{path}: {error.strerror}") from None
        except BaseException:
            file.close()
            raise

    def _bad(self, why: str) -> UnreadableRecording:
        return UnreadableRecording(f"{self.name}: {why}")

    def _read_preamble(self) -> None:
        start = self._file.read(len(MAGIC) + 1)
        if start[: len(MAGIC)] != MAGIC:
            raise self._bad("not a recording of schedtrace" if start else "it is empty")
        if len(start) == len(MAGIC):
            raise self._bad("it ends before its header does")
        version = start[-1]
        if version > VERSION:
            raise self._bad(f"of format version {version}; the newest known is {VERSION}: use a newer schedtrace")
        if version < OLDEST_VERSION:
            raise self._bad(f"there is no format version {version}")

    def _frames(self, file_bytes: int) -> Iterator[tuple[int, int]]:
        """Kind and length of each whole frame from the present place on, with the file at its content. Sets where the
        last whole frame ends."""
        position = self._file.tell()
        while True:
            self._file.seek(position)
            begin = self._file.read(_EXTENSION.size)
            if not begin:
                return
            if begin[0] != _EXT_32:
                raise self._bad(f"damaged: at byte {position} no frame begins")
            if len(begin) == _EXTENSION.size:
                _, length, kind = _EXTENSION.unpack(begin)
                self._check_length(kind, length, position)
                end = position + _EXTENSION.size + length
                if end <= file_bytes:
                    self._end = end
                    yield kind, length
                    position = end
                    continue
            self.cut = f"it was cut at byte {file_bytes}: the last whole frame ends at byte {position}"
            return

    def _check_length(self, kind: int, length: int, position: int) -> None:
        if kind == FrameKind.EVENTS:
            if length > EVENTS_MOST_BYTES or length % EVENT_BYTES:
                raise self._bad(f"damaged: {length} bytes of events in a frame at byte {position}")
        elif kind in recording_frames.KINDS and length > recording_frames.MOST_BYTES:
            raise self._bad(f"damaged: a frame of {length} bytes at byte {position}")

    def _add(self, contents: _Contents, kind: FrameKind, content: bytes) -> None:
        if (contents.header is None) != (kind == FrameKind.HEADER):
            raise self._bad("its first frame is no header" if contents.header is None else "it has two headers")
        try:
            contents.add(recording_frames.unpack(kind, content))
        except BadFrame as error:
            raise self._bad(f"damaged: {error}") from None

    def events(self) -> Iterator[Array]:
        """Arrays of :data:`EVENT`, in the order of the file: each of one or several frames, since a recorder that comes
        often writes small ones. Raises UnreadableRecording."""
        pieces: list[bytes] = []
        pieces_bytes = 0
        for kind, length in self._frames_again():
            if kind == FrameKind.EVENTS and length:
                pieces.append(self._file.read(length))
                pieces_bytes += length
                if pieces_bytes >= _ARRAY_LEAST_BYTES:
                    yield self._array(pieces)
                    pieces, pieces_bytes = [], 0
        if pieces:
            yield self._array(pieces)

    def _array(self, pieces: list[bytes]) -> Array:
        content = b"".join(pieces)
        if len(content) % EVENT_BYTES:
            raise self._bad("it was changed while it was read")
        events: Array = np.frombuffer(content, EVENT)
        self._check(events)
        return events

    def _frames_again(self) -> Iterator[tuple[int, int]]:
        """The frames found at first: the file may have grown since."""
        position = self._start
        while position < self._end:
            self._file.seek(position)
            begin = self._file.read(_EXTENSION.size)
            if len(begin) < _EXTENSION.size:
                raise self._bad("it was changed while it was read")
            _, length, kind = _EXTENSION.unpack(begin)
            self._check_length(kind, length, position)
            yield kind, length
            position += _EXTENSION.size + length

    def _check(self, events: Array) -> None:
        """Numbers that would be used as places or subtracted."""
        moves = of_type(events, EventType.TRANSITION)
        switches = of_type(events, EventType.THREAD_ON, EventType.THREAD_OFF)
        off_cpu, waits = of_type(events, EventType.OFF_CPU), of_type(events, EventType.WAIT)
        stops, throttled = of_type(events, EventType.STOP), of_type(events, EventType.THROTTLED)
        slots = np.unique(events["slot"]).tolist()
        if unknown := [slot for slot in slots if slot not in self.targets]:
            raise self._bad(f"damaged: events of target {unknown[0]}, which it does not have")
        wrong = (
            (events["time_ns"] >= _TIME_LIMIT).any()
            or (moves["since_ns"] >= _TIME_LIMIT).any()
            or (switches["since_ns"] >= _TIME_LIMIT).any()
            or any((waits[name] >= _TIME_LIMIT).any() for name in ("kernel_ns", "undivided_ns"))
            or (off_cpu["off_since_ns"] > off_cpu["runnable_since_ns"]).any()
            or (off_cpu["runnable_since_ns"] > off_cpu["time_ns"]).any()
            or (stops["since_ns"] > stops["time_ns"]).any()
            or (stops["stopped_ns"] > stops["time_ns"]).any()
            or ((stops["stopped_ns"] != 0) & (stops["stopped_ns"] < stops["since_ns"])).any()
            or (throttled["since_ns"] > throttled["time_ns"]).any()
            or (throttled["throttled_ns"] >= _TIME_LIMIT).any()
            or any((moves[name] >= GoroutineState.COUNT).any() for name in ("old", "new", "left"))
            or (moves["cause"] >= WakeCause.COUNT).any()
            or (moves["reason"] >= REASON_COUNT).any()
        )
        if wrong:
            raise self._bad("damaged: events with a time, state, cause or reason that can't be")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        self._file.close()
