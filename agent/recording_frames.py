"""The frames of a recording but for those with events, and how they become msgpack and back. Pure.

What is read is not trusted: every value is checked against the type it should have. Keys that are not known are passed
over, so that a frame can be given more of them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from schedtrace.abi import HISTOGRAM_SLOTS, REASON_COUNT, SITE_LIMIT, GoroutineState, WakeCause
from schedtrace.window import Target, Throttling

MOST_BYTES = 1 << 18
"""Of a frame here: msgpack can become 70 times as large when it is unpacked."""
_MOST_ITEMS = 1 << 14
_MOST_TEXT = 1 << 15
_MOST_LOST_REASONS = 64


class FrameKind(enum.IntEnum):
    """The msgpack extension type of a frame. Others are of a later version, and to be passed over."""

    HEADER = 1
    TARGET = 2
    EVENTS = 3
    LOST = 4
    SYMBOLS = 5
    GAP = 6
    TRIGGER = 7
    TARGET_END = 8
    FOOTER = 9


@dataclass(frozen=True)
class Header:
    """How the recording was made. The first frame."""

    schedtrace: str
    """Version of the program."""
    kernel: str
    machine: str
    """As uname has it: x86_64."""
    cpus: int
    started_ns: int
    """CLOCK_MONOTONIC, the clock of all times here."""
    started_wall_ns: int
    """CLOCK_REALTIME at that moment: nanoseconds since 1970."""
    ring_seconds: float = 0.0
    """Only so much before the end, or before each trigger, was kept; 0: everything."""
    when: str = ""
    """What had to happen for something to be written."""


@dataclass(frozen=True)
class RecordedProbe:
    """A probe, as in :class:`schedtrace.window.ProbeHits`."""

    function: str
    site: str
    emulated: bool


@dataclass(frozen=True)
class RecordedTarget:
    """A process that is recorded. ``slot`` is its number in the events."""

    slot: int
    target: Target
    started_ns: int
    reasons: tuple[str, ...]
    """Names of wait reasons, by number."""
    probes: tuple[RecordedProbe, ...]
    unseen: tuple[str, ...]
    """What can't be seen of it, in words."""
    waits_divided: bool = False
    """Do events tell what waits to run were for?"""
    goroutines_of_threads: bool = False
    """Do they tell how long goroutines that ran were off the CPU?"""
    limit_watched: bool = False
    """Do they tell of what the CPU limit held back, if there is one?"""
    stops_seen: bool = False
    """Do they tell of stops of the world?"""
    stop_reasons: tuple[str, ...] = ()
    """Why the world is stopped, by number; none where the runtime doesn't tell."""


@dataclass(frozen=True)
class Lost:
    """Events that the kernel could not send on a CPU, because they weren't read fast enough."""

    cpu: int
    count: int
    since_ns: int
    until_ns: int


@dataclass(frozen=True)
class Symbols:
    """Names of start functions of a target, by their address in it (``start_pc``)."""

    slot: int
    names: Mapping[int, str]


@dataclass(frozen=True)
class Gap:
    """Events of this time that are not in the file, and why."""

    since_ns: int
    until_ns: int
    count: int
    why: str


@dataclass(frozen=True)
class Trigger:
    """Why something was written: a goroutine waited ``waited_ns`` to run, until ``time_ns``."""

    time_ns: int
    slot: int
    g: int
    waited_ns: int


@dataclass(frozen=True)
class KernelCounts:
    """What the kernel counted of a target while it sent events, to check them against. Each map leaves out zeros."""

    transitions: Mapping[int, int]
    """By old state × 12 + new state."""
    sched_latency: Mapping[int, tuple[int, ...]]
    """By cause: 25 slots of a histogram, sum and maximum in ns."""
    wait: Mapping[int, tuple[int, ...]]
    """By wait reason."""
    run_queue: tuple[int, ...]


@dataclass(frozen=True)
class TargetEnd:
    """What was known of a target at its end."""

    slot: int
    time_ns: int
    ended: str
    threads: int
    goroutines: int
    hits: tuple[int, ...]
    """By probe."""
    foreign_hits: int
    lost: Mapping[str, int]
    """As in :class:`schedtrace.window.Window`."""
    throttling: Throttling | None
    overhead_ns: int | None
    cgroup_id: int
    """As in :class:`schedtrace.window.Target`: which cgroup it was in shows when a probe is hit."""
    kernel: KernelCounts


@dataclass(frozen=True)
class Footer:
    """The last frame: the file is whole."""

    time_ns: int
    ended: str
    """Why the recording ended."""
    sent: int
    """Events that the kernel sent."""
    lost: int
    """Events that it could not send."""
    written: int
    """Events in this file."""


Frame = Header | RecordedTarget | Lost | Symbols | Gap | Trigger | TargetEnd | Footer
KINDS: Mapping[FrameKind, type[Frame]] = {
    FrameKind.HEADER: Header,
    FrameKind.TARGET: RecordedTarget,
    FrameKind.LOST: Lost,
    FrameKind.SYMBOLS: Symbols,
    FrameKind.GAP: Gap,
    FrameKind.TRIGGER: Trigger,
    FrameKind.TARGET_END: TargetEnd,
    FrameKind.FOOTER: Footer,
}
_KIND_OF = {frame: kind for kind, frame in KINDS.items()}

T = TypeVar("T")


class BadFrame(Exception):
    """What was read is not such a frame; the message says what is wrong with it."""


def kind_of(frame: Frame) -> FrameKind:
    """What kind of frame that is."""
    return _KIND_OF[type(frame)]


def pack(frame: Frame) -> bytes:
    """The frame's content as a msgpack map. File names need not be UTF-8: such bytes come back as they were."""
    return bytes(msgpack.packb(dataclasses.asdict(frame), unicode_errors="surrogateescape"))


def unpack(kind: FrameKind, content: bytes) -> Frame:
    """A frame from its content. Raises BadFrame."""
    name = kind.name.lower()
    try:
        value = msgpack.unpackb(
            content,
            strict_map_key=False,
            unicode_errors="surrogateescape",
            max_str_len=_MOST_TEXT,
            max_bin_len=_MOST_TEXT,
            max_array_len=_MOST_ITEMS,
            max_map_len=_MOST_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError) as error:  # msgpack's errors, and keys that can't be hashed
        raise BadFrame(f"a frame {name} is not msgpack: {str(error) or type(error).__name__}") from None
    frame: Frame = _decoded(KINDS[kind], value, name)
    if isinstance(frame, TargetEnd):
        _check_counts(frame)
    return frame


def _check_counts(end: TargetEnd) -> None:
    """Maps of numbers become fifty times as large in memory: none has more of them than there can be."""
    kernel = end.kernel
    histograms = [*kernel.sched_latency.values(), *kernel.wait.values(), kernel.run_queue]
    if (
        max(kernel.transitions, default=0) >= GoroutineState.COUNT**2
        or max(kernel.sched_latency, default=0) >= WakeCause.COUNT
        or max(kernel.wait, default=0) >= REASON_COUNT
        or any(len(histogram) != HISTOGRAM_SLOTS + 2 for histogram in histograms)
        or len(end.hits) > SITE_LIMIT
        or len(end.lost) > _MOST_LOST_REASONS
    ):
        raise BadFrame("the end of a target has counts that can't be")


def _decoded(wanted: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(wanted)
    if origin is types.UnionType:
        choices = [choice for choice in typing.get_args(wanted) if choice is not types.NoneType]
        return None if value is None else _decoded(choices[0], value, where)
    if dataclasses.is_dataclass(wanted):
        return _dataclass(wanted, value, where)
    if origin is tuple and isinstance(value, list):
        (item, _) = typing.get_args(wanted)
        return tuple(_decoded(item, each, where) for each in value)
    if origin is Mapping and isinstance(value, dict):
        key, item = typing.get_args(wanted)
        return {_decoded(key, k, where): _decoded(item, v, where) for k, v in value.items()}
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise BadFrame(f"{where} is {type(value).__name__}, where it should be {getattr(wanted, '__name__', 'a list')}")
    if wanted is int and not 0 <= value < 1 << 63:
        raise BadFrame(f"{where} is {value}, which can't be")
    return value


@functools.cache
def _hints(wanted: Any) -> dict[str, Any]:
    return typing.get_type_hints(wanted)


def _dataclass(wanted: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise BadFrame(f"{where} is {type(value).__name__}, where it should be a map")
    hints = _hints(wanted)
    given = {}
    for field in dataclasses.fields(wanted):
        if field.name in value:
            given[field.name] = _decoded(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING:
            raise BadFrame(f"{where} has no {field.name}")
    return wanted(**given)
