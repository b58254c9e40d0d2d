"""The format of recordings: what is written can be read, cut files to their last whole frame, others not at all."""

import os
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from schedtrace import events, recording_frames
from schedtrace.errors import UnreadableRecording
from schedtrace.events import EventType, of_type
from schedtrace.recording import EVENTS_MOST_BYTES, MAGIC, VERSION, Recording
from schedtrace.recording_frames import FrameKind, Gap, Lost, Trigger
from tests.unit.recordings import (
    END,
    HEADER,
    OTHER_G,
    START_PC,
    STARTED_NS,
    TARGET,
    G,
    off_cpu,
    some_events,
    stop,
    stored,
    throttled,
    wait,
    whole_file,
    written,
)


def _frame(kind: int, content: bytes) -> bytes:
    return struct.pack(">BIb", 0xC9, len(content), kind) + content


def _read(recording: Recording) -> Any:
    frames = list(recording.events())
    return np.concatenate(frames) if frames else np.zeros(0, events.EVENT)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with Recording.open(stored(tmp_path, whole_file())) as recording:
        assert recording.cut == ""
        assert recording.header == HEADER
        assert dict(recording.targets) == {1: TARGET}
        assert dict(recording.ends) == {1: END}
        assert dict(recording.symbols) == {(1, START_PC): "main.worker"}
        assert recording.lost == (Lost(1, 3, STARTED_NS + 5_100, STARTED_NS + 8_000),)
        assert recording.gaps == (Gap(STARTED_NS + 5_100, STARTED_NS + 8_000, 12, "not kept"),)
        assert recording.triggers == (Trigger(STARTED_NS + 5_000, 1, G, 3_000),)
        assert recording.footer is not None
        assert (recording.footer.ended, recording.footer.written) == ("interrupted", 9)
        assert recording.event_count == 9
        assert _read(recording).tobytes() == some_events().tobytes()
        assert _read(recording).tobytes() == some_events().tobytes()  # as often as they are asked for


def test_events_of_one_type_have_its_fields(tmp_path: Path) -> None:
    with Recording.open(stored(tmp_path, whole_file())) as recording:
        read = _read(recording)
    moves = of_type(read, EventType.TRANSITION)
    assert moves["new"].tolist() == [1, 2, 4, 1]
    assert (moves["since_ns"] - STARTED_NS).tolist() == [2_000, 2_000, 5_000, 0]
    assert moves["reason"].tolist() == [0, 0, 1, 2]
    assert of_type(read, EventType.GOROUTINE)["goid"].tolist() == [0, 18, 7]
    assert of_type(read, EventType.GOROUTINE)["g"].tolist() == [G, G, OTHER_G]
    switches = of_type(read, EventType.THREAD_ON, EventType.THREAD_OFF)
    assert (switches["other_tid"].tolist(), switches["prev_state"].tolist()) == ([9, 0], [0, 1])


def test_many_events_are_several_frames(tmp_path: Path) -> None:
    many = np.tile(some_events(), 30_000)
    path = stored(tmp_path, written(TARGET, many))
    with Recording.open(path) as recording:
        frames = list(recording.events())
    assert len(frames) == -(-many.nbytes // EVENTS_MOST_BYTES) == 3
    assert max(frame.nbytes for frame in frames) <= EVENTS_MOST_BYTES
    assert np.concatenate(frames).tobytes() == many.tobytes()


def test_small_frames_come_together(tmp_path: Path) -> None:
    """An hour in which little happens has a hundred thousand of them."""
    path = stored(tmp_path, written(TARGET, *[some_events()] * 5_000))
    with Recording.open(path) as recording:
        arrays = list(recording.events())
    assert [len(array) for array in arrays] == [26_217, 5_000 * 9 - 26_217]
    assert np.concatenate(arrays).tobytes() == np.tile(some_events(), 5_000).tobytes()


def test_any_msgpack_reader_reads_the_file() -> None:
    """The format is what docs/recording.md says, to a reader that knows msgpack only."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(whole_file())
    magic, version, *frames = list(unpacker)
    assert (magic, version) == ("schedtrace recording", 1)
    assert [frame.code for frame in frames] == [1, 2, 3, 4, 6, 7, 3, 5, 8, 9]
    assert b"".join(frame.data for frame in frames if frame.code == 3) == some_events().tobytes()
    assert msgpack.unpackb(frames[0].data)["kernel"] == "6.18.0"


def _ends_of_frames(content: bytes) -> list[int]:
    position, ends = len(MAGIC) + 1, []
    while position < len(content):
        position += 6 + struct.unpack_from(">I", content, position + 1)[0]
        ends.append(position)
    return ends


def test_a_file_cut_at_any_byte_is_read_to_its_last_whole_frame(tmp_path: Path) -> None:
    content = whole_file()
    ends = _ends_of_frames(content)
    path = tmp_path / "cut.rec"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        if size < ends[0]:
            said = r"not a recording|ends before its header" if size else "it is empty"
            with pytest.raises(UnreadableRecording, match=said):
                Recording.open(str(path))
            continue
        last = max(end for end in ends if end <= size)
        with Recording.open(str(path)) as recording:
            # the frames with events are the third and the seventh
            expected = 4 * (last >= ends[2]) + 5 * (last >= ends[6])
            assert recording.event_count == expected
            assert _read(recording).tobytes() == some_events()[:expected].tobytes()
            assert f"ends at byte {last}" in recording.cut
            assert recording.footer is None
            assert bool(recording.ends) == (last >= ends[8])


def test_a_file_that_grows_is_read_as_far_as_it_was(tmp_path: Path) -> None:
    path = stored(tmp_path, written(TARGET, some_events()))
    with Recording.open(path) as recording:
        with Path(path).open("ab") as file:
            file.write(_frame(FrameKind.EVENTS, some_events().tobytes()))
        assert len(_read(recording)) == 9


def test_frames_and_keys_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    newer_header = msgpack.unpackb(recording_frames.pack(HEADER)) | {"colour": "blue"}
    content = (
        MAGIC
        + bytes([VERSION])
        + _frame(FrameKind.HEADER, msgpack.packb(newer_header))
        + _frame(99, b"whatever" * 100_000)
        + whole_file()[_ends_of_frames(whole_file())[0] :]
    )
    with Recording.open(stored(tmp_path, content)) as recording:
        assert recording.header == HEADER
        assert len(_read(recording)) == 9


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    content = MAGIC + bytes([VERSION + 1]) + whole_file()[len(MAGIC) + 1 :]
    with pytest.raises(UnreadableRecording, match=f"version {VERSION + 1}; the newest known is {VERSION}: use a newer"):
        Recording.open(stored(tmp_path, content))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("", "not a file"), ("pipe", "not a file"), ("none", "No such file")):
        with pytest.raises(UnreadableRecording, match=why):
            Recording.open(str(tmp_path / name))


START = MAGIC + bytes([VERSION])
HEADER_FRAME = _frame(FrameKind.HEADER, recording_frames.pack(HEADER))
TARGET_FRAME = _frame(FrameKind.TARGET, recording_frames.pack(TARGET))


def _with(kind: FrameKind, content: Any) -> bytes:
    packed = content if isinstance(content, bytes) else msgpack.packb(content)
    return START + HEADER_FRAME + TARGET_FRAME + _frame(kind, packed)


def _changed(frame: Any, **values: Any) -> bytes:
    fields = msgpack.unpackb(recording_frames.pack(frame), unicode_errors="replace", strict_map_key=False)
    return bytes(msgpack.packb(fields | values))


def _event(**fields: int) -> bytes:
    event = some_events()[2:3].view(events.TRANSITION).copy()
    for name, value in fields.items():
        event[name] = value
    return bytes(event.tobytes())


DEEP = b"\x91" * 200_000
HOSTILE = {
    "empty": b"",
    "zeros": bytes(1000),
    "text": b"PID TID\n" * 100,
    "magic_only": MAGIC,
    "version_0": MAGIC + b"\x00" + HEADER_FRAME,
    "no_header": START + TARGET_FRAME,
    "unknown_frame_first": START + _frame(50, b""),
    "two_headers": START + HEADER_FRAME + HEADER_FRAME,
    "events_first": START + _frame(FrameKind.EVENTS, some_events().tobytes()) + HEADER_FRAME,
    "no_extension": START + HEADER_FRAME + b"\x93abc" * 20,
    "events_cut": _with(FrameKind.EVENTS, some_events().tobytes()[:-1]),
    "events_of_4_gib": START + HEADER_FRAME + struct.pack(">BIb", 0xC9, 0xFFFFFFF8, FrameKind.EVENTS),
    "header_of_4_gib": START + struct.pack(">BIb", 0xC9, 0xFFFFFFFF, FrameKind.HEADER) + bytes(100),
    "no_msgpack": _with(FrameKind.TARGET, b"\xc1"),
    "too_short": _with(FrameKind.TARGET, b"\x85\xa4slot"),
    "more_behind_it": _with(FrameKind.TARGET, recording_frames.pack(TARGET) + b"\x00"),
    "a_list": _with(FrameKind.TARGET, [1, 2, 3]),
    "a_key_is_missing": _with(FrameKind.TARGET, {"slot": 1}),
    "a_string_for_a_number": _with(FrameKind.TARGET, _changed(TARGET, slot="1")),
    "true_for_a_number": _with(FrameKind.TARGET, _changed(TARGET, slot=True)),
    "a_negative_number": _with(FrameKind.TARGET, _changed(TARGET, slot=-1)),
    "a_huge_number": _with(FrameKind.TARGET, _changed(TARGET, slot=(1 << 64) - 1)),
    "a_number_for_a_list": _with(FrameKind.TARGET, _changed(TARGET, reasons=7)),
    "a_list_in_a_list": _with(FrameKind.TARGET, _changed(TARGET, reasons=[["x"]])),
    "a_map_for_a_string": _with(FrameKind.TARGET, _changed(TARGET, unseen=[{}])),
    "bytes_for_a_string": _with(FrameKind.TARGET, _changed(TARGET, unseen=[b"x"])),
    "a_list_as_key": _with(FrameKind.SYMBOLS, b"\x82\xa4slot\x01\xa5names\x81\x90\xa1x"),
    "deep": _with(FrameKind.SYMBOLS, DEEP),
    "deep_in_a_map": _with(FrameKind.SYMBOLS, b"\x82\xa4slot\x01\xa5names" + DEEP),
    "a_list_of_4_gi": _with(FrameKind.SYMBOLS, b"\xdd\xff\xff\xff\xff"),
    "a_map_of_4_gi": _with(FrameKind.SYMBOLS, b"\xdf\xff\xff\xff\xff"),
    "a_string_of_4_gi": _with(FrameKind.SYMBOLS, b"\xdb\xff\xff\xff\xff"),
    "many_lists": _with(FrameKind.SYMBOLS, b"\xdc\x3f\xff" + (b"\xdc\x00\x0e" + b"\x90" * 14) * 0x3FFF),
    "too_many_symbols": _with(FrameKind.SYMBOLS, b"")[: -6]
    + b"".join(
        _frame(FrameKind.SYMBOLS, msgpack.packb({"slot": 1, "names": {i * 10_000 + j: "" for j in range(10_000)}}))
        for i in range(10)
    ),
    "too_many_names": START
    + HEADER_FRAME
    + _frame(FrameKind.GAP, recording_frames.pack(Gap(0, 0, 0, "x" * 32_000))) * 300,
    "too_many_targets": START
    + HEADER_FRAME
    + b"".join(_frame(FrameKind.TARGET, _changed(TARGET, slot=slot)) for slot in range(100)),
    "an_end_of_no_target": _with(FrameKind.TARGET_END, recording_frames.pack(replace(END, slot=9))),
    "counts_of_everything": _with(
        FrameKind.TARGET_END, _changed(END, kernel=asdict(END.kernel) | {"transitions": dict.fromkeys(range(999), 1)})
    ),
    "hits_without_end": _with(FrameKind.TARGET_END, _changed(END, hits=[0] * 16_000)),
    "a_histogram_too_short": _with(
        FrameKind.TARGET_END, _changed(END, kernel=asdict(END.kernel) | {"run_queue": [1]})
    ),
    "an_unknown_target": _with(FrameKind.EVENTS, _event(slot=9)),
    "an_unknown_state": _with(FrameKind.EVENTS, _event(new=12)),
    "an_unknown_cause": _with(FrameKind.EVENTS, _event(cause=12)),
    "a_wait_beyond_all": _with(FrameKind.EVENTS, wait(10, 1 << 63).tobytes()),
    "awake_before_it_was_off": _with(FrameKind.EVENTS, off_cpu(10, 5, 4).tobytes()),
    "awake_after_it_was_on": _with(FrameKind.EVENTS, off_cpu(10, 5, 11).tobytes()),
    "a_stop_that_begins_after_its_end": _with(FrameKind.EVENTS, stop(10, 11).tobytes()),
    "stopped_before_it_was_to_be": _with(FrameKind.EVENTS, stop(10, 5, 4).tobytes()),
    "stopped_after_the_end": _with(FrameKind.EVENTS, stop(10, 5, 11).tobytes()),
    "throttled_before_its_beginning": _with(FrameKind.EVENTS, throttled(10, 11, 1).tobytes()),
    "throttled_beyond_all": _with(FrameKind.EVENTS, throttled(10, 5, 1 << 63).tobytes()),
    "reasons_of_stops_that_are_none": _with(FrameKind.TARGET, _changed(TARGET, stop_reasons=[1])),
    "an_unknown_reason": _with(FrameKind.EVENTS, _event(reason=64)),
    "a_time_beyond_all": _with(FrameKind.EVENTS, _event(time_ns=1 << 63)),
    "a_beginning_beyond_all": _with(FrameKind.EVENTS, _event(since_ns=1 << 63)),
}


def _refusal(path: Path) -> str:
    """Why the file can't be read, if so."""
    try:
        with Recording.open(str(path)) as recording:
            _read(recording)
    except UnreadableRecording as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    message = _refusal(Path(stored(tmp_path, HOSTILE[name])))
    assert message.isprintable()
    assert 20 < len(message) < 300


_READ_ALL = """
import resource, sys
from schedtrace.errors import UnreadableRecording
from schedtrace.recording import Recording
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        with Recording.open(path) as recording:
            for _ in recording.events():
                pass
    except UnreadableRecording:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_hostile_files_take_little_memory(tmp_path: Path) -> None:
    paths = []
    for name, content in HOSTILE.items():
        paths.append(tmp_path / name)
        paths[-1].write_bytes(content)
    done = subprocess.run([sys.executable, "-c", _READ_ALL, *paths], stdout=subprocess.PIPE, check=True, timeout=120)
    assert 0 <= int(done.stdout) < 100  # MiB


@pytest.mark.parametrize("whole", [whole_file(), written(TARGET, stop(9, 5, 7), throttled(10, 5, 4))])
def test_a_byte_changed_anywhere_makes_no_other_error(tmp_path: Path, whole: bytes) -> None:
    content = bytearray(whole)
    path = tmp_path / "changed.rec"
    refused = 0
    for position in range(len(content)):
        kept = content[position]
        for value in (0x00, 0xC1, 0xFF, kept ^ 0x01):
            content[position] = value
            path.write_bytes(content)
            refusal = _refusal(path)
            assert refusal.isprintable()
            refused += bool(refusal)
        content[position] = kept
    assert 0 < refused < 4 * len(content)


def test_records_are_those_of_the_format() -> None:
    """Offsets as docs/recording.md gives them."""
    assert events.EVENT.itemsize == 40
    for record in (events.TRANSITION, events.GOROUTINE, events.SWITCH, events.CGROUP, events.STOP, events.THROTTLED):
        assert record.itemsize == 40
        places = {name: place[1] for name, place in (record.fields or {}).items()}
        assert places | {"time_ns": 0, "type": 8, "flags": 9, "slot": 10, "tid": 12} == places
