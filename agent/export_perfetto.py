"""A recording as a Perfetto trace: a track for each goroutine, each thread, and what the kernel did to each thread.

The packets that say what the tracks are, are made with the ``perfetto`` package; those of spans, millions, by
:mod:`schedtrace.packets`. All are of one sequence, whose names are interned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from schedtrace.events import Array
from schedtrace.exported import (
    LIMIT_TRACK,
    SOME_TIME_NAME,
    STOP_TRACK,
    THROTTLED_NAME,
    Names,
    StateNames,
    StopNames,
    Write,
    batches,
    remarks,
    shown,
    stopping_ns,
)
from schedtrace.lives import NOBODY
from schedtrace.packets import TIME_BYTES, Constant, Message, Number, Part, Template, field_number, mixed
from schedtrace.recording import Recording
from schedtrace.timeline import KERNEL_STATES, ON_CPU, Block, Timeline

RECORDING_TRACK = 1
_PROCESS, _GOROUTINES, _GOROUTINE, _THREAD, _KERNEL, _STOPS, _LIMIT = (kind << 32 for kind in range(1, 8))
"""Added to a slot, slot, number, tid, tid, slot and slot, they give a track's uuid, of :data:`_UUID_BYTES`."""
_UUID_BYTES, _NAME_BYTES, _INT_BYTES, _NS_BYTES = 5, 4, 5, 9
_SEQUENCE = 1
_CATEGORIES = ("goroutine", "thread", "kernel", "wake", "until the end", "stop", "limit")
_GOROUTINE_CATEGORY, _THREAD_CATEGORY, _KERNEL_CATEGORY, _WAKE_CATEGORY, _OPEN_CATEGORY = range(1, 6)
_STOP_CATEGORY, _LIMIT_CATEGORY = 6, 7
_ANNOTATIONS = ("tid", "cpu", "stopping_ns", "throttled_ns", "periods")
_TID, _CPU, _STOPPING, _THROTTLED_NS, _PERIODS = range(1, 6)
_FIXED_NAMES = ("wakes", THROTTLED_NAME, SOME_TIME_NAME, *KERNEL_STATES)
_WAKES, _THROTTLED, _SOME_TIME, _FIRST_NAME = range(1, 5)
_FIRST_STATE_NAME = _FIRST_NAME + len(KERNEL_STATES)


def track_of_goroutine(number: int) -> int:
    """The uuid of the track of a goroutine, by its number."""
    return _GOROUTINE + number


def track_of_thread(tid: int) -> int:
    """The uuid of the track of a thread: which goroutines it ran."""
    return _THREAD + tid


def track_of_kernel(tid: int) -> int:
    """The uuid of the track with a thread's states for the kernel."""
    return _KERNEL + tid


def write(recording: Recording, timeline: Timeline, out: Write) -> None:
    """Write the trace, piece by piece. Raises UnreadableRecording, and what ``out`` does."""
    names = Names(recording, timeline)
    states = StateNames(recording, names)
    stops = StopNames(recording)
    fixed_names = [*_FIXED_NAMES, *states.names, *stops.names]
    first_stop_name, first_goroutine_name = _FIRST_STATE_NAME + len(states.names), _WAKES + len(fixed_names)
    out(_packets(_preamble(recording)))
    for packets in _tracks(recording, timeline, names):
        out(_packets(packets))
    for interned in _interned(fixed_names, names, len(timeline.lives)):
        out(_packets([interned]))
    for block in timeline.blocks():
        # A wake and what it begins have the same time, and an arrow has to begin first in the file.
        out(_wakes(block))
        out(_spans(block.spans, states))
        out(_runs(block.runs, first_goroutine_name))
        out(_kernel(block.kernel))
        out(_stops(block.stops, stops.of(block.stops) + first_stop_name))
        out(_throttles(block.throttles))
    out(_packets(_on_recording(recording, timeline)))


def _packets(packets: Sequence[pb.TracePacket]) -> bytes:
    for packet in packets:
        packet.trusted_packet_sequence_id = _SEQUENCE
    content: bytes = pb.Trace(packet=packets).SerializeToString()
    return content


def _preamble(recording: Recording) -> list[pb.TracePacket]:
    """Clocks: all times are of CLOCK_MONOTONIC, which is also the one shown."""
    first = pb.TracePacket()
    first.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = pb.BUILTIN_CLOCK_MONOTONIC
    clocks = pb.TracePacket()
    clocks.clock_snapshot.primary_trace_clock = pb.BUILTIN_CLOCK_MONOTONIC
    header = recording.header
    for clock, time_ns in (
        (pb.BUILTIN_CLOCK_MONOTONIC, header.started_ns),
        (pb.BUILTIN_CLOCK_REALTIME, header.started_wall_ns),
    ):
        clocks.clock_snapshot.clocks.add(clock_id=clock, timestamp=time_ns)
    system = pb.TracePacket()
    system.system_info.utsname.sysname = "Linux"
    system.system_info.utsname.release = shown(header.kernel)
    system.system_info.utsname.machine = shown(header.machine)
    return [first, clocks, system]


def _tracks(recording: Recording, timeline: Timeline, names: Names) -> Iterator[list[pb.TracePacket]]:
    top = _track(RECORDING_TRACK, "recording")
    top.track_descriptor.description = "What was recorded, what is missing, and waits that were looked for"
    packets = [top]
    for slot, recorded in recording.targets.items():
        process = _track(_PROCESS + slot, "")
        process.track_descriptor.process.pid = recorded.target.pid & 0x7FFFFFFF
        process.track_descriptor.process.process_name = names.process(slot)
        goroutines = _track(_GOROUTINES + slot, "goroutines", _PROCESS + slot)
        goroutines.track_descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT
        packets += [process, goroutines]
        packets += [_track(_STOPS + slot, STOP_TRACK, _PROCESS + slot)] * (slot in timeline.stopped)
        packets += [_track(_LIMIT + slot, LIMIT_TRACK, _PROCESS + slot)] * (slot in timeline.throttled)
    for slot, tid in timeline.threads.tolist():
        thread = _track(_THREAD + tid, "")
        thread.track_descriptor.thread.pid = recording.targets[slot].target.pid & 0x7FFFFFFF
        thread.track_descriptor.thread.tid = tid & 0x7FFFFFFF
        thread.track_descriptor.thread.thread_name = "M"
        packets += [thread, _track(_KERNEL + tid, "kernel", _THREAD + tid)]
    yield packets
    order = np.argsort(timeline.lives["goid"], kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    for numbers in batches(len(timeline.lives)):
        slots, ranks = timeline.lives["slot"][numbers].tolist(), rank[numbers].tolist()
        packets = []
        for number, name, slot, place in zip(numbers, names.goroutines(numbers), slots, ranks, strict=True):
            packet = _track(_GOROUTINE + number, name, _GOROUTINES + slot)
            packet.track_descriptor.sibling_order_rank = place
            packets.append(packet)
        yield packets


def _track(uuid: int, name: str, parent: int = 0) -> pb.TracePacket:
    packet = pb.TracePacket()
    packet.track_descriptor.uuid = uuid
    if name:
        packet.track_descriptor.name = name
    if parent:
        packet.track_descriptor.parent_uuid = parent
    return packet


def _interned(fixed_names: Sequence[str], names: Names, goroutines: int) -> Iterator[pb.TracePacket]:
    """Names by number, before they are used."""
    packet = pb.TracePacket()
    packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
    data = packet.interned_data
    for iid, category in enumerate(_CATEGORIES, 1):
        data.event_categories.add(iid=iid, name=category)
    for iid, name in enumerate(_ANNOTATIONS, 1):
        data.debug_annotation_names.add(iid=iid, name=name)
    for iid, name in enumerate(fixed_names, _WAKES):
        data.event_names.add(iid=iid, name=name)
    yield packet
    first = _WAKES + len(fixed_names)
    for numbers in batches(goroutines):
        packet = pb.TracePacket()
        packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        for number, name in zip(numbers, names.goroutines(numbers), strict=True):
            packet.interned_data.event_names.add(iid=first + number, name=name)
        yield packet


def _event(kind: int, *parts: Part, time: str = "time") -> tuple[Part, ...]:
    """A packet with a track event on ``track`` at ``time``."""
    event = (Constant(_in_event("type"), kind), Number(_in_event("track_uuid"), "track", _UUID_BYTES), *parts)
    return (
        Number(_in_packet("timestamp"), time, TIME_BYTES),
        Constant(_in_packet("trusted_packet_sequence_id"), _SEQUENCE),
        Constant(_in_packet("sequence_flags"), pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE),
        Message(_in_packet("track_event"), event),
    )


def _in_packet(name: str) -> int:
    return field_number(pb.TracePacket, name)


def _in_event(name: str) -> int:
    return field_number(pb.TrackEvent, name)


def _annotation(name: int, key: str, size: int = _INT_BYTES) -> Message:
    parts = (
        Constant(field_number(pb.DebugAnnotation, "name_iid"), name),
        Number(field_number(pb.DebugAnnotation, "uint_value"), key, size),
    )
    return Message(_in_event("debug_annotations"), parts)


def _span(category: int, *parts: Part) -> Template:
    name = Number(_in_event("name_iid"), "name", _NAME_BYTES)
    categories = [Constant(_in_event("category_iids"), category)]
    begin = _event(pb.TrackEvent.TYPE_SLICE_BEGIN, *categories, name, *parts, time="begin")
    return Template([begin, _event(pb.TrackEvent.TYPE_SLICE_END, time="end")])


_FLOW = Number(_in_event("flow_ids"), "flow")
_WAKE = Template(
    [
        _event(
            pb.TrackEvent.TYPE_INSTANT,
            Constant(_in_event("category_iids"), _WAKE_CATEGORY),
            Constant(_in_event("name_iid"), _WAKES),
            _FLOW,
        )
    ]
)
_WOKEN = Number(_in_event("terminating_flow_ids"), "flow")
_ON_THREAD = (_annotation(_TID, "tid"), _annotation(_CPU, "cpu"))


def _with_open(category: int, *forms: tuple[Part, ...]) -> list[Template]:
    """Templates of these forms for spans that ended, and then those for spans that didn't before the recording."""
    still_open = Constant(_in_event("category_iids"), _OPEN_CATEGORY)
    return [_span(category, *parts) for parts in forms] + [_span(category, still_open, *parts) for parts in forms]


_SPANS = _with_open(_GOROUTINE_CATEGORY, (), (_WOKEN,), _ON_THREAD)
_RUNS = _with_open(_THREAD_CATEGORY, (_annotation(_CPU, "cpu"),))
_KERNEL_SPANS = _with_open(_KERNEL_CATEGORY, (), (_annotation(_CPU, "cpu"),))
_STOP_SPANS = [
    _span(_STOP_CATEGORY, _annotation(_TID, "tid"), *more)
    for more in ((), (_annotation(_STOPPING, "stopping", _NS_BYTES),))
]
_HELD = (_annotation(_PERIODS, "periods"), _annotation(_THROTTLED_NS, "throttled", _NS_BYTES))
_THROTTLE_MARK = Template(
    [
        _event(
            pb.TrackEvent.TYPE_INSTANT,
            Constant(_in_event("category_iids"), _LIMIT_CATEGORY),
            Constant(_in_event("name_iid"), _SOME_TIME),
            *_HELD,
            time="end",
        )
    ]
)
_THROTTLE_SPANS = [_THROTTLE_MARK, _span(_LIMIT_CATEGORY, *_HELD)]


def _wakes(block: Block) -> bytes:
    woken = block.wakers != NOBODY
    tracks = block.wakers[woken] + _GOROUTINE
    flows, times = block.flows[woken], block.moves["time_ns"][woken]
    return _WAKE.rows(len(tracks), time=times, track=tracks, flow=flows).tobytes()


# Where one span of a track ends and the next begins at the same time, their order in the file decides how they nest:
# spans of different forms stay in their order.


def _spans(spans: Array, states: StateNames) -> bytes:
    form = np.where(spans["flow"] != 0, 1, np.where(spans["tid"] != 0, 2, 0))
    return _rows(_SPANS, form, spans, states.of(spans) + _FIRST_STATE_NAME, spans["number"] + _GOROUTINE)


def _runs(runs: Array, first_name: int) -> bytes:
    form = np.zeros(len(runs), np.int64)
    return _rows(_RUNS, form, runs, runs["number"] + first_name, runs["tid"].astype(np.int64) + _THREAD)


def _kernel(spans: Array) -> bytes:
    names, tracks = spans["state"].astype(np.int64) + _FIRST_NAME, spans["tid"].astype(np.int64) + _KERNEL
    return _rows(_KERNEL_SPANS, (spans["state"] == ON_CPU).astype(np.int64), spans, names, tracks)


def _stops(stops: Array, names: Array) -> bytes:
    known = stops["stopped_ns"] != 0
    tracks = stops["slot"].astype(np.int64) + _STOPS
    return mixed(
        _STOP_SPANS, known.astype(np.int64), begin=stops["since_ns"], end=stops["time_ns"], name=names, track=tracks,
        tid=stops["tid"], stopping=stopping_ns(stops),
    )  # fmt: skip


def _throttles(throttles: Array) -> bytes:
    tracks, names = throttles["slot"].astype(np.int64) + _LIMIT, np.full(len(throttles), _THROTTLED)
    return mixed(
        _THROTTLE_SPANS, throttles["is_seen"].astype(np.int64), begin=throttles["begin_ns"], end=throttles["end_ns"],
        name=names, track=tracks, periods=throttles["periods"], throttled=throttles["throttled_ns"],
    )  # fmt: skip


def _rows(forms: Sequence[Template], form: Array, spans: Array, names: Array, tracks: Array) -> bytes:
    values = {key: spans[key] for key in ("flow", "tid", "cpu") if key in (spans.dtype.names or ())}
    which = form + len(forms) // 2 * spans["is_open"]
    return mixed(forms, which, begin=spans["begin_ns"], end=spans["end_ns"], name=names, track=tracks, **values)


def _on_recording(recording: Recording, timeline: Timeline) -> list[pb.TracePacket]:
    """What is on the track of the recording itself: where something is missing, and what it says of itself."""
    header = recording.header
    about = _mark("about this recording", timeline.first_ns)
    facts = {"schedtrace": header.schedtrace, "kernel": header.kernel, "when": header.when}
    facts |= {f"remark {i}": remark for i, remark in enumerate(remarks(recording, timeline), 1)}
    for name, value in facts.items():
        if value:
            about.track_event.debug_annotations.add(name=name, string_value=shown(value))
    packets = [about]
    for gap in recording.gaps:
        packets += _range(f"{gap.count:,} events not kept: {gap.why}", gap.since_ns, gap.until_ns)
    for lost in recording.lost:
        packets += _range(f"{lost.count:,} events lost", lost.since_ns, lost.until_ns)
    for trigger in recording.triggers:
        packets.append(_mark(f"{header.when}: {trigger.waited_ns / 1e6:.3f} ms", trigger.time_ns))
    packets.append(_mark(f"end: {recording.footer.ended if recording.footer else recording.cut}", timeline.last_ns))
    return packets


def _mark(name: str, time_ns: int, kind: int = pb.TrackEvent.TYPE_INSTANT) -> pb.TracePacket:
    packet = pb.TracePacket()
    packet.timestamp = time_ns
    packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
    packet.track_event.track_uuid = RECORDING_TRACK
    packet.track_event.type = kind
    if name:
        packet.track_event.name = shown(name)
    return packet


def _range(name: str, since_ns: int, until_ns: int) -> list[pb.TracePacket]:
    begin = _mark(name, since_ns, pb.TrackEvent.TYPE_SLICE_BEGIN)
    return [begin, _mark("", max(since_ns, until_ns), pb.TrackEvent.TYPE_SLICE_END)]
