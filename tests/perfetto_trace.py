"""A Perfetto trace, read with the perfetto package as slowly and plainly as can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb


@dataclass(frozen=True, order=True)
class Slice:
    """A slice on the track of that name."""

    track: str
    name: str
    begin_ns: int
    end_ns: int
    annotations: tuple[tuple[str, Any], ...]
    categories: tuple[str, ...]


@dataclass
class Trace:
    """What the packets say."""

    tracks: dict[int, Any] = field(default_factory=dict)
    """Descriptors by uuid."""
    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    arrows: list[tuple[int, str, str]] = field(default_factory=list)
    """(time, name of the track where it begins, name of the track where it ends)"""
    depth: int = 0
    """Of the most slices of one track within each other."""


def label(descriptor: Any) -> str:
    """What a viewer shows of a track, with its thread's or process's number where it is one's."""
    if descriptor.HasField("thread"):
        return f"{descriptor.thread.thread_name} {descriptor.thread.tid}"
    if descriptor.HasField("process"):
        return f"{descriptor.process.process_name} {descriptor.process.pid}"
    return str(descriptor.name)


def read(content: bytes) -> Trace:
    """A whole trace of one sequence. Asserts that it is well-formed."""
    trace = Trace()
    names: dict[int, str] = {}
    categories: dict[int, str] = {}
    annotation_names: dict[int, str] = {}
    packets = pb.Trace.FromString(content).packet
    events = []
    for packet in packets:
        assert packet.trusted_packet_sequence_id == packets[0].trusted_packet_sequence_id
        names |= {one.iid: one.name for one in packet.interned_data.event_names}
        categories |= {one.iid: one.name for one in packet.interned_data.event_categories}
        annotation_names |= {one.iid: one.name for one in packet.interned_data.debug_annotation_names}
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in trace.tracks
            trace.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if packet.HasField("track_event"):
            assert packet.sequence_flags == pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            assert not packet.track_event.name_iid or packet.track_event.name_iid in names
            events.append((packet.timestamp, packet.track_event))
    events.sort(key=lambda one: one[0])  # stable, as a viewer does it
    stacks: dict[int, list[tuple[int, Any]]] = {}
    begun: dict[int, tuple[int, str]] = {}

    def made(time_ns: int, end_ns: int, event: Any) -> Slice:
        return Slice(
            label(trace.tracks[event.track_uuid]),
            event.name or names[event.name_iid],
            time_ns,
            end_ns,
            tuple(
                (a.name or annotation_names[a.name_iid], a.uint_value or a.string_value)
                for a in event.debug_annotations
            ),
            tuple(categories[iid] for iid in event.category_iids),
        )

    for time_ns, event in events:
        stack = stacks.setdefault(event.track_uuid, [])
        here = label(trace.tracks[event.track_uuid])
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            stack.append((time_ns, event))
            trace.depth = max(trace.depth, len(stack))
        elif event.type == pb.TrackEvent.TYPE_SLICE_END:
            since_ns, beginning = stack.pop()
            trace.slices.append(made(since_ns, time_ns, beginning))
        else:
            assert event.type == pb.TrackEvent.TYPE_INSTANT
            trace.instants.append(made(time_ns, time_ns, event))
        begun |= dict.fromkeys(event.flow_ids, (time_ns, here))
        for flow in event.terminating_flow_ids:
            assert begun[flow][0] == time_ns
            trace.arrows.append((time_ns, begun.pop(flow)[1], here))
    assert not begun or all(time_ns for time_ns, _ in begun.values())
    assert not any(stacks.values())
    return trace
