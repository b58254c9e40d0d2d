"""Recordings of real processes: every transition once, and replayed as the kernel counted them."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedtrace.abi import GoroutineState as State
from schedtrace.bpf_text import source_text
from schedtrace.compilation import Compilation
from schedtrace.condition import Condition
from schedtrace.errors import NotTraceable, SchedtraceError
from schedtrace.events import EventType, Flag, of_type
from schedtrace.lives import NOBODY, Lives, wakers
from schedtrace.recorded import LOST_EVENTS, Selection
from schedtrace.recording import Recording
from schedtrace.window import Window
from tests.command import COMMAND, one_line_error, run
from tests.recorded import Result, in_one_order, recording, until
from tests.workload import Workload, binary
from tools import pgo, toolchains

ROUND_TRIPS = 20_011
PINGPONG = ("main.ping", "main.pong")


def _transitions_of(result: Result, functions: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Transitions of goroutines that began with these functions, the numbers of those, and all goroutines."""
    lives = Lives()
    with Recording.open(result.path) as read:
        pieces = [lives.follow(events) for events in read.events()]
        names = read.symbols
    moves = np.concatenate([moves for moves, _ in pieces])
    numbers = np.concatenate([numbers for _, numbers in pieces])
    table = lives.table
    wanted = {i for i, life in enumerate(table) if names.get((int(life["slot"]), int(life["start_pc"]))) in functions}
    chosen = np.isin(numbers, sorted(wanted))
    return moves[chosen], numbers[chosen], table


def _count(moves: Any, old: State, new: State) -> int:
    return int(((moves["old"] == old) & (moves["new"] == new)).sum())


@pytest.mark.parametrize("version", toolchains.RELEASES)
def test_every_transition_is_in_the_file_once(tmp_path: Path, version: str) -> None:
    with Workload(binary("pingpong", version), "-n", ROUND_TRIPS) as target:
        with recording([target.pid], tmp_path) as result:
            target.run()
        moves, numbers, table = _transitions_of(result, PINGPONG)
    assert len(np.unique(numbers)) == 2
    assert _count(moves, State.RUNNING, State.WAITING) == 2 * ROUND_TRIPS
    assert _count(moves, State.WAITING, State.RUNNABLE) == 2 * ROUND_TRIPS
    assert _count(moves, State.DEAD, State.RUNNABLE) == 2
    assert _count(moves, State.RUNNING, State.DEAD) == 2
    # each interval begins where the one before has ended
    for number in np.unique(numbers):
        own = moves[numbers == number]
        assert (own["since_ns"][1:] == own["time_ns"][:-1]).all()
        assert (own["left"][1:] == own["new"][:-1]).all()
    # they know each other by what Go calls them, and nobody has the other's id
    ids = table["goid"][np.unique(numbers)]
    assert ids.all()
    assert len(set(ids.tolist())) == 2
    assert in_one_order(result.replayed()[0]) == in_one_order(result.live[0])


def test_who_woke_whom(tmp_path: Path) -> None:
    """Ping and pong wake each other, and are made by main."""
    with Workload(binary("pingpong"), "-n", ROUND_TRIPS) as target:
        with recording([target.pid], tmp_path) as result:
            target.run()
        lives = Lives()
        moves, numbers = lives.follow(result.events())
        _, own_numbers, table = _transitions_of(result, PINGPONG)
    by = wakers(moves, numbers)
    players = np.unique(own_numbers)
    woken = np.isin(numbers, players) & (moves["old"] == State.WAITING) & (moves["new"] == State.RUNNABLE)
    assert woken.sum() == 2 * ROUND_TRIPS
    assert (np.sort(by[woken][by[woken] != numbers[woken]])).size == 2 * ROUND_TRIPS
    assert np.isin(by[woken], players).all()
    made = np.isin(numbers, players) & (moves["old"] == State.DEAD)
    makers = by[made]
    assert NOBODY not in makers
    assert table["goid"][makers].tolist() == [1, 1]  # main


IDENTITY: list[tuple[str, str, bool]] = [
    ("mixed", "1.19", False),
    ("mixed", "1.25", True),
    ("mixed", "1.27", False),
    ("torture", "1.22", False),
    ("torture", "1.26", True),
    ("torture", "1.27", False),
    ("coroutines", "1.23", False),
    ("coroutines", "1.27", False),
    ("syscalls", "1.21", True),
    ("syscalls", "1.27", True),
    ("latencies", "1.24", False),
    ("latencies", "1.27", False),
]


@pytest.mark.parametrize(("name", "version", "syscalls"), IDENTITY)
def test_the_report_of_a_recording_is_what_attach_shows(
    tmp_path: Path, name: str, version: str, syscalls: bool
) -> None:
    with Workload(binary(name, version)) as target, recording([target.pid], tmp_path, syscalls=syscalls) as result:
        target.run()
    live, replayed = result.live[0], result.replayed()[0]
    assert sum(live.transitions.values()) > 2_000
    assert replayed.sched_latency == live.sched_latency
    assert replayed.wait == live.wait
    assert live.run_queue
    assert replayed.run_queue == live.run_queue
    assert replayed.off_cpu == live.off_cpu
    assert replayed.wait_parts == live.wait_parts
    assert live.run_queue.count > 100
    assert in_one_order(replayed) == in_one_order(live)


@pytest.mark.parametrize("version", ["1.22", "1.27"])
def test_also_of_a_build_whose_casgstatus_is_inlined(tmp_path: Path, version: str) -> None:
    with Workload(pgo.build_pgo(version), "-n", ROUND_TRIPS) as target, recording([target.pid], tmp_path) as result:
        target.run()
    assert result.live[0].target.mode == "functions"
    assert in_one_order(result.replayed()[0]) == in_one_order(result.live[0])


def test_also_where_there_are_more_goroutines_than_can_be_followed(tmp_path: Path) -> None:
    with Workload(binary("mixed")) as target, recording([target.pid], tmp_path, max_goroutines=16) as result:
        target.run()
    assert result.live[0].lost["goroutine_table_full"] > 1_000
    assert in_one_order(result.replayed()[0]) == in_one_order(result.live[0])


def _own(window: Window) -> dict[str, int]:
    return {f.function: f.parks for f in window.functions if f.function in PINGPONG}


def test_several_processes_of_one_program(tmp_path: Path) -> None:
    program = binary("pingpong")
    with Workload(program, "-n", 1_009) as one, Workload(program, "-n", 2_003) as other:
        with recording([one.pid, other.pid], tmp_path) as result:
            one.run()
            other.run()
        windows = result.replayed()
        assert [window.target.pid for window in windows] == [one.pid, other.pid]
        assert [sum(_own(window).values()) for window in windows] == [2 * 1_009, 2 * 2_003]
        for replayed, live in zip(windows, result.live, strict=True):
            assert replayed.sched_latency == live.sched_latency
            assert replayed.transitions == live.transitions
        (only,) = result.replayed(Selection(pid=other.pid))
    assert only == windows[1]


def test_parts_of_a_recording_add_up(tmp_path: Path) -> None:
    with Workload(binary("mixed")) as target, recording([target.pid], tmp_path) as result:
        target.run()
    (whole,) = result.replayed()
    middle = whole.duration_ns / 2e9
    (first,), (second,) = result.replayed(Selection(until_seconds=middle)), result.replayed(Selection(middle))
    for cause, histogram in whole.sched_latency.items():
        parts = [part.sched_latency[cause] for part in (first, second) if cause in part.sched_latency]
        assert sum(part.count for part in parts) == histogram.count
        assert sum(part.sum_ns for part in parts) == histogram.sum_ns
        assert max(part.max_ns for part in parts) == histogram.max_ns
    assert first.duration_ns + second.duration_ns == pytest.approx(whole.duration_ns, abs=2_000_000)
    running = [sum(s.time_ns for s in part.states if s.state == "running") for part in (first, second, whole)]
    assert running[0] + running[1] == pytest.approx(running[2], rel=0.01)


def test_one_goroutine_and_one_function(tmp_path: Path) -> None:
    with Workload(binary("pingpong"), "-n", ROUND_TRIPS) as target, recording([target.pid], tmp_path) as result:
        target.run()
    (whole,) = result.replayed()
    (ping,) = result.replayed(Selection(function="main.ping"))
    (both,) = result.replayed(Selection(function="main.p?ng"))
    assert [f.function for f in ping.functions] == ["main.ping"]
    assert ping.functions == tuple(f for f in whole.functions if f.function == "main.ping")
    assert {f.function for f in both.functions} == set(PINGPONG)
    assert both.transitions["running", "waiting"] == 2 * ROUND_TRIPS
    _, numbers, table = _transitions_of(result, ("main.ping",))
    (by_id,) = result.replayed(Selection(goroutine=int(table["goid"][numbers[0]])))
    assert by_id == ping
    with pytest.raises(SchedtraceError, match="no such goroutine"):
        result.replayed(Selection(function="main.pang"))


def test_events_that_nobody_reads_are_counted_as_lost(tmp_path: Path) -> None:
    """With the smallest buffer, and no reader: what is in the file and what was lost are all that there was."""
    with Workload(binary("pingpong"), "-n", ROUND_TRIPS) as target:
        with recording([target.pid], tmp_path, buffer_pages=16, drain=False) as result:
            target.run()
        assert result.recorded
        (live,), (replayed,) = result.live, result.replayed()
    with Recording.open(result.path) as read:
        assert sum(one.count for one in read.lost) == result.recorded.lost > 0
        assert read.footer
        assert read.footer.sent == read.footer.written == read.event_count == 16 * 4096 // 48
    missing = sum(live.transitions.values()) - sum(replayed.transitions.values())
    assert 0 < missing <= result.recorded.lost
    assert replayed.lost[LOST_EVENTS] == result.recorded.lost
    assert any(f"{missing:,} of " in remark for remark in replayed.unseen)
    report = run("report", result.path).stdout
    assert "recording buffer full" in report
    assert f"{result.recorded.lost:,}" in report


def test_a_recorder_that_is_stopped(tmp_path: Path) -> None:
    """More events than the buffer holds, while the recorder can't run."""
    path = tmp_path / "stopped.rec"
    with Workload(binary("pingpong"), "-n", 400_009) as target:
        command = [*COMMAND, "record", str(target.pid), "-o", str(path), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recorder:
            try:
                until(lambda: path.exists() and path.stat().st_size > 0)
                time.sleep(1)  # it has written who the target is, and is about to begin
                recorder.send_signal(signal.SIGSTOP)
                target.run()
                recorder.send_signal(signal.SIGCONT)
                recorder.send_signal(signal.SIGTERM)
                assert recorder.wait(60) == 0
            finally:
                recorder.kill()
    with Recording.open(str(path)) as read:
        assert read.footer
        lost = sum(one.count for one in read.lost)
        assert lost == read.footer.lost > 100_000
        (end,) = read.ends.values()
        in_file = sum(len(of_type(events, EventType.TRANSITION)) for events in read.events())
    counted = sum(end.kernel.transitions.values())
    assert counted - lost <= in_file < counted
    assert f"{lost:,}" in run("report", path).stdout


def test_a_recorder_that_is_killed_leaves_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "killed.rec"
    with Workload(binary("pingpong"), "-n", ROUND_TRIPS) as target:
        command = [*COMMAND, "record", str(target.pid), "-o", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as recorder:
            try:
                until(lambda: path.exists() and path.stat().st_size > 0)
                target.run()
                size = 6 * ROUND_TRIPS * 40
                until(lambda: path.stat().st_size > size)
            finally:
                recorder.kill()
    with Recording.open(str(path)) as read:
        assert "never ended" in read.cut
        assert read.event_count * 40 > size
    report = run("report", path, "--json")
    assert (report.returncode, report.stderr) == (0, "")
    assert any("never ended" in remark for remark in json.loads(report.stdout)["unseen"])


def test_a_target_that_is_killed(tmp_path: Path) -> None:
    with Workload(binary("mixed")) as target, recording([target.pid], tmp_path) as result:
        target.go()
        time.sleep(0.5)
        target.kill()
        target.wait()
        time.sleep(0.3)
    assert result.recorded
    (live,), (replayed,) = result.live, result.replayed()
    assert result.recorded.ended == live.ended == replayed.ended == f"the target (PID {target.pid}) exited"
    assert replayed.sched_latency_total.count > 500
    assert in_one_order(replayed) == in_one_order(live)


def test_one_of_two_targets_ends_and_the_other_goes_on(tmp_path: Path) -> None:
    """What it was in when it ended is not taken to go on until the recording ends."""
    program = binary("pingpong")
    with Workload(program, "-n", 1_009) as one, Workload(program, "-n", ROUND_TRIPS) as other:
        with recording([one.pid, other.pid], tmp_path) as result:
            one.run()
            assert one.exit() == 0
            began = time.monotonic()
            time.sleep(0.2)
            other.run()
            time.sleep(max(began + 1 - time.monotonic(), 0))
        assert result.recorded
        first, second = result.replayed()
        (late,) = result.replayed(Selection(since_seconds=second.duration_ns / 1e9 - 0.5))
    assert first.ended == f"the target (PID {one.pid}) exited"
    assert (second.ended, result.recorded.ended) == ("interrupted", "interrupted")
    assert sum(_own(first).values()) == 2 * 1_009
    assert sum(_own(second).values()) == 2 * ROUND_TRIPS
    assert first.duration_ns < second.duration_ns - 0.8e9
    running_ns = sum(state.time_ns for state in first.states if state.state == "running")
    assert running_ns < second.duration_ns / 2
    assert in_one_order(replace(first, unseen=())) == in_one_order(replace(result.live[0], unseen=()))
    assert late.target.pid == other.pid


def test_another_process_with_the_same_pid_is_not_recorded(tmp_path: Path) -> None:
    program = binary("pingpong")
    with Workload(program, "-n", 1_009) as first, recording([first.pid], tmp_path) as result:
        first.run()
        first.kill()
        first.wait()
        again = _started_as(first.pid, [str(program), "-n", "500"])
        try:
            assert again.stdin
            again.stdin.write(b"go\n")
            again.stdin.flush()
            assert again.stdout
            assert b"ready" in again.stdout.readline()
            assert b"done" in again.stdout.readline()
        finally:
            again.kill()
            again.communicate()
    assert sum(_own(result.replayed()[0]).values()) == 2 * 1_009


def _started_as(pid: int, command: list[str]) -> subprocess.Popen[bytes]:
    """A process with that PID: the kernel gives the numbers out in order, and forgets none to others if nobody is
    quicker."""
    for _ in range(200):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if process.pid == pid:
            return process
        process.kill()
        process.communicate()
    raise AssertionError(f"no process got PID {pid}")


STALL_SECONDS = 1.0


def test_a_stall_is_caught(tmp_path: Path) -> None:
    """The target is stopped for a while: of forty goroutines that want to run, some wait for that long."""
    condition = Condition.parse("latency>900ms")
    with Workload(binary("latencies"), "-duration", "5s") as target:
        with recording([target.pid], tmp_path, when=condition, kept_seconds=2.0) as result:
            target.go()
            time.sleep(3)
            stopped_ns = time.monotonic_ns()
            os.kill(target.pid, signal.SIGSTOP)
            time.sleep(STALL_SECONDS)
            goes_on_ns = time.monotonic_ns()
            os.kill(target.pid, signal.SIGCONT)
            target.done()
        assert result.recorded
    with Recording.open(result.path) as read:
        assert len(read.triggers) == result.recorded.triggers >= 1
        trigger = next(one for one in read.triggers if one.time_ns > goes_on_ns)
        assert sum(gap.count for gap in read.gaps) > 1_000
        (window,) = result.replayed()
    assert trigger.waited_ns > condition.latency_ns
    assert trigger.time_ns - trigger.waited_ns < stopped_ns + 100_000_000
    moves = of_type(result.events(), EventType.TRANSITION)
    stalled = moves[(moves["time_ns"] == trigger.time_ns) & (moves["g"] == trigger.g)]
    assert (stalled["time_ns"] - stalled["since_ns"]).tolist() == [trigger.waited_ns]
    # what came before is there, from before the stall on
    assert int(moves["time_ns"].min()) < stopped_ns - 100_000_000
    # and of it, the report says how long goroutines waited and what they are
    assert window.sched_latency_total.max_ns >= trigger.waited_ns
    assert "main.(*work).worker" in {f.function for f in window.functions}


def test_a_condition_that_holds_all_the_time_is_heeded_once_a_pause(tmp_path: Path) -> None:
    condition = Condition.parse("latency>1us")
    with (
        Workload(binary("latencies"), "-duration", "3s") as target,
        recording([target.pid], tmp_path, when=condition, kept_seconds=0.2, pause_seconds=1.0) as result,
    ):
        target.run()
    assert result.recorded
    with Recording.open(result.path) as read:
        times = [trigger.time_ns for trigger in read.triggers]
    assert 2 <= len(times) == result.recorded.triggers <= 6
    assert min(np.diff(times)) >= 700_000_000  # what is written after a pause happened up to 0.2 s before its end


def test_only_the_last_seconds(tmp_path: Path) -> None:
    with (
        Workload(binary("latencies"), "-duration", "3s") as target,
        recording([target.pid], tmp_path, kept_seconds=0.5) as result,
    ):
        target.run()
        time.sleep(0.1)
    moves = of_type(result.events(), EventType.TRANSITION)
    with Recording.open(result.path) as read:
        (gap,) = read.gaps
        assert read.footer
        assert gap.count > len(moves) > 100
        assert read.footer.sent >= gap.count + len(moves)
    length_ns = int(moves["time_ns"].max() - moves["time_ns"].min())
    assert 400_000_000 < length_ns < 600_000_000
    (window,) = result.replayed()
    assert window.duration_ns == pytest.approx(length_ns, rel=0.2)
    # who began long before is known still
    workers = [f for f in window.functions if f.function == "main.(*work).worker"]
    assert workers[0].goroutines == 40
    names: Any = of_type(result.events(), EventType.GOROUTINE)
    assert len(names) == len(np.unique(np.stack([names["g"], names["flags"] & Flag.FIRST]), axis=1).T)
    assert any("were not kept" in remark for remark in window.unseen)


def test_a_file_keeps_to_its_limit(tmp_path: Path) -> None:
    with Workload(binary("pingpong"), "-n", 100_003) as target:
        with recording([target.pid], tmp_path, most_bytes=2 << 20) as result:
            target.run()
        assert result.recorded
    size = Path(result.path).stat().st_size
    assert (2 << 20) - (1 << 18) - 100 < result.recorded.bytes_written == size <= 2 << 20
    assert result.recorded.ended == "the file has reached its limit"
    with Recording.open(result.path) as read:
        (gap,) = read.gaps
        assert read.footer
        assert gap.count == read.footer.sent - read.event_count > 0
    (window,) = result.replayed()
    last_ns = int(of_type(result.events(), EventType.TRANSITION)["time_ns"].max())
    assert window.duration_ns < last_ns
    assert any("reached its limit" in remark for remark in window.unseen)


def test_a_cgroup_is_told(tmp_path: Path) -> None:
    with Workload(binary("pingpong"), "-n", 1_009) as target, recording([target.pid], tmp_path) as result:
        target.run()
    cgroups = result.events()[result.events()["type"] == EventType.CGROUP]
    assert len(cgroups) >= 1
    assert result.replayed()[0].target == result.live[0].target


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    with Workload(binary("latencies"), "-duration", "1s") as target:
        target.go()
        done = run("record", target.pid, "-o", path, "--duration", "0.5")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{path}: ")
        assert done.stdout.endswith("ended: the duration is over\nlost: nothing\n")
        (live, report) = (run("attach", target.pid, "--duration", "0.3"), run("report", path))
    assert report.returncode == 0
    titles = [line for line in report.stdout.splitlines() if line[:1].isupper()]
    assert "Goroutines waiting to run  runnable until running, by what made them runnable" in titles
    assert {line.split("  ")[0] for line in live.stdout.splitlines() if line[:1].isupper()} & set(titles)


def test_refusals_leave_the_file_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept.rec"
    kept.write_bytes(b"what was there")
    one_line_error(run("record", os.getpid(), "-o", kept), NotTraceable.exit_code)
    assert kept.read_bytes() == b"what was there"
    one_line_error(run("record", os.getpid(), "-o", tmp_path / "new.rec"), NotTraceable.exit_code)
    assert not (tmp_path / "new.rec").exists()
    os.mkfifo(tmp_path / "pipe")
    with Workload(binary("hello")) as target:
        for path, why in (
            (tmp_path / "none" / "x.rec", "No such file or directory"),
            (tmp_path / "pipe", "not a file"),
        ):
            assert why in one_line_error(run("record", target.pid, "-o", path), 1)


def test_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.mkdir()
    script = f"mount -t tmpfs -o size=1m none {path}\n"
    with Workload(binary("latencies"), "-duration", "20s") as target:
        target.go()
        done = run(
            "record", target.pid, "-o", path / "x.rec", "--duration", "15",
            prefix=["unshare", "--mount", "sh", "-ec", script + 'exec "$@"', "sh"],
        )  # fmt: skip
    assert one_line_error(done, 1) == (
        f"{path}/x.rec: can't be written: No space left on device; what is in it can be read"
    )


def test_nothing_of_a_recording_is_compiled_into_attach() -> None:
    """Else attach would pay for it."""
    lengths = []
    for pages in (0, 16):
        with Compilation(recording_pages=pages) as begun:
            lengths.append(len(begun.finish(()).dump_func(b"on_probe")))
    assert lengths[0] < lengths[1]
    source = re.sub(r"#ifdef RECORDING_PAGES.*?#endif", "", source_text(), flags=re.DOTALL)
    assert "RINGBUF_OUTPUT(events" not in source
    assert "events.ringbuf" not in source
