"""Spans of goroutines and threads, against a made-up scheduler that knows what it did, and against the report."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedtrace import timeline as timelines
from schedtrace.abi import LostReason
from schedtrace.events import EVENT, TRANSITION, EventType, Flag
from schedtrace.exported import Names, losses, remarks
from schedtrace.join import LOST_NAMES
from schedtrace.last_seen import LastSeen
from schedtrace.lives import NOBODY
from schedtrace.recorded import windows
from schedtrace.recording import Recording
from schedtrace.timeline import KERNEL_STATES, RUNNING_OR_SYSCALL, UNCERTAIN, Block, Timeline
from tests.unit import recordings
from tests.unit.recordings import RUNNABLE, RUNNING, STARTED_NS, WAITING, stored, switch, transition, written
from tests.unit.simulated import Simulation, Span, ThreadSpan


def blocks_of(path: str) -> tuple[Recording, Timeline, list[Block]]:
    with Recording.open(path) as recording:
        timeline = Timeline(recording)
        return recording, timeline, list(timeline.blocks())


def spans_of(recording: Recording, timeline: Timeline, spans: Any) -> list[Span]:
    names = Names(recording, timeline)
    return [
        Span(
            int(timeline.lives["goid"][s["number"]]),
            int(s["begin_ns"]) - STARTED_NS,
            int(s["end_ns"]) - STARTED_NS,
            names.state(int(s["slot"]), int(s["state"]), int(s["cause"]), int(s["reason"])),
            int(s["tid"]),
        )
        for s in spans
    ]


def one_span(path: Path, *events: Any) -> Any:
    """Those of goroutines that the events end."""
    _, _, blocks = blocks_of(stored(path, written(recordings.TARGET, np.concatenate(events))))
    return np.concatenate([block.spans[~block.spans["is_open"]] for block in blocks])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", [1, 1 << 16])
def test_everything_that_happened_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, block: int
) -> None:
    monkeypatch.setattr(timelines, "_BLOCK_EVENTS", block)
    simulation = Simulation(1000, seed)
    recording, timeline, blocks = blocks_of(stored(tmp_path, simulation.file(60)))
    spans = np.concatenate([one.spans for one in blocks])
    assert len(simulation.spans) > 500
    assert sorted(spans_of(recording, timeline, spans[~spans["is_open"]])) == sorted(simulation.spans)
    assert sorted(spans_of(recording, timeline, spans[spans["is_open"]])) == sorted(simulation.open_spans)
    kernel = np.concatenate([one.kernel for one in blocks])
    found = [
        ThreadSpan(
            int(s["tid"]), int(s["begin_ns"]) - STARTED_NS, int(s["end_ns"]) - STARTED_NS, KERNEL_STATES[s["state"]]
        )
        for s in kernel
    ]
    assert sorted(found) == sorted(simulation.thread_spans + simulation.open_thread_spans)
    assert len(simulation.thread_spans) > 50
    assert timeline.clipped == 0
    runs = np.concatenate([one.runs for one in blocks])
    assert sorted(spans_of(recording, timeline, runs)) == sorted(
        span for span in simulation.spans + simulation.open_spans if span.tid
    )


@pytest.mark.parametrize("block", [1, 1 << 16])
def test_who_woke_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(timelines, "_BLOCK_EVENTS", block)
    simulation = Simulation(1000)
    _, timeline, blocks = blocks_of(stored(tmp_path, simulation.file(60)))
    goids = timeline.lives["goid"]
    found, flows = [], {}
    for one in blocks:
        woken = one.wakers != NOBODY
        for move, by, who, flow in zip(
            one.moves[woken], one.wakers[woken], one.numbers[woken], one.flows[woken], strict=True
        ):
            found.append((int(move["time_ns"]) - STARTED_NS, int(goids[by]), int(goids[who])))
            flows[int(flow)] = (int(move["time_ns"]), int(who))
        assert not one.flows[~woken].any()
    assert found == simulation.wakes
    assert len(simulation.wakes) > 80
    # Each wake is the beginning of the span that it has the number of.
    begun = np.concatenate([one.spans[one.spans["flow"] != 0] for one in blocks])
    assert {int(s["flow"]): (int(s["begin_ns"]), int(s["number"])) for s in begun} == flows
    assert set(begun["state"].tolist()) == {RUNNABLE}


def test_a_stack_that_grows_hides_no_waker(tmp_path: Path) -> None:
    copystack = 8
    events = (
        recordings.goroutine(500, g=recordings.OTHER_G),
        recordings.goroutine(500),
        transition(1_000, RUNNABLE, RUNNING, since_ns=500),
        transition(2_000, RUNNING, copystack, since_ns=2_000, flags=Flag.NO_INTERVAL),
        transition(2_100, copystack, RUNNING, since_ns=2_100, flags=Flag.NO_INTERVAL),
        transition(3_000, WAITING, RUNNABLE, g=recordings.OTHER_G, since_ns=500),
        transition(4_000, RUNNING, copystack, since_ns=4_000, flags=Flag.NO_INTERVAL),
        transition(5_000, RUNNING, WAITING, since_ns=1_000),
    )
    _, timeline, blocks = blocks_of(stored(tmp_path, written(recordings.TARGET, np.concatenate(events))))
    moves = blocks[0].moves
    assert (timeline.lives["g"][blocks[0].wakers[moves["old"] == WAITING]]).tolist() == [recordings.G]


def test_spans_agree_with_the_report(tmp_path: Path) -> None:
    path = stored(tmp_path, Simulation(3000).file())
    recording, timeline, blocks = blocks_of(path)
    with Recording.open(path) as again:
        (window,) = windows(again)
    spans = np.concatenate([one.spans for one in blocks])
    names = Names(recording, timeline)
    times: dict[tuple[str, str], int] = {}
    for span in spans:
        state, _, reason = names.state(1, int(span["state"]), 0, int(span["reason"])).partition(" (")
        key = (state, reason[:-1] if state == "waiting" else "")
        times[key] = times.get(key, 0) + int(span["end_ns"] - span["begin_ns"])
    assert times == {(s.state, s.reason): s.time_ns for s in window.states if s.time_ns}
    whole = spans[spans["is_whole"] & (spans["state"] == RUNNABLE)]
    assert len(whole) == window.sched_latency_total.count
    assert int((whole["end_ns"] - whole["begin_ns"]).sum()) == window.sched_latency_total.sum_ns
    kernel = np.concatenate([one.kernel for one in blocks])
    waited = kernel[(kernel["state"] == timelines.RUNNABLE) & ~kernel["is_open"]]
    assert window.run_queue
    assert len(waited) == window.run_queue.count
    assert int((waited["end_ns"] - waited["begin_ns"]).sum()) == window.run_queue.sum_ns


def test_what_began_before_is_not_called_running(tmp_path: Path) -> None:
    begun = one_span(
        tmp_path,
        transition(3_000, RUNNING, WAITING, since_ns=0, flags=Flag.BEGAN_BEFORE),
        transition(4_000, WAITING, RUNNABLE, g=recordings.OTHER_G, since_ns=0, flags=Flag.BEGAN_BEFORE),
    )
    assert begun["state"].tolist() == [RUNNING_OR_SYSCALL, WAITING]
    assert not begun["is_whole"].any()


def test_an_interval_of_which_it_is_not_known_what_it_was(tmp_path: Path) -> None:
    spans = one_span(
        tmp_path,
        transition(1_000, RUNNABLE, RUNNING, since_ns=500),
        transition(3_000, WAITING, RUNNABLE, since_ns=1_000, flags=Flag.INCONSISTENT),
    )
    assert spans["state"].tolist() == [RUNNABLE, UNCERTAIN]
    assert (spans["end_ns"] - spans["begin_ns"]).tolist() == [500, 2_000]


def test_a_transition_that_is_taken_back_ends_nothing(tmp_path: Path) -> None:
    spans = one_span(
        tmp_path,
        transition(1_000, RUNNABLE, RUNNING, since_ns=500),
        transition(2_000, RUNNING, WAITING, since_ns=1_000),
        transition(3_000, RUNNING, WAITING, since_ns=2_000, flags=Flag.TAKEN_BACK),
        transition(5_000, RUNNING, WAITING, since_ns=2_000),
    )
    assert spans["state"].tolist() == [RUNNABLE, RUNNING, RUNNING]
    assert (spans["begin_ns"] - STARTED_NS).tolist() == [500, 1_000, 2_000]
    assert (spans["end_ns"] - STARTED_NS).tolist() == [1_000, 2_000, 5_000]
    assert spans["tid"].tolist() == [0, 101, 101]


def test_preempted_by_another_thread_it_ran_where_it_had_begun(tmp_path: Path) -> None:
    preempted = 9
    spans = one_span(
        tmp_path,
        transition(1_000, RUNNABLE, RUNNING, since_ns=500, cpu=3),
        transition(2_000, RUNNING, WAITING, old=preempted, since_ns=1_000, tid=102),
    )
    assert (spans["tid"].tolist(), spans["cpu"].tolist()) == ([0, 101], [0, 3])


def test_where_events_are_missing_there_are_holes_and_nothing_wrong(tmp_path: Path) -> None:
    simulation = Simulation(1000)
    events = simulation.all_events()
    kept = np.concatenate([events[:400], events[800:]])
    content = written(recordings.TARGET, kept)
    recording, timeline, blocks = blocks_of(stored(tmp_path, content))
    spans = np.concatenate([one.spans for one in blocks])
    ended = spans[~spans["is_open"]]
    moves = kept[kept["type"] == EventType.TRANSITION].view(TRANSITION)
    assert len(ended) == int((moves["left"] != 6).sum())
    # All that is found did happen.
    truth = {(s.begin_ns, s.end_ns, s.state, s.tid) for s in simulation.spans}
    found = {(s.begin_ns, s.end_ns, s.state, s.tid) for s in spans_of(recording, timeline, ended)}
    assert found <= truth


def test_a_thread_whose_switch_was_not_seen(tmp_path: Path) -> None:
    events = np.concatenate(
        [
            switch(1_000, EventType.THREAD_ON, 400),
            switch(5_000, EventType.THREAD_ON, 4_000),  # its switch out is missing
            switch(6_000, EventType.THREAD_OFF, prev_state=0x10),  # it exits
            switch(9_000, EventType.THREAD_ON, 8_500),  # another one of the same number
            switch(9_500, EventType.THREAD_OFF, flags=Flag.UNSEEN),
        ]
    )
    _, timeline, blocks = blocks_of(stored(tmp_path, written(recordings.TARGET, events)))
    kernel = np.concatenate([one.kernel for one in blocks])
    found = [
        (int(s["begin_ns"]) - STARTED_NS, int(s["end_ns"]) - STARTED_NS, KERNEL_STATES[s["state"]]) for s in kernel
    ]
    assert found == [
        (400, 1_000, "runnable"),
        (4_000, 5_000, "runnable"),
        (5_000, 6_000, "on CPU"),
        (8_500, 9_000, "runnable"),
        (9_500, 9_500, "runnable"),
    ]
    assert timeline.threads.tolist() == [[1, 101]]


def test_spans_that_overlap_are_cut_and_counted(tmp_path: Path) -> None:
    _, timeline, blocks = blocks_of(
        stored(
            tmp_path,
            written(
                recordings.TARGET,
                np.concatenate(
                    [
                        transition(2_000, RUNNING, WAITING, since_ns=1_000),
                        transition(3_000, WAITING, RUNNABLE, since_ns=500),
                        transition(3_500, RUNNING, WAITING, since_ns=1_500, g=recordings.OTHER_G),
                    ]
                ),
            ),
        )
    )
    spans, runs = blocks[0].spans, blocks[0].runs
    assert (spans["begin_ns"] - STARTED_NS).tolist() == [1_000, 2_000, 1_500]
    assert (runs["begin_ns"] - STARTED_NS).tolist() == [1_000, 2_000]
    assert timeline.clipped == 2


def test_remarks_say_what_is_missing(tmp_path: Path) -> None:
    path = stored(tmp_path, recordings.whole_file())
    with Recording.open(path) as recording:
        said = remarks(recording, Timeline(recording))
    assert said == [
        "3 events lost, since they were not read fast enough",
        "12 events of 0.000 s were not kept: not kept",
        "server 1234: can't be seen: system calls",
        f"server 1234: lost, 1 times: {LOST_NAMES[LostReason.BEGAN_BEFORE].replace('_', ' ')}",
        "server 1234: the CPU limit held it back for 0.005 s (summed over CPUs) in 2 of 10 periods",
        "not in a recording: which P a thread had",
    ]
    Path(path).write_bytes(recordings.whole_file()[:-5])
    with Recording.open(path) as recording:
        assert next(losses(recording, Timeline(recording))).startswith("the end of the recording: it was cut at byte ")


def test_a_recording_of_a_version_that_did_not_look_for_stops_says_so() -> None:
    old = Path(__file__).parents[1] / "data/recording-1.rec"
    with Recording.open(str(old)) as recording:
        timeline = Timeline(recording)
        (said,) = (text for text in remarks(recording, timeline) if "when the world was stopped" in text)
    assert said.endswith(f"the schedtrace that made the recording ({recording.header.schedtrace}) did not record it")
    assert (timeline.stopped, timeline.throttled) == ([], [])


def test_a_recording_without_events(tmp_path: Path) -> None:
    _, timeline, blocks = blocks_of(stored(tmp_path, written(recordings.TARGET, np.zeros(0, EVENT))))
    assert (len(timeline.lives), len(timeline.threads), timeline.transitions) == (0, 0, 0)
    assert blocks == []


def test_last_seen() -> None:
    last = LastSeen(np.dtype([("x", "<i8")]))

    def put(*items: tuple[int, int]) -> list[tuple[bool, int]]:
        keys, values = np.array([key for key, _ in items]), np.array([(x,) for _, x in items], [("x", "<i8")])
        found, before = last.replace(keys, values)
        return list(zip(found.tolist(), before["x"].tolist(), strict=True))

    assert put((5, 1), (3, 2), (5, 3)) == [(False, 0), (False, 0), (True, 1)]
    assert put((4, 4), (5, 5), (3, 6), (4, 7)) == [(False, 0), (True, 3), (True, 2), (True, 4)]
    assert [column.tolist() for column in last.all()] == [[3, 4, 5], [(6,), (7,), (5,)]]
