"""When a CPU limit held threads back: found from counters and switches, and not found where it can't be known. And
stops of the world as spans."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedtrace import timeline as timelines
from schedtrace.cgroups import CpuLimit
from schedtrace.errors import UnreadableRecording
from schedtrace.events import THROTTLED, EventType
from schedtrace.recording import Recording
from schedtrace.recording_frames import Gap, Lost
from schedtrace.throttle_watch import ThrottleWatch
from schedtrace.timeline import Timeline
from tests.unit.recordings import STARTED_NS, TARGET, goroutine, stop, stored, switch, throttled, written

MS = 1_000_000


def on(ms: float, tid: int, cpu: int, since_ms: float | None = None) -> Any:
    return switch(
        round(ms * MS), EventType.THREAD_ON, None if since_ms is None else round(since_ms * MS), tid=tid, cpu=cpu
    )


def off(ms: float, tid: int, cpu: int, *, blocked: bool = False) -> Any:
    return switch(round(ms * MS), EventType.THREAD_OFF, tid=tid, cpu=cpu, prev_state=int(blocked))


def counted(ms: float, since_ms: float, held_ms: float, periods: int = 1) -> Any:
    return throttled(round(ms * MS), round(since_ms * MS), round(held_ms * MS), periods)


Found = list[tuple[float, float, int, float]]


def found(folder: Path, *events: Any, frames: tuple[Any, ...] = ()) -> Found:
    """Begin and end in ms, periods, and time counted in ms of each; nothing between begin and end: not known when."""
    content = written(TARGET, goroutine(0), *events, *frames)
    with Recording.open(stored(folder, content)) as recording:
        throttles = np.concatenate([block.throttles for block in Timeline(recording).blocks()])
    assert (throttles["is_seen"] == (throttles["end_ns"] > throttles["begin_ns"])).all()
    assert (throttles["begin_ns"][1:] >= throttles["end_ns"][:-1]).all()
    times = [((int(t["begin_ns"]) - STARTED_NS) / MS, (int(t["end_ns"]) - STARTED_NS) / MS) for t in throttles]
    return [(*ms, int(t["periods"]), int(t["throttled_ns"]) / MS) for ms, t in zip(times, throttles, strict=True)]


ONE_CPU = (on(0, 1, 0), off(30, 1, 0), on(100, 1, 0, 30), counted(110, 90, 70), off(150, 1, 0))


def test_one_thread(tmp_path: Path) -> None:
    assert found(tmp_path, *ONE_CPU) == [(30, 100, 1, 70)]


@pytest.mark.parametrize("block", [1, 2, 1 << 16])
def test_threads_on_two_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """From the first CPU's end of time to the last one's going on."""
    monkeypatch.setattr(timelines, "_BLOCK_EVENTS", block)
    events = (on(0, 1, 0), on(0, 2, 1), off(30, 1, 0), off(34, 2, 1), on(100, 1, 0, 30), on(101, 2, 1, 34))
    assert found(tmp_path, *events, counted(110, 90, 137), off(150, 1, 0)) == [(30, 101, 1, 137)]


def test_another_thread_runs_meanwhile_on_another_cpu(tmp_path: Path) -> None:
    """As the runtime's monitor does, which needs next to nothing."""
    monitor = [each for ms in (40, 60, 80) for each in (on(ms, 9, 1, ms - 0.1), off(ms + 0.01, 9, 1, blocked=True))]
    events = (on(0, 1, 0), off(30, 1, 0), *monitor, on(100, 1, 0, 30), counted(110, 90, 70))
    assert found(tmp_path, *events) == [(30, 100, 1, 70)]


def test_a_thread_that_waited_for_its_turn_longer_than_the_limit_held_it(tmp_path: Path) -> None:
    """Thread 2 has wanted to run since long before, and gets to run long after: others did on its CPU."""
    events = (on(0, 1, 0), off(30, 1, 0), on(100, 1, 0, 30), off(110, 1, 0), on(110, 2, 0, 5), counted(111, 90, 70))
    assert found(tmp_path, *events, off(150, 2, 0)) == [(30, 100, 1, 70)]


def test_what_is_counted_was_over(tmp_path: Path) -> None:
    """Held back twice, for longer the second time, which had begun when the first was counted."""
    events = (on(0, 1, 0), off(4, 1, 0), on(14, 1, 0, 4), off(18, 1, 0), counted(20, 0, 10), on(35, 1, 0, 18))
    assert found(tmp_path, *events, counted(40, 20, 17), off(60, 1, 0)) == [(4, 14, 1, 10), (18, 35, 1, 17)]


def test_a_thread_that_goes_on_on_another_cpu(tmp_path: Path) -> None:
    """Where others ran a moment ago; and one that wakes up later waits there, too."""
    monitor = (on(98, 9, 1, 97.9), off(98.1, 9, 1, blocked=True))
    events = (on(0, 1, 0), off(30, 1, 0), *monitor, on(100, 1, 1, 30), on(100, 2, 0, 60), counted(110, 90, 70))
    assert found(tmp_path, *events) == [(30, 100, 1, 70)]


def test_a_thread_that_wakes_up_when_nothing_is_left_of_the_quota(tmp_path: Path) -> None:
    events = (on(0, 1, 0), off(30, 1, 0, blocked=True), on(100, 2, 0, 45), counted(110, 90, 55))
    assert found(tmp_path, *events) == [(45, 100, 1, 55)]


def test_what_goes_on_before_it_is_counted_and_after(tmp_path: Path) -> None:
    """The thread is on its CPU only after the counters were read; nothing that was over before them is taken for it."""
    events = (on(0, 1, 0), off(10, 1, 0), on(50, 1, 0, 10), off(70, 1, 0), counted(100, 80, 29.5), on(100.2, 1, 0, 70))
    assert found(tmp_path, *events) == [(70, 99.5, 1, 29.5)]


def test_several_periods_at_once(tmp_path: Path) -> None:
    """The recorder was late: two times were counted together."""
    events = (on(0, 1, 0), off(30, 1, 0), on(100, 1, 0, 30), off(140, 1, 0), on(200, 1, 0, 140))
    assert found(tmp_path, *events, counted(210, 90, 130, 2)) == [(30, 100, 2, 130), (140, 200, 0, 0)]


NOT_KNOWN = {
    "short waits only": (on(0, 1, 0), off(85, 1, 0), on(86, 1, 0, 85), counted(110, 90, 70), off(111, 1, 0)),
    "no switches": (counted(110, 90, 70),),
    "over long before": (on(0, 1, 0), off(10, 1, 0), on(80, 1, 0, 10), counted(110, 90, 70), off(120, 1, 0)),
    "not over yet": (on(0, 1, 0), off(115, 1, 0), counted(110, 90, 70), on(185, 1, 0, 115)),
    "since when is not known": (on(0, 1, 0), off(30, 1, 0), on(100, 1, 0), counted(110, 90, 70)),
    "asleep": (on(0, 1, 0), off(30, 1, 0, blocked=True), on(100, 1, 0, 99.9), counted(110, 90, 70)),
    "no time counted": (*ONE_CPU[:3], counted(110, 90, 0)),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_it_is_not_known_when(tmp_path: Path, name: str) -> None:
    (one,) = found(tmp_path, *NOT_KNOWN[name])
    assert one[:3] == (110, 110, 1)


@pytest.mark.parametrize("frame", [Lost(0, 5, STARTED_NS + 40 * MS, STARTED_NS + 50 * MS),
                                   Gap(STARTED_NS + 99 * MS, STARTED_NS + 105 * MS, 5, "x")])  # fmt: skip
def test_where_switches_may_be_missing(tmp_path: Path, frame: Any) -> None:
    assert found(tmp_path, *ONE_CPU, frames=(frame,)) == [(110, 110, 1, 70)]


def test_no_thread_is_made_up(tmp_path: Path) -> None:
    with Recording.open(stored(tmp_path, written(TARGET, *ONE_CPU, stop(9, 5, tid=7)))) as recording:
        assert Timeline(recording).threads.tolist() == [[1, 1], [1, 7]]


def test_many_at_once_take_no_time(tmp_path: Path) -> None:
    """Of a damaged or hostile file."""
    waits = np.concatenate([on(i / 100, 1, 0, i / 100 - 0.005) for i in range(2_000)])
    many = np.concatenate([counted(10, 5, 70)] * 50_000)
    content = written(TARGET, waits, many, waits)
    with Recording.open(stored(tmp_path, content)) as recording:
        throttles = np.concatenate([block.throttles for block in Timeline(recording).blocks()])
    assert len(throttles) == 50_000


def test_a_byte_changed_anywhere_does_no_harm(tmp_path: Path) -> None:
    content = bytearray(written(TARGET, *ONE_CPU, stop(160 * MS, 155 * MS, 156 * MS), counted(170, 150, 5)))
    path = tmp_path / "changed.rec"
    read = 0
    for position in range(len(content) - 8 * 40, len(content)):
        kept = content[position]
        for value in (0x00, 0xFF, kept ^ 0x40):
            content[position] = value
            path.write_bytes(content)
            try:
                with Recording.open(str(path)) as recording:
                    for block in Timeline(recording).blocks():
                        assert (block.throttles["end_ns"] >= block.throttles["begin_ns"]).all()
                        assert (block.stops["time_ns"] >= block.stops["since_ns"]).all()
                        read += 1
            except UnreadableRecording:
                pass
        content[position] = kept
    assert read > 100


def test_stops_that_overlap_are_cut_and_counted(tmp_path: Path) -> None:
    events = (stop(3_000, 1_000, reason=1), stop(5_000, 2_000), stop(6_000, None), stop(8_000, 7_000, 7_500))
    with Recording.open(stored(tmp_path, written(TARGET, goroutine(0), *events))) as recording:
        timeline = Timeline(recording)
        stops = np.concatenate([block.stops for block in timeline.blocks()])
        assert timeline.stopped == [1]
    times = [(int(s["since_ns"]) - STARTED_NS, int(s["time_ns"]) - STARTED_NS) for s in stops]
    assert times == [(1_000, 3_000), (3_000, 5_000), (6_000, 6_000), (7_000, 8_000)]
    assert timeline.clipped == 1


def _stat(folder: Path, periods: int, throttled_periods: int, ns: int) -> None:
    text = f"nr_periods {periods}\nnr_throttled {throttled_periods}\nthrottled_time {ns}\n"
    (folder / "cpu.stat").write_text(text)


def test_the_counters_are_watched(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        _stat(folder, 10, 3, 5_000)
    watch = ThrottleWatch({slot: CpuLimit(0.5, 0.5, str(folder)) for slot, folder in enumerate(folders, 1)})
    assert len(watch.look()) == 0
    _stat(folders[1], 12, 4, 9_000)
    (event,) = watch.look().view(THROTTLED)
    assert (event["type"], event["slot"], event["tid"]) == (EventType.THROTTLED, 2, 0)
    assert (event["periods"], event["throttled_ns"]) == (1, 4_000)
    assert 0 < event["since_ns"] < event["time_ns"]
    (folders[1] / "cpu.stat").unlink()
    _stat(folders[0], 13, 3, 6_000)
    (following,) = watch.look().view(THROTTLED)
    assert (following["slot"], following["periods"], following["throttled_ns"]) == (1, 0, 1_000)
    assert event["since_ns"] < following["since_ns"] <= event["time_ns"]
    assert len(watch.look()) == 0
