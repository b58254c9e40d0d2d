"""What is exported, read again: Perfetto's protobuf, JSON, CSV, HTML."""

import csv
import io
import json
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from schedtrace import abi, export_chrome, export_csv, export_perfetto, recording_frames
from schedtrace.events import EVENT, EventType, Flag, of_type
from schedtrace.packets import Constant, Message, Number, Template, mixed
from schedtrace.picture import CANDIDATES, SLICES, pictures, spread
from schedtrace.recorded import windows
from schedtrace.recording import Recording
from schedtrace.timeline import Timeline
from schedtrace.window import STATES
from tests import perfetto_trace
from tests.unit import recordings
from tests.unit.recordings import RUNNABLE, RUNNING, STARTED_NS, WAITING, stored, transition, written
from tests.unit.simulated import FIRST_TID, Simulation, Span

EXAMPLE = str(Path(__file__).parents[2] / "examples/nats-server.rec")
FORMATS = ("perfetto", "chrome", "csv", "html")


def exported(form: str, path: str) -> bytes:
    pieces: list[bytes] = []
    with Recording.open(path) as recording:
        import_module(f"schedtrace.export_{form}").write(recording, Timeline(recording), pieces.append)
    return b"".join(pieces)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return Simulation(1500)


@pytest.fixture(scope="module")
def path(simulation: Simulation, tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("recording"), simulation.file())


def label(span: Span) -> str:
    return f"G{span.goid or '?'}"


def states_of_example() -> Counter[tuple[int, str]]:
    """By address and state: transitions of the example that end an interval, and goroutines that are in one at its end.
    Of the file's events alone."""
    with Recording.open(EXAMPLE) as recording:
        events = np.concatenate(list(recording.events()))
    found: Counter[tuple[int, str]] = Counter()
    now: dict[int, int] = {}
    for move in of_type(events, EventType.TRANSITION):
        if move["flags"] & (Flag.NO_INTERVAL | Flag.TAKEN_BACK):
            assert not move["flags"] & Flag.TAKEN_BACK, "the example has none"
            continue
        begun_before = move["flags"] & Flag.BEGAN_BEFORE and move["left"] in (2, 3)
        name = "running or syscall" if begun_before else STATES[int(move["left"])]
        found[int(move["g"]), name] += 1
        now[int(move["g"])] = int(move["new"])
    found.update((g, STATES[state]) for g, state in now.items())
    return Counter({key: n for key, n in found.items() if key[1] not in ("dead", "idle")})


# Perfetto


def test_perfetto_has_every_span_on_the_track_of_its_goroutine(simulation: Simulation, path: str) -> None:
    trace = perfetto_trace.read(exported("perfetto", path))
    found = sorted(
        (s.track.split()[0], s.begin_ns - STARTED_NS, s.end_ns - STARTED_NS, s.name, dict(s.annotations).get("tid", 0))
        for s in trace.slices
        if "goroutine" in s.categories
    )
    spans = simulation.spans + simulation.open_spans
    assert found == sorted((label(s), s.begin_ns, s.end_ns, s.state, s.tid) for s in spans)
    assert sum("until the end" in s.categories for s in trace.slices if "goroutine" in s.categories) == len(
        simulation.open_spans
    )
    assert trace.depth == 1


def test_perfetto_has_what_each_thread_ran_and_was(simulation: Simulation, path: str) -> None:
    trace = perfetto_trace.read(exported("perfetto", path))
    ran = sorted(
        (s.track, s.begin_ns - STARTED_NS, s.end_ns - STARTED_NS, s.name.split()[0])
        for s in trace.slices
        if "thread" in s.categories
    )
    spans = [s for s in simulation.spans + simulation.open_spans if s.tid]
    assert ran == sorted((f"M {s.tid}", s.begin_ns, s.end_ns, label(s)) for s in spans)
    kernel = Counter((s.name, s.end_ns - s.begin_ns) for s in trace.slices if "kernel" in s.categories)
    assert kernel == Counter(
        (s.state, s.end_ns - s.begin_ns) for s in simulation.thread_spans + simulation.open_thread_spans
    )


def test_perfetto_has_an_arrow_for_each_wake(simulation: Simulation, path: str) -> None:
    trace = perfetto_trace.read(exported("perfetto", path))
    arrows = [(t - STARTED_NS, a.split()[0], b.split()[0]) for t, a, b in trace.arrows]
    assert sorted(arrows) == sorted((t, f"G{a}", f"G{b or '?'}") for t, a, b in simulation.wakes)
    assert sum(one.name == "wakes" for one in trace.instants) == len(simulation.wakes)


def test_perfetto_names_its_tracks(path: str) -> None:
    tracks = perfetto_trace.read(exported("perfetto", path)).tracks
    process = next(t for t in tracks.values() if t.HasField("process"))
    assert (process.process.pid, process.process.process_name) == (1234, "server")
    threads = {t.thread.tid: t.thread.pid for t in tracks.values() if t.HasField("thread")}
    assert threads == {FIRST_TID: 1234, FIRST_TID + 1: 1234, FIRST_TID + 2: 1234}
    goroutines = next(t for t in tracks.values() if t.name == "goroutines")
    assert goroutines.parent_uuid == process.uuid
    names = [t.name for t in tracks.values() if t.parent_uuid == goroutines.uuid]
    assert {"G7 main.worker", "G8 b.(*Pool).serve", "G9 (unknown)"} <= set(names)


def test_perfetto_counts_are_those_of_a_real_recording() -> None:
    trace = perfetto_trace.read(exported("perfetto", EXAMPLE))
    with Recording.open(EXAMPLE) as recording:
        timeline = Timeline(recording)
    address = {export_perfetto.track_of_goroutine(number): int(life["g"]) for number, life in enumerate(timeline.lives)}
    # Labels need not be unique, so that tracks are told apart by uuid here: names of all goroutines are looked up once.
    by_label: dict[str, set[int]] = {}
    for uuid, g in address.items():
        by_label.setdefault(trace.tracks[uuid].name, set()).add(g)
    assert all(len(gs) == 1 for gs in by_label.values())
    found = Counter(
        (next(iter(by_label[s.track])), s.name.partition(" (")[0]) for s in trace.slices if "goroutine" in s.categories
    )
    assert found == states_of_example()
    assert found.total() > 19_000
    assert trace.depth == 1


def test_perfetto_says_what_is_missing(tmp_path: Path) -> None:
    trace = perfetto_trace.read(exported("perfetto", stored(tmp_path, recordings.whole_file())))
    about = next(one for one in trace.instants if one.name == "about this recording")
    assert about.track == "recording"
    said = [text for name, text in about.annotations if name.startswith("remark")]
    assert "not in a recording: which P a thread had" in said
    on_recording = {
        (s.name, s.begin_ns - STARTED_NS, s.end_ns - STARTED_NS) for s in trace.slices if s.track == "recording"
    }
    assert on_recording == {("12 events not kept: not kept", 5_100, 8_000), ("3 events lost", 5_100, 8_000)}
    assert {one.name for one in trace.instants if one.track == "recording"} == {
        *("about this recording", "end: interrupted", ": 0.003 ms")
    }


def test_perfetto_clocks(path: str) -> None:
    packets = pb.Trace.FromString(exported("perfetto", path)).packet
    snapshot = next(p.clock_snapshot for p in packets if p.HasField("clock_snapshot"))
    assert snapshot.primary_trace_clock == pb.BUILTIN_CLOCK_MONOTONIC
    assert {clock.clock_id: clock.timestamp for clock in snapshot.clocks} == {
        pb.BUILTIN_CLOCK_MONOTONIC: STARTED_NS,
        pb.BUILTIN_CLOCK_REALTIME: recordings.HEADER.started_wall_ns,
    }
    assert packets[0].trace_packet_defaults.timestamp_clock_id == pb.BUILTIN_CLOCK_MONOTONIC
    assert packets[0].sequence_flags == pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED


def test_packets_in_bulk_are_those_of_the_protobuf() -> None:
    times = np.array([0, 127, 128, (1 << 63) - 1], np.uint64)
    flows = np.array([1, 1 << 63, 255, 256], np.uint64)
    plain = Template([(Number(8, "time", 9), Constant(10, 300), Message(11, (Number(11, "track", 5),)))])
    arrow = Template([(Number(8, "time", 9), Message(11, (Constant(9, 3), Number(47, "flow"))))])
    content = mixed(
        [plain, arrow], np.array([0, 1, 0, 1]), time=times, track=np.array([5, 0, (1 << 35) - 1, 0]), flow=flows
    )
    expected = [
        pb.TracePacket(timestamp=0, trusted_packet_sequence_id=300, track_event=pb.TrackEvent(track_uuid=5)),
        pb.TracePacket(timestamp=127, track_event=pb.TrackEvent(type=3, flow_ids=[1 << 63])),
        pb.TracePacket(
            timestamp=128, trusted_packet_sequence_id=300, track_event=pb.TrackEvent(track_uuid=(1 << 35) - 1)
        ),
        pb.TracePacket(timestamp=(1 << 63) - 1, track_event=pb.TrackEvent(type=3, flow_ids=[256])),
    ]
    assert list(pb.Trace.FromString(content).packet) == expected


# Chrome


def test_chrome_has_every_span_and_arrow(simulation: Simulation, path: str) -> None:
    trace = json.loads(exported("chrome", path))
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert list(processes.values()) == [
        "server 1234, goroutines", "server 1234, threads: what they ran", "server 1234, threads: on CPUs",
    ]  # fmt: skip

    def of(kind: int) -> list[dict[str, Any]]:
        number = export_chrome.process_number(0, kind)
        return [e for e in events if e["ph"] == "X" and e["pid"] == number]

    def ns(value: float) -> int:
        return round(value * 1000)

    spans = simulation.spans + simulation.open_spans
    found = sorted(
        (names[e["pid"], e["tid"]].split()[0], ns(e["ts"]), ns(e["dur"]), e["name"])
        for e in of(export_chrome.GOROUTINES)
    )
    assert found == sorted((label(s), s.begin_ns, s.end_ns - s.begin_ns, s.state) for s in spans)
    ran = sorted((e["tid"], ns(e["ts"]), ns(e["dur"]), e["name"].split()[0]) for e in of(export_chrome.THREADS))
    assert ran == sorted((s.tid, s.begin_ns, s.end_ns - s.begin_ns, label(s)) for s in spans if s.tid)
    kernel = sorted(
        (e["tid"] - export_chrome.FIRST_KERNEL, ns(e["ts"]), ns(e["dur"]), e["name"]) for e in of(export_chrome.KERNEL)
    )
    threads = simulation.thread_spans + simulation.open_thread_spans
    assert kernel == sorted((s.tid, s.begin_ns, s.end_ns - s.begin_ns, s.state) for s in threads)
    begins, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    arrows = sorted(
        (ns(begins[i]["ts"]), *(names[e[i]["pid"], e[i]["tid"]].split()[0] for e in (begins, ends))) for i in begins
    )
    assert begins.keys() == ends.keys()
    assert arrows == sorted((t, f"G{a}", f"G{b or '?'}") for t, a, b in simulation.wakes)
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == len(
        {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    )
    assert trace["otherData"]["remarks"][-1] == "not in a recording: which P a thread had"


# CSV


def test_csv_has_a_row_for_each_transition(simulation: Simulation, path: str) -> None:
    rows = list(csv.DictReader(io.StringIO(exported("csv", path).decode(), newline="")))
    moves = of_type(simulation.all_events(), EventType.TRANSITION)
    assert len(rows) == len(moves)
    for row, move in zip(rows, moves, strict=True):
        time_ns = int(move["time_ns"]) - STARTED_NS
        assert int(row["time_ns"]) == time_ns
        assert int(row["unix_ns"]) == time_ns + recordings.HEADER.started_wall_ns
        assert (row["from"], row["to"], row["left"]) == tuple(STATES[int(move[n])] for n in ("old", "new", "left"))
        assert (int(row["tid"]), int(row["cpu"]), row["pid"]) == (move["tid"], move["cpu"], "1234")
        assert int(row["left_ns"]) == move["time_ns"] - move["since_ns"]
        assert bool(row["cause"]) == ("runnable" in (row["to"], row["left"]))
        assert bool(row["reason"]) == ("waiting" in (row["to"], row["left"]))
        assert row["remark"] == ("began before" if move["flags"] else "")
    goids = {row["goroutine"]: row["goid"] for row in rows}
    woken = [(int(r["time_ns"]), int(goids[r["waker"]]), int(r["goid"] or 0)) for r in rows if r["waker"]]
    assert woken == simulation.wakes
    assert {row["function"] for row in rows} == {"main.worker", "example.com/a/b.(*Pool).serve", "(unknown)"}


def test_csv_quotes_and_blanks(tmp_path: Path) -> None:
    events = np.concatenate([
        recordings.goroutine(900, goid=5),
        transition(1_000, RUNNABLE, RUNNING, since_ns=500, cause=4),
        transition(1_500, RUNNING, 8, since_ns=1_500, flags=Flag.NO_INTERVAL),
        transition(2_000, RUNNING, WAITING, since_ns=1_000, flags=Flag.TAKEN_BACK, reason=1),
        transition(3_000, WAITING, RUNNABLE, since_ns=1_000, flags=Flag.INCONSISTENT, cause=3),
    ])  # fmt: skip
    content = written(
        recordings.TARGET, events, recording_frames.Symbols(1, {recordings.START_PC: 'main.f[a,b] "x"\n'})
    )
    text = exported("csv", stored(tmp_path, content)).decode()
    assert text.splitlines()[0] == ",".join(export_csv.COLUMNS)
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert [row[4:6] for row in rows[1:]] == [
        ["5", 'main.f[a,b] "x"\\x0a'],
        ["", ""],
        *[["5", 'main.f[a,b] "x"\\x0a']] * 2,
    ]
    assert [row[11:] for row in rows[1:]] == [
        ["500", "select", "", "", ""],
        ["", "", "", "", "no interval"],
        ["", "", "chan receive", "", "taken back"],
        ["2000", "channel", "", "", "inconsistent"],
    ]


def test_times_before_the_start_are_negative(tmp_path: Path) -> None:
    early = transition(-1_500, RUNNABLE, RUNNING, since_ns=-2_000)
    path = stored(tmp_path, written(recordings.TARGET, early))
    assert exported("csv", path).decode().splitlines()[1].split(",")[0] == "-1500"
    (event,) = (
        e for e in json.loads(exported("chrome", path))["traceEvents"] if e.get("name", "").startswith("runnable")
    )
    assert (event["ts"], event["dur"]) == (0.0, 0.0)  # before its target was watched


# HTML


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_html_is_one_page_that_asks_for_nothing() -> None:
    page = _Page(exported("html", EXAMPLE).decode())
    assert page.links == ["data:,"]
    assert page.tags["svg"] == 4
    assert page.tags["script"] == 1
    assert page.tags["table"] == 3


def test_html_functions_are_those_of_the_report() -> None:
    with Recording.open(EXAMPLE) as recording:
        (window,) = windows(recording)
        timeline = Timeline(recording)
        (picture,) = pictures(timeline, [1 if 1 in recording.targets else next(iter(recording.targets))])
        names = {pc: name for (_, pc), name in recording.symbols.items()}
    found = {names[f.start_pc]: f for f in picture.functions}
    assert {f.function for f in window.functions} == set(found)
    for function in window.functions:
        mine = found[function.function]
        assert (mine.runs, mine.runnable_ns, mine.running_ns, mine.waiting_ns) == (
            function.runs, function.runnable_ns, function.running_ns, function.waiting_ns,
        )  # fmt: skip
        assert mine.longest_runnable_ns == function.max_runnable_ns
    assert picture.latency.sum(axis=0).tolist() == list(window.sched_latency_total.slots)
    assert max(w.end_ns - w.begin_ns for w in picture.worst) == window.sched_latency_total.max_ns
    # The report has no time before a first move of which it can't tell what it was.
    known_ns = picture.states[:, : abi.GoroutineState.COUNT].sum()
    assert known_ns == pytest.approx(sum(s.time_ns for s in window.states), rel=1e-9)


def test_what_ran_instead(tmp_path: Path) -> None:
    other, third = recordings.OTHER_G, recordings.G + 0x4000
    events = np.concatenate([
        *(recordings.goroutine(100, goid=i, g=g) for i, g in ((1, recordings.G), (2, other), (3, third))),
        transition(1_000, WAITING, RUNNABLE, since_ns=100, cause=3),
        transition(2_000, RUNNABLE, RUNNING, since_ns=1_500, g=other, tid=102),
        transition(8_000, RUNNING, WAITING, since_ns=2_000, g=other, tid=102),
        recordings.switch(500, EventType.THREAD_OFF, prev_state=0),
        transition(9_000, RUNNABLE, RUNNING, since_ns=8_500, g=third, tid=102),
        recordings.switch(10_000, EventType.THREAD_ON, 500, cpu=1),
        transition(11_000, RUNNABLE, RUNNING, since_ns=1_000, cause=3),
        transition(30_000, RUNNING, WAITING, since_ns=9_000, g=third, tid=102),
    ])  # fmt: skip
    path = stored(tmp_path, written(recordings.TARGET, events))
    with Recording.open(path) as recording:
        (picture,) = pictures(Timeline(recording), [1])
        worst = picture.worst[0]
    assert (worst.begin_ns - STARTED_NS, worst.end_ns - STARTED_NS, worst.cause, worst.tid) == (1_000, 11_000, 3, 101)
    assert [ns for _, ns in worst.ran] == [6_000, 2_000]
    assert worst.thread_ns == [1_000, 9_000, 0, 0]
    assert worst.others == 2
    assert len(picture.worst) == 1
    assert CANDIDATES > 2


def test_time_is_spread_over_slices() -> None:
    begin, end, group = np.array([0, 5, 15, -10, 119 * 10]), np.array([10, 6, 45, 3, 5000]), np.array([0, 1, 1, 0, 0])
    found = spread(begin, end, group, 2, 10)
    expected = np.zeros((SLICES, 2))
    for a, b, g in zip(begin, end, group, strict=True):
        for t in range(max(a, 0), min(b, SLICES * 10)):
            expected[t // 10, g] += 1
    assert found.tolist() == expected.tolist()


# What happens to all of a process

STOPS_AND_THROTTLES = np.concatenate([
    recordings.goroutine(0),
    transition(1_000, WAITING, RUNNABLE, since_ns=500, cause=3),
    recordings.stop(3_000, 1_500, 2_000, reason=1),
    recordings.switch(4_000, EventType.THREAD_OFF, prev_state=0, cpu=1),
    recordings.stop(4_500, None),
    recordings.stop(5_000, 4_600, reason=9),
    recordings.switch(90_000, EventType.THREAD_ON, 4_000, cpu=1),
    recordings.throttled(91_000, 80_000, 86_000),
    recordings.throttled(191_000, 180_000, 50_000, periods=2),
    recordings.switch(200_000, EventType.THREAD_OFF, prev_state=1, cpu=1),
])  # fmt: skip
"""Three stops, of one of which the beginning is not known and of another the reason; and the CPU limit has held a
thread back twice, of which it is not known the second time when that was."""


@pytest.fixture
def held_path(tmp_path: Path) -> str:
    return stored(tmp_path, written(recordings.TARGET, STOPS_AND_THROTTLES))


def test_perfetto_has_stops_and_throttles(held_path: str) -> None:
    trace = perfetto_trace.read(exported("perfetto", held_path))
    found = [
        (s.track, s.name, s.begin_ns - STARTED_NS, s.end_ns - STARTED_NS, dict(s.annotations))
        for s in [*trace.slices, *trace.instants]
        if {"stop", "limit"} & {*s.categories}
    ]
    assert sorted(found, key=str) == sorted(
        [
            ("stop the world", "GC mark termination", 1_500, 3_000, {"tid": 101, "stopping_ns": 500}),
            ("stop the world", "reason not known", 4_500, 4_500, {"tid": 101}),
            ("stop the world", "reason not known", 4_600, 5_000, {"tid": 101}),
            ("CPU limit", "throttled", 4_000, 90_000, {"periods": 1, "throttled_ns": 86_000}),
            ("CPU limit", "throttled, some time before", 191_000, 191_000, {"periods": 2, "throttled_ns": 50_000}),
        ],
        key=str,
    )
    process = next(t for t in trace.tracks.values() if t.HasField("process"))
    assert {t.name for t in trace.tracks.values() if t.parent_uuid == process.uuid} == {
        *("goroutines", "stop the world", "CPU limit")
    }


def test_chrome_has_stops_and_throttles(held_path: str) -> None:
    events = json.loads(exported("chrome", held_path))["traceEvents"]
    number = export_chrome.process_number(0, export_chrome.WHOLE)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == number}
    own = [e for e in events if e["pid"] == number and e["ph"] == "X"]
    assert [(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in own] == [
        ("stop the world", "GC mark termination", 1.5, 1.5, {"tid": 101, "stopping_ns": 500}),
        ("stop the world", "reason not known", 4.5, 0.0, {"tid": 101}),
        ("stop the world", "reason not known", 4.6, 0.4, {"tid": 101}),
        ("CPU limit", "throttled", 4.0, 86.0, {"periods": 1, "throttled_ns": 86_000}),
        ("CPU limit", "throttled, some time before", 191.0, 0.0, {"periods": 2, "throttled_ns": 50_000}),
    ]
    assert "server 1234, the process" in {e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_csv_has_stops_and_throttles(held_path: str) -> None:
    rows = list(csv.DictReader(io.StringIO(exported("csv", held_path).decode(), newline="")))
    columns = ("time_ns", "pid", "tid", "left", "left_ns", "reason", "remark")
    own = [row for row in rows if row["left"] in ("stop the world", "CPU limit")]
    assert [tuple(row[column] for column in columns) for row in own] == [
        ("3000", "1234", "101", "stop the world", "1500", "GC mark termination", ""),
        ("4500", "1234", "101", "stop the world", "", "reason not known", "began before"),
        ("5000", "1234", "101", "stop the world", "400", "reason not known", ""),
        ("90000", "1234", "", "CPU limit", "86000", "periods=1 throttled_ns=86000", ""),
        ("191000", "1234", "", "CPU limit", "", "periods=2 throttled_ns=50000", "some time before"),
    ]
    assert all(int(row["unix_ns"]) - int(row["time_ns"]) == recordings.HEADER.started_wall_ns for row in rows)
    assert not any(row[column] for row in rows[1:] for column in ("goroutine", "from", "to", "cause", "waker"))


def test_html_has_stops_and_throttles(held_path: str) -> None:
    rows = [row for row in _Page(exported("html", held_path).decode()).rows if len(row) == 4]
    assert [[cell.partition("\n")[0] for cell in row] for row in rows] == [
        ["held back by", "times", "in all", "longest"],
        ["CPU limit", "1", "86.0 µs", "86.0 µs"],
        ["stop the world: GC mark termination", "1", "1.50 µs", "1.50 µs"],
        ["stop the world: reason not known", "2", "400 ns", "400 ns"],
    ]


# All


@pytest.mark.parametrize("form", FORMATS)
def test_names_of_strangers_do_no_harm(tmp_path: Path, form: str) -> None:
    evil = '</script><script>alert(1)</script>"\\\x00\x1b[2J\udcff<b>&'
    target = recording_frames.RecordedTarget(**{
        **vars(recordings.TARGET), "target": recordings.TARGET.target.__class__(**{
            **vars(recordings.TARGET.target), "name": evil, "go_version": evil}),
        "reasons": ("", evil, evil), "unseen": (evil,), "stop_reasons": (evil, evil),
    })  # fmt: skip
    events = np.concatenate([recordings.some_events(), recordings.stop(9_900, 9_800, reason=1)])
    content = written(target, events, recording_frames.Symbols(1, {recordings.START_PC: evil}))
    text = exported(form, stored(tmp_path, content))
    assert b"\x1b[2J" not in text
    if form == "chrome":
        json.loads(text)
    if form == "csv":
        assert {len(row) for row in csv.reader(io.StringIO(text.decode(), newline=""))} == {len(export_csv.COLUMNS)}
    if form == "html":
        assert _Page(text.decode()).tags["script"] == 1
        assert b"<b>" not in text
        assert b"&lt;b&gt;" in text


@pytest.mark.parametrize("form", FORMATS)
def test_recordings_with_nothing_in_them(tmp_path: Path, form: str) -> None:
    for i, content in enumerate(
        (written(), written(recordings.TARGET), written(recordings.TARGET, np.zeros(0, EVENT)))
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert exported(form, stored(folder, content))


@pytest.mark.parametrize("form", FORMATS)
def test_extreme_times(tmp_path: Path, form: str) -> None:
    last = (1 << 63) - 1 - STARTED_NS
    events = np.concatenate([
        recordings.goroutine(0),
        transition(last, RUNNING, WAITING, since_ns=-STARTED_NS),
        transition(-STARTED_NS, WAITING, RUNNABLE, since_ns=last),
        recordings.switch(last, EventType.THREAD_ON, 1 - STARTED_NS),
        recordings.switch(-STARTED_NS, EventType.THREAD_OFF),
        recordings.stop(last, 1 - STARTED_NS, 1 - STARTED_NS),
        recordings.stop(-STARTED_NS, None),
        recordings.throttled(last, -STARTED_NS, (1 << 63) - 1, periods=(1 << 32) - 1),
        recordings.throttled(-STARTED_NS, -STARTED_NS, 0),
    ])  # fmt: skip
    assert exported(form, stored(tmp_path, written(recordings.TARGET, events)))
