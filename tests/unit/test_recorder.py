"""Events on their way to a file: out of the ring buffer, kept for a while or not, with what is missing counted."""

import io
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedtrace.condition import Condition
from schedtrace.event_ring import EventRing
from schedtrace.events import CGROUP, EVENT, EventType, Flag, of_type
from schedtrace.recorder import END_BYTES, Everything, Last, Recorder, first_wait, latest
from schedtrace.recording import Recording, Writer
from tests.unit.recordings import (
    DEAD,
    HEADER,
    OTHER_G,
    RUNNABLE,
    RUNNING,
    START_PC,
    STARTED_NS,
    TARGET,
    WAITING,
    G,
    goroutine,
    some_events,
    transition,
)

MS = 1_000_000
PAGES = 1
NO_LIMIT = 1 << 40


class Kernel:
    """The other side of a ring buffer: a file laid out as the kernel's, whose data are written twice."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ring")
        self.bytes = PAGES * mmap.PAGESIZE
        os.ftruncate(self.descriptor, 2 * mmap.PAGESIZE + 2 * self.bytes)
        self._produced = 0
        self.lost = np.zeros(2, np.uint64)

    def ring(self) -> EventRing:
        return EventRing(self.descriptor, PAGES, self.lost.copy)

    def send(self, events: Any, flags: int = 0) -> None:
        for event in np.atleast_1d(events):
            record = struct.pack("<II", 40 | flags, 0) + event.tobytes()
            for i, byte in enumerate(record):
                place = (self._produced + i) % self.bytes
                for copy in (place, place + self.bytes):
                    os.pwrite(self.descriptor, bytes([byte]), 2 * mmap.PAGESIZE + copy)
            self._produced += len(record)
        os.pwrite(self.descriptor, struct.pack("<Q", self._produced), mmap.PAGESIZE)

    def finish(self, record: int) -> None:
        """The program that was held up writes its length."""
        os.pwrite(self.descriptor, struct.pack("<I", 40), 2 * mmap.PAGESIZE + record * 48)

    @property
    def consumed(self) -> int:
        return int(struct.unpack("<Q", os.pread(self.descriptor, 8, 0))[0])


def test_events_come_out_of_the_ring_as_they_were_sent() -> None:
    kernel = Kernel()
    ring = kernel.ring()
    sent = [transition(i, RUNNABLE, RUNNING, tid=i) for i in range(400)]  # four times the buffer
    read = []
    for start in range(0, 400, 80):
        kernel.send(np.concatenate(sent[start : start + 80]))
        read.append(ring.read())
    assert np.concatenate(read).tobytes() == np.concatenate(sent).tobytes()
    assert (ring.sent, ring.taken, kernel.consumed) == (400, 400, 400 * 48)
    assert len(ring.read()) == 0


def test_one_that_is_not_finished_is_waited_for() -> None:
    kernel = Kernel()
    ring = kernel.ring()
    kernel.send(some_events()[:2])
    kernel.send(some_events()[2], flags=1 << 31)
    kernel.send(some_events()[3:5])
    assert len(ring.read()) == 2
    assert len(ring.read()) == 0
    kernel.finish(2)
    assert ring.read().tobytes() == some_events()[2:5].tobytes()


def test_what_came_before_can_be_passed_over() -> None:
    kernel = Kernel()
    ring = kernel.ring()
    kernel.send(some_events())
    kernel.lost += np.array([5, 0], np.uint64)
    ring.skip()
    assert (ring.sent, ring.taken, ring.lost_by_cpu().tolist()) == (0, 0, [0, 0])
    kernel.send(some_events()[:1])
    kernel.lost += np.array([0, 2], np.uint64)
    assert (len(ring.read()), ring.sent, ring.lost_by_cpu().tolist()) == (1, 1, [0, 2])


def _writer() -> tuple[io.BytesIO, Writer]:
    file = io.BytesIO()
    writer = Writer(file, HEADER)
    writer.frame(TARGET)
    return file, writer


def _read(file: io.BytesIO, tmp_path: Path) -> tuple[Recording, Any]:
    path = tmp_path / "x.rec"
    path.write_bytes(file.getvalue())
    recording = Recording.open(str(path))
    return recording, np.concatenate([np.zeros(0, EVENT), *recording.events()])


def test_the_recorder_moves_events_and_counts_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    file, writer = _writer()
    recorder = Recorder(kernel.ring(), writer, Everything(writer, NO_LIMIT), [1])
    kernel.send(some_events())
    assert recorder.drain() == 9
    assert recorder.drain() == 0
    monkeypatch.setattr("schedtrace.recorder._LOST_PAUSE_NS", 0)
    kernel.lost += np.array([0, 7], np.uint64)
    recorder.drain()
    monkeypatch.setattr("schedtrace.recorder._LOST_PAUSE_NS", 1 << 60)
    for _ in range(3):
        kernel.lost += np.array([1, 2], np.uint64)
        recorder.drain()
    assert recorder.lost == 16
    recorder.end()
    assert recorder.functions == {1: {START_PC}}
    recording, events = _read(file, tmp_path)
    with recording:
        assert events.tobytes() == some_events().tobytes()
        assert [(lost.cpu, lost.count) for lost in recording.lost] == [(1, 7), (0, 3), (1, 6)]
        assert all(lost.since_ns <= lost.until_ns for lost in recording.lost)
        assert recording.lost[0].until_ns == recording.lost[1].since_ns


def test_a_file_has_no_more_than_its_limit(tmp_path: Path) -> None:
    file, writer = _writer()
    limit = writer.bytes_written + END_BYTES + 45 * 40
    sink = Everything(writer, limit)
    full = []
    for _ in range(6):
        sink.add(some_events())
        full.append(sink.full)
    assert full == [False, False, False, False, True, True]
    sink.end()
    assert writer.bytes_written <= limit
    recording, events = _read(file, tmp_path)
    with recording:
        (gap,) = recording.gaps
        assert len(events) + gap.count == 6 * 9
        assert len(events) == 44  # and 6 bytes a frame
        assert "limit" in gap.why


def _moves(since_ms: int, until_ms: int) -> list[Any]:
    return [transition(t * MS, RUNNABLE, RUNNING, since_ns=t * MS - 1_000) for t in range(since_ms, until_ms)]


def _kept(events: Any) -> list[int]:
    return [int(t) // MS for t in of_type(events, EventType.TRANSITION)["time_ns"] - STARTED_NS]


def test_only_the_last_of_them_is_kept(tmp_path: Path) -> None:
    file, writer = _writer()
    sink = Last(writer, NO_LIMIT, 10 * MS)
    sink.add(goroutine(0, goid=18))
    sink.add(goroutine(0, goid=7, g=OTHER_G))
    for event in _moves(0, 50):
        sink.add(event)
    assert file.getvalue()[-40:] != some_events().tobytes()  # nothing is written yet
    sink.end()
    recording, events = _read(file, tmp_path)
    with recording:
        assert _kept(events) == list(range(39, 50))
        (gap,) = recording.gaps
        assert (gap.count, gap.until_ns - STARTED_NS) == (41, 38 * MS)
    assert of_type(events, EventType.GOROUTINE)["goid"].tolist() == [18, 7]  # who they are is known still


def test_a_condition_has_what_came_before_written_and_goes_on(tmp_path: Path) -> None:
    file, writer = _writer()
    sink = Last(writer, NO_LIMIT, 10 * MS, Condition.parse("latency>5ms"), 25 * MS)
    slow = {t: transition(t * MS, RUNNABLE, RUNNING, since_ns=(t - 6) * MS) for t in (20, 40, 60, 61)}
    for t in range(100):
        sink.add(slow.get(t, _moves(t, t + 1)[0]))
    sink.end()
    assert sink.triggers == 3
    recording, events = _read(file, tmp_path)
    with recording:
        # The one at 20 is written at once. Then comes a pause until 45, and one until 70.
        assert [(t.time_ns - STARTED_NS) // MS for t in recording.triggers] == [20, 40, 60]
        assert [t.waited_ns for t in recording.triggers] == [6 * MS] * 3
        assert _kept(events) == [*range(9, 21), *range(34, 46), *range(59, 71)]
        assert sum(gap.count for gap in recording.gaps) == 100 - len(events)


def test_in_a_pause_longer_than_what_is_kept_something_is_missed(tmp_path: Path) -> None:
    file, writer = _writer()
    sink = Last(writer, NO_LIMIT, 10 * MS, Condition.parse("latency>5ms"), 50 * MS)
    slow = {t: transition(t * MS, RUNNABLE, RUNNING, since_ns=(t - 6) * MS) for t in (20, 40, 65, 99)}
    for t in range(100):
        sink.add(slow.get(t, _moves(t, t + 1)[0]))
    sink.end()
    recording, _ = _read(file, tmp_path)
    with recording:  # at 70 that of 40 is gone; the last one is written at the end
        assert [(t.time_ns - STARTED_NS) // MS for t in recording.triggers] == [20, 65, 99]


def test_a_condition_that_never_holds(tmp_path: Path) -> None:
    file, writer = _writer()
    sink = Last(writer, NO_LIMIT, 10 * MS, Condition.parse("latency>5ms"))
    for event in _moves(0, 50):
        sink.add(event)
    sink.end()
    recording, events = _read(file, tmp_path)
    with recording:
        assert (len(events), sum(gap.count for gap in recording.gaps)) == (0, 50)


def test_what_is_kept_keeps_to_the_limit_of_the_file(tmp_path: Path) -> None:
    file, writer = _writer()
    limit = writer.bytes_written + END_BYTES + 500
    sink = Last(writer, limit, 10_000 * MS)
    for event in _moves(0, 50):
        sink.add(event)
    sink.end()
    assert sink.full
    assert writer.bytes_written <= limit
    recording, events = _read(file, tmp_path)
    with recording:
        assert _kept(events) == list(range(42, 50))
        assert recording.gaps[0].count == 42


@pytest.mark.parametrize(
    ("event", "holds"),
    [
        (transition(60 * MS, RUNNABLE, RUNNING, since_ns=9 * MS), True),
        (transition(60 * MS, RUNNABLE, RUNNING, since_ns=10 * MS), False),  # not longer
        (transition(60 * MS, WAITING, RUNNING, since_ns=0), False),  # it waited for something
        (transition(60 * MS, RUNNABLE, DEAD, since_ns=0), False),  # it never ran
        (transition(60 * MS, RUNNABLE, RUNNING, since_ns=0, flags=Flag.BEGAN_BEFORE), False),  # nobody knows how long
        (goroutine(60 * MS), False),
    ],
)
def test_what_a_condition_holds_for(event: Any, holds: bool) -> None:
    found = first_wait(np.concatenate([some_events(), event]), Condition.parse("latency>50ms"))
    assert (found is not None) == holds
    if found:
        assert (found.slot, found.g, found.waited_ns, found.time_ns) == (1, G, 51 * MS, STARTED_NS + 60 * MS)


@pytest.mark.parametrize(
    ("text", "ns"),
    [("latency>50ms", 50 * MS), (" latency > 1.5 s ", 1_500 * MS), ("latency>7us", 7_000), ("latency>7µs", 7_000)]
    + [("latency>999999999999s", 1 << 62)],
)
def test_conditions(text: str, ns: int) -> None:
    assert Condition.parse(text).latency_ns == ns


@pytest.mark.parametrize("text", ["", "latency", "latency>", "latency>50", "latency<5ms", "wait>5ms", "latency>-5ms"])
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match="is no condition; say, for instance, latency>50ms"):
        Condition.parse(text)


def _cgroup(time_ns: int, cpu: int, cgroup_id: int) -> Any:
    event = np.zeros(1, CGROUP)
    for name, value in {
        "time_ns": STARTED_NS + time_ns, "type": EventType.CGROUP, "slot": 1, "cpu": cpu, "cgroup_id": cgroup_id
    }.items():  # fmt: skip
        event[name] = value
    return event.view(EVENT)


def test_what_is_still_known_of_what_was_left_out() -> None:
    """Of each goroutine that lives, who it is; of each CPU, its cgroup."""
    ended, again = OTHER_G, OTHER_G + 448
    events = [
        goroutine(0, goid=1, g=G),  # one that was there before
        _cgroup(1, 0, 50),
        goroutine(2, g=ended),
        goroutine(3, goid=2, g=ended, flags=0),
        transition(4, RUNNING, DEAD, g=ended),
        goroutine(5, g=again),
        goroutine(6, goid=3, g=again, flags=0),
        transition(7, RUNNING, DEAD, g=again),
        _cgroup(8, 1, 50),
        goroutine(9, g=again),
        _cgroup(10, 0, 60),
        goroutine(11, goid=4, g=again, flags=0),
        goroutine(12, goid=5, g=G, slot=2),  # at the same address, of another target
    ]
    kept = latest(np.concatenate(events))
    assert (kept["time_ns"] - STARTED_NS).tolist() == [0, 8, 9, 10, 11, 12]
    assert latest(kept).tobytes() == kept.tobytes()
    assert len(latest(kept[:0])) == 0
