"""The report of a file, which needs no kernel: whole, cut, of parts, of many targets."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedtrace import recording_frames
from schedtrace.errors import SchedtraceError
from schedtrace.recorded import Selection, windows
from schedtrace.recording import Recording
from schedtrace.report_json import window_json
from schedtrace.window import OffCpuTotals, ProbeHits, Throttling, WaitParts, Window
from tests.command import one_line_error, run
from tests.unit.recordings import (
    END,
    RUNNABLE,
    RUNNING,
    START_PC,
    STARTED_NS,
    TARGET,
    goroutine,
    some_events,
    some_events_and_what_threads_do,
    stop,
    stored,
    transition,
    whole_file,
    written,
)

COUNTED = recording_frames.KernelCounts({6 * 12 + 1: 1, 14: 1, 2 * 12 + 4: 1, 4 * 12 + 1: 1}, {}, {}, (0,) * 27)
SYMBOLS = recording_frames.Symbols(1, {START_PC: "main.worker"})
FOOTER = recording_frames.Footer(STARTED_NS + 9_000_000, "the duration is over", 9, 0, 9)


def _good(*more: Any, events: Any = None, counts: recording_frames.KernelCounts = COUNTED) -> bytes:
    happened = some_events() if events is None else events
    return written(TARGET, happened, *more, SYMBOLS, replace(END, kernel=counts), FOOTER)


def _windows(folder: Path, content: bytes, selection: Selection = Selection()) -> list[Window]:  # noqa: B008
    with Recording.open(stored(folder, content)) as recording:
        return windows(recording, selection)


def test_a_whole_recording(tmp_path: Path) -> None:
    (window,) = _windows(tmp_path, _good())
    assert window.target == replace(TARGET.target, cgroup_id=78)
    assert (window.duration_ns, window.ended, window.threads) == (9_000_000, "the duration is over", 4)
    assert window.transitions[("dead", "runnable")] == 1
    assert window.sched_latency["new"].sum_ns == 3_000
    assert {f.function for f in window.functions} == {"main.worker"}
    assert window.probes == (ProbeHits("runtime.casgstatus", "+0 push rbp", True, 5),)
    assert (window.throttling, window.overhead_ns) == (Throttling(10, 2, 5_000_000), 4_000)
    assert window.unseen == ("system calls",)
    assert window.lost == {"interval_began_before_window": 1}
    times = {(s.state, s.reason): (s.time_ns, s.count) for s in window.states}
    assert times == {
        ("waiting", "chan receive"): (9_000_000 - 9_000, 1),
        ("waiting", "sleep"): (9_500, 1),
        ("runnable", ""): (3_000 + 9_000_000 - 9_500, 2),
        ("running", ""): (4_000, 1),
    }


def test_stops_of_the_world(tmp_path: Path) -> None:
    """By reason: those that ended in the time that is asked for, and of which the beginning is known."""
    stops = (stop(3_000, 1_000, reason=1), stop(4_000, 3_500), stop(5_000, None), stop(7_000, 6_000, 6_500, reason=1),
             stop(8_000, 7_200, reason=200))  # fmt: skip
    events = np.concatenate([some_events(), *stops])
    (window,) = _windows(tmp_path, _good(events=events))
    assert window.stops
    assert {reason: (h.count, h.sum_ns, h.max_ns) for reason, h in window.stops.items()} == {
        "GC mark termination": (2, 3_000, 2_000),
        "reason not known": (2, 1_300, 800),
    }
    (late,) = _windows(tmp_path, _good(events=events), Selection(since_seconds=5e-6))
    assert late.stops
    assert {reason: (h.count, h.sum_ns) for reason, h in late.stops.items()} == {
        "GC mark termination": (1, 1_000), "reason not known": (1, 800)
    }  # fmt: skip
    (one,) = _windows(tmp_path, _good(events=events), Selection(function="main.worker"))
    assert one.stops is None
    content = _good(events=events)
    (unseen,) = _windows(tmp_path, content.replace(b"stops_seen\xc3", b"stops_seen\xc2"))
    assert unseen.stops is None
    text = run("report", stored(tmp_path, content)).stdout.splitlines()
    place = text.index("Stops of the world  until it is to be started again")
    shown = [line.strip().split("  ")[0] for line in text[place + 2 : place + 4]]
    assert shown == ["GC mark termination", "reason not known"]
    stopped = json.loads(run("report", stored(tmp_path, content), "--json").stdout)["stop_the_world"]
    assert stopped["reason not known"]["count"] == 2
    assert "stop_the_world" not in window_json(replace(window, stops=None))


def test_what_waits_were_for_and_who_was_off_the_cpu(tmp_path: Path) -> None:
    content = _good(events=some_events_and_what_threads_do())
    (window,) = _windows(tmp_path, content)
    assert window.off_cpu
    assert {why: (h.count, h.sum_ns) for why, h in window.off_cpu.items()} == {
        "preempted": (1, 500), "blocked": (0, 0), "woken": (0, 0)
    }  # fmt: skip
    assert window.off_cpu_functions == (OffCpuTotals("main.worker", 1, 500, 0, 500),)
    assert window.wait_parts == WaitParts(3_000, 1_000, None, 0)
    (part,) = _windows(tmp_path, content, Selection(4e-6, 8e-6))
    assert part.wait_parts == window.wait_parts
    assert part.off_cpu_functions == ()
    (one,) = _windows(tmp_path, content, Selection(goroutine=7))
    assert (one.wait_parts, one.off_cpu) == (WaitParts(0, 0, None, 0), None)


def test_where_a_thread_is_not_known_to_run_a_goroutine(tmp_path: Path) -> None:
    about = replace(TARGET, goroutines_of_threads=False)
    (window,) = _windows(tmp_path, written(about, some_events(), SYMBOLS, END, FOOTER))
    assert window.off_cpu is None
    assert window.wait_parts == WaitParts(3_000, 0, None, 0)


def test_what_the_kernel_counted_and_the_file_does_not_have(tmp_path: Path) -> None:
    lost = recording_frames.Lost(cpu=1, count=3, since_ns=STARTED_NS + 5_100, until_ns=STARTED_NS + 8_000)
    more = replace(COUNTED, transitions={**COUNTED.transitions, 14: 3})
    (window,) = _windows(tmp_path, _good(lost, counts=more))
    assert window.lost == {"interval_began_before_window": 1, "recording_buffer_full": 3}
    assert window.unseen[1:] == ("2 of 6 transitions that the kernel counted: the file does not have them",)


def test_a_cut_recording_says_so(tmp_path: Path) -> None:
    whole = _good()
    (window,) = _windows(tmp_path, whole[: whole.index(b"main.worker")])
    assert "the end of the recording: it was cut at byte" in window.unseen[1]
    assert (window.duration_ns, window.ended, window.probes, window.throttling) == (10_000, "", (), None)
    assert window.sched_latency["new"].sum_ns == 3_000
    assert window.threads == 1
    assert {f.function for f in window.functions} == {"(unknown)"}


def test_a_part_of_the_time(tmp_path: Path) -> None:
    (window,) = _windows(tmp_path, _good(), Selection(4e-6, 8e-6))
    assert window.transitions == {("runnable", "running"): 1}
    assert window.duration_ns == 4_000
    assert {(s.state, s.time_ns) for s in window.states} == {("runnable", 1_000), ("running", 3_000)}
    assert (window.probes, window.overhead_ns, window.throttling) == ((), None, None)
    assert any("counted for a whole recording only" in remark for remark in window.unseen)


def test_some_goroutines(tmp_path: Path) -> None:
    (by_id,) = _windows(tmp_path, _good(), Selection(goroutine=18))
    assert by_id.transitions == {("dead", "runnable"): 1, ("runnable", "running"): 1, ("running", "waiting"): 1}
    assert by_id.goroutines == 1
    (by_name,) = _windows(tmp_path, _good(), Selection(function="main.*"))
    assert sum(by_name.transitions.values()) == 4
    assert (by_name.run_queue, by_name.off_cpu, by_name.off_cpu_functions) == (None, None, ())
    assert any("not told of single goroutines" in remark for remark in by_name.unseen)
    for wrong in (Selection(goroutine=19), Selection(function="worker"), Selection(goroutine=18, function="x*")):
        with pytest.raises(SchedtraceError, match="no such goroutine"):
            _windows(tmp_path, _good(), wrong)


def test_what_was_not_kept(tmp_path: Path) -> None:
    gap = recording_frames.Gap(STARTED_NS, STARTED_NS + 3_000_000, 1_234, "older than what was to be kept")
    kept = np.concatenate([goroutine(1_000), transition(4_000_000, RUNNABLE, RUNNING, since_ns=3_500_000)])
    (window,) = _windows(tmp_path, written(TARGET, gap, kept, SYMBOLS, END, FOOTER))
    assert window.duration_ns == 1  # from the first to the last thing that happened
    assert window.sched_latency["new"].sum_ns == 500_000
    assert "1,234 events of 0.003 s that were not kept: older than what was to be kept" in window.unseen
    assert (window.probes, window.ended) == ((), "")


def test_nothing_was_kept(tmp_path: Path) -> None:
    gap = recording_frames.Gap(STARTED_NS, STARTED_NS + 3_000_000, 1_234, "nothing happened that was waited for")
    with pytest.raises(SchedtraceError, match="no events in it"):
        _windows(tmp_path, written(TARGET, gap, END, FOOTER))


def test_several_targets(tmp_path: Path) -> None:
    other = replace(TARGET, slot=2, target=replace(TARGET.target, pid=5678))
    content = written(TARGET, other, some_events(), transition(50, RUNNABLE, RUNNING, slot=2), FOOTER)
    assert [window.target.pid for window in _windows(tmp_path, content)] == [1234, 5678]
    (only,) = _windows(tmp_path, content, Selection(pid=5678))
    assert only.transitions == {("runnable", "running"): 1}
    with pytest.raises(SchedtraceError, match="no process 1 in it; there is 1234, 5678"):
        _windows(tmp_path, content, Selection(pid=1))


def test_a_time_that_is_not_in_it(tmp_path: Path) -> None:
    said = "nothing of process 1234 in that time; the recording is 0.009 s long"
    for selection in (Selection(since_seconds=0.009), Selection(0.004, 0.004), Selection(until_seconds=0.0)):
        with pytest.raises(SchedtraceError, match=said):
            _windows(tmp_path, _good(), selection)


EXAMPLE = Path(__file__).parents[2] / "examples/nats-server.rec"
VERSION_1 = Path(__file__).parents[1] / "data/recording-1.rec"


def test_the_first_version_is_read_still() -> None:
    """A ping-pong of 53 round trips, which parks as often as it says."""
    with Recording.open(str(VERSION_1)) as recording:
        assert recording.event_count == 477
        (window,) = windows(recording)
        (pong,) = windows(recording, Selection(function="main.pong"))
    assert {f.function: f.parks for f in window.functions} == {"main.ping": 53, "main.pong": 53, "runtime.main": 2}
    assert window.transitions["waiting", "runnable"] == 108
    assert (window.sched_latency_total.count, window.lost) == (111, {})
    assert not any("kernel counted" in remark for remark in window.unseen)
    assert [f.runs for f in pong.functions] == [54]
    # what it doesn't tell is no zero
    assert (window.off_cpu, window.off_cpu_functions, window.wait_parts) == (None, (), None)
    assert any("made the recording (0.1.0) did not record it" in remark for remark in window.unseen)


def test_the_example_is_a_real_recording() -> None:
    with Recording.open(str(EXAMPLE)) as recording:
        assert (recording.cut, recording.gaps, recording.lost) == ("", (), ())
        (window,) = windows(recording)
    assert window.target.name == "nats-server"
    assert window.sched_latency_total.count > 5_000
    assert window.stops
    stops = {name: one.count for name, one in window.stops.items()}
    assert stops == {"GC sweep termination": 2, "GC mark termination": 2}
    assert any(f.function.endswith("server.(*Server).startGoRoutine.func1") for f in window.functions)
    assert window.unseen[0] == "system calls: a goroutine in one counts as running"


def test_the_documented_program_reads_the_example() -> None:
    text = (EXAMPLE.parents[1] / "docs/recording.md").read_text()
    block = text[text.index("    from schedtrace.events") : text.index("What is behind a cut is not read")]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(block)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=EXAMPLE.parents[1],
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert any("startGoRoutine" in line for line in lines)


def test_the_command_prints_what_attach_does(tmp_path: Path) -> None:
    path = stored(tmp_path, _good())
    (window,) = _windows(tmp_path, _good())
    done = run("report", path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(json.dumps(window_json(window)))
    text = run("report", path)
    assert (text.returncode, text.stderr) == (0, "")
    assert "server  PID 1234  go1.27.2" in text.stdout
    assert "main.worker" in text.stdout
    part = run("report", path, "--from", "0.000004", "--to", "0.000008", "--json")
    assert json.loads(part.stdout)["window_seconds"] == pytest.approx(4e-6)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    assert "not a recording of schedtrace" in one_line_error(run("report", "/etc/passwd"), 1)
    assert "No such file" in one_line_error(run("report", tmp_path / "none"), 1)
    path = stored(tmp_path, _good())
    assert "no such goroutine" in one_line_error(run("report", path, "--goroutine", "99"), 1)
    assert "nothing of process" in one_line_error(run("report", path, "--from", "1"), 1)
    assert "--to comes before --from" in one_line_error(run("report", path, "--from", "1", "--to", "0.5"), 2)
    assert "it is empty" in one_line_error(run("report", stored(tmp_path, b"")), 1)
    damaged = Path(stored(tmp_path, whole_file()[:60] + b"\xff" + whole_file()[61:]))
    assert str(damaged) in one_line_error(run("report", damaged), 1)


def test_a_report_needs_no_bcc(tmp_path: Path) -> None:
    program = "import sys; sys.modules['bcc'] = None; from schedtrace.cli import main; sys.exit(main(sys.argv[1:]))"
    path = stored(tmp_path, _good())
    done = subprocess.run([sys.executable, "-c", program, "report", path], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
