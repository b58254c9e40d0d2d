"""Exported traces in a real viewer: its trace processor finds what was recorded, and its screen shows it."""

from collections import Counter
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from schedtrace.export_chrome import GOROUTINES, process_number
from tests.browser.conftest import until, viewing
from tests.unit.recordings import STARTED_NS, TARGET, stored, written
from tests.unit.simulated import FIRST_TID, Simulation
from tests.unit.test_export import STOPS_AND_THROTTLES, exported, label

_WHOLE = {"stop the world", "CPU limit"}


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return Simulation(1500)


@pytest.fixture(scope="module")
def path(simulation: Simulation, tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("recording"), simulation.file())


def test_a_perfetto_trace(browser: Chrome, simulation: Simulation, path: str) -> None:
    with viewing(browser, exported("perfetto", path)) as viewer:
        assert viewer.query("select name, value from stats where severity != 'info' and value > 0") == []
        spans = simulation.spans + simulation.open_spans
        found = viewer.query(
            "select t.name, s.ts, s.dur, s.name, s.depth from slice s join track t on s.track_id = t.id "
            "where s.category like 'goroutine%'"
        )
        assert sorted(
            (track.split()[0], ts - STARTED_NS, dur, name, depth) for track, ts, dur, name, depth in found
        ) == sorted((label(s), s.begin_ns, s.end_ns - s.begin_ns, s.state, 0) for s in spans)
        found = viewer.query(
            "select tid, s.ts, s.dur, s.name from slice s join thread_track t on s.track_id = t.id "
            "join thread using (utid) where s.category like 'thread%'"
        )
        assert sorted((tid, ts - STARTED_NS, dur, name.split()[0]) for tid, ts, dur, name in found) == sorted(
            (s.tid, s.begin_ns, s.end_ns - s.begin_ns, label(s)) for s in spans if s.tid
        )
        kernel = viewer.query("select name, dur from slice where category like 'kernel%'")
        threads = simulation.thread_spans + simulation.open_thread_spans
        assert Counter(map(tuple, kernel)) == Counter((s.state, s.end_ns - s.begin_ns) for s in threads)
        arrows = viewer.query(
            "select o.ts, p.name, i.ts, q.name from flow f "
            "join slice o on f.slice_out = o.id join slice i on f.slice_in = i.id "
            "join track p on o.track_id = p.id join track q on i.track_id = q.id"
        )
        assert all(out_ts == in_ts for out_ts, _, in_ts, _ in arrows)
        assert sorted((ts - STARTED_NS, a.split()[0], b.split()[0]) for ts, a, _, b in arrows) == sorted(
            (ts, f"G{a}", f"G{b or '?'}") for ts, a, b in simulation.wakes
        )
        viewer.expand()
        expected = {"server 1234", "goroutines", "recording", "G7 main.worker", "G8 b.(*Pool).serve", f"M {FIRST_TID}"}
        until(lambda: expected <= viewer.tracks())


def test_stops_and_throttles(browser: Chrome, tmp_path: Path) -> None:
    path = stored(tmp_path, written(TARGET, STOPS_AND_THROTTLES))
    for form in ("perfetto", "chrome"):
        with viewing(browser, exported(form, path)) as viewer:
            wanted = "'throttled', 'GC mark termination', 'reason not known'"
            found = viewer.query(f"select name, dur from slice where name in ({wanted})")
            assert sorted(map(tuple, found)) == [
                ("GC mark termination", 1_500),
                ("reason not known", 0),
                ("reason not known", 400),
                ("throttled", 86_000),
            ]
            viewer.expand()
            until(lambda: {n for track in viewer.tracks() for n in _WHOLE if track.startswith(n)} == _WHOLE)


def test_chromes_json(browser: Chrome, simulation: Simulation, path: str) -> None:
    with viewing(browser, exported("chrome", path)) as viewer:
        assert viewer.query("select name, value from stats where severity = 'error' and value > 0") == []
        found = viewer.query(
            "select thread.name, s.dur, s.name from slice s join thread_track t on s.track_id = t.id "
            f"join thread using (utid) join process using (upid) where process.pid = {process_number(0, GOROUTINES)}"
        )
        spans = simulation.spans + simulation.open_spans
        assert sorted((thread.split()[0], dur, name) for thread, dur, name in found) == sorted(
            (label(s), s.end_ns - s.begin_ns, s.state) for s in spans
        )
        ((arrows,),) = viewer.query("select count(*) from flow")
        assert arrows == len(simulation.wakes)
        viewer.expand()
        until(lambda: any(name.startswith("G7 main.worker") for name in viewer.tracks()))
