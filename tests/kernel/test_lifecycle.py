"""Targets that end, execute, share a binary, live elsewhere; sessions that are interrupted, side by side, unheard."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from schedtrace.attach import Watch
from schedtrace.window import Window
from tests.command import (
    COMMAND,
    HIDE_HEADERS,
    TRACEFS_READ_ONLY,
    UNMOUNT_TRACEFS,
    WITHOUT_LINKS,
    Json,
    attaching,
    elsewhere,
    environment,
    run,
    without,
)
from tests.target_text import TargetText
from tests.workload import Workload, binary
from tools.cgroup import CpuLimit

N = 5_003  # round trips
PINGPONG = ("main.ping", "main.pong")
SUCCESSOR = ("main.sender", "main.receiver")


def parks_and_readies(window: Window | Json, functions: Sequence[str] = PINGPONG) -> tuple[int, int]:
    """Of these start functions together: 2 * N each for that many round trips."""
    if isinstance(window, Window):
        window = {"top": [vars(totals) for totals in window.functions]}
    rows = [row for row in window["top"] if row["function"] in functions]
    return sum(row["parks"] for row in rows), sum(row["readies"] for row in rows)


def own_copy(name: str, folder: Path, version: str = "1.27") -> Path:
    """A workload with an inode of its own, which nobody else puts probes on."""
    return Path(shutil.copy(binary(name, version), folder / name))


def test_target_exits() -> None:
    with Workload(binary("pingpong"), "-n", N) as target, attaching(target.pid, "--interval", 0.1) as attach:
        attach.await_line()
        target.run()
        assert target.exit() == 0
        start = time.monotonic()
        done = attach.end()
        assert time.monotonic() - start < 20
    assert (done.returncode, done.stderr) == (0, "")
    assert f"ended: the target (PID {target.pid}) exited\n" in done.stdout
    assert "main.pong" in done.stdout


def test_target_is_killed_while_nothing_is_shown(tmp_path: Path) -> None:
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", N) as target, attaching(target.pid, "--json", "--interval", 60) as attach:
        attach.await_probes(TargetText.of(target.pid, program), 1)
        target.run()
        target.kill()
        report = attach.end_json(None)
    assert report["ended"] == f"the target (PID {target.pid}) exited"
    assert parks_and_readies(report) == (2 * N, 2 * N)
    assert report["threads"]["count"] == 0


def test_target_executes_another_program(tmp_path: Path) -> None:
    program = own_copy("successor", tmp_path)
    arguments = ["-n", str(N), "/bin/sleep", "60"]
    with Workload(program, *arguments) as target, attaching(target.pid, "--json") as attach:
        attach.await_probes(TargetText.of(target.pid, program), 1)
        target.go()
        report = attach.end_json(None)
        assert target.alive
    assert report["ended"] == f"the target (PID {target.pid}) executed another program"
    assert parks_and_readies(report, SUCCESSOR) == (N, N)
    assert report["threads"]["count"] == 0
    assert report["lost"].get("inconsistent_state", 0) == 0


@pytest.mark.parametrize("prefix", [[], ["setarch", "-R"]], ids=["", "without address randomisation"])
def test_target_executes_itself(prefix: list[str]) -> None:
    """The same program at the same addresses: its goroutines must not be taken for those there were before."""
    command = [*prefix, str(binary("successor"))]
    with Workload(Path(command[0]), *command[1:], "-n", N) as target, Watch(target.pid) as watch:
        assert watch.ended(0) == ""
        target.go()
        assert watch.ended(20) == f"the target (PID {target.pid}) executed another program"
        before = watch.window()
        assert target._expect("ready", 20)["generation"] == 2
        assert target.run()["n"] == N
        after = watch.window()
    assert parks_and_readies(before, SUCCESSOR) == (N, N)
    assert after.transitions == before.transitions
    assert parks_and_readies(after, SUCCESSOR) == (N, N)
    assert [probe.hits for probe in after.probes] == [probe.hits for probe in before.probes]
    assert after.foreign_hits - before.foreign_hits >= 2 * N  # the probes are still there, and see a stranger


def test_two_sessions_on_one_target(tmp_path: Path) -> None:
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", N) as target, attaching(target.pid, "--json") as attach:
        text = TargetText.of(target.pid, program)
        attach.await_probes(text, 1)
        with Watch(target.pid) as watch:
            target.run()
            watch.stop()
            window = watch.window()
        assert text.breakpoints()  # the other session has not ended
        report = attach.end_json()
        assert text.differences() == {}
    assert parks_and_readies(window) == parks_and_readies(report) == (2 * N, 2 * N)
    assert window.foreign_hits == report["foreign_hits"] == 0


def test_own_hits_are_nobody_else_s(tmp_path: Path) -> None:
    """Not when the target goes on as the window begins and ends, either."""
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", 10**9) as target:
        target.go()
        for _ in range(4):
            with Watch(target.pid) as watch:
                time.sleep(0.05)
                watch.stop()
                window = watch.window()
            assert window.foreign_hits == 0
            assert sum(probe.hits for probe in window.probes) > 0


def test_a_call_that_began_before_is_not_time_running() -> None:
    """The main goroutine waits in read(2), which is not seen, until it is told to begin."""
    with Workload(binary("pingpong"), "-n", N) as target, Watch(target.pid) as watch:
        time.sleep(1)
        target.run()
        watch.stop()
        window = watch.window()
    main = next(f for f in window.functions if f.function == "runtime.main")
    assert main.runs > 0
    assert main.running_ns < 500_000_000
    assert window.lost["interval_began_before_window"] > 0


def test_of_two_processes_of_one_binary_one_is_watched(tmp_path: Path) -> None:
    """Its breakpoints are confined to it: the other process has none, and its hits are nowhere."""
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", N) as target, Workload(program, "-n", 2 * N) as other:
        text, other_text = (TargetText.of(process.pid, program) for process in (target, other))
        with Watch(target.pid) as watch:
            assert text.breakpoints()
            assert other_text.differences() == {}
            for process in (target, other):
                process.go()
            for process in (target, other):
                process.done()
            watch.stop()
            window = watch.window()
        assert text.differences() == {}
    assert parks_and_readies(window) == (2 * N, 2 * N)
    assert window.foreign_hits == 0


@pytest.mark.parametrize("way", ["perf", "tracefs"])
def test_one_of_two_processes_before_there_were_links(way: str, tmp_path: Path) -> None:
    program = own_copy("pingpong", tmp_path)
    prefix = without("sys_admin") if way == "tracefs" else []
    with Workload(program, "-n", N) as target, Workload(program, "-n", 2 * N) as other:
        text, other_text = (TargetText.of(process.pid, program) for process in (target, other))
        with attaching(target.pid, "--json", command=WITHOUT_LINKS, prefix=prefix) as attach:
            attach.await_probes(text, 1)
            assert other_text.differences() == {}
            for process in (target, other):
                process.run()
            report = attach.end_json()
        assert text.differences() == {}
    assert parks_and_readies(report) == (2 * N, 2 * N)
    assert report["foreign_hits"] == 0


def test_another_process_of_the_binary_starts_later(tmp_path: Path) -> None:
    """The breakpoints are in the file by then, so it gets them too. It is counted apart, and theirs are exact."""
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", N) as target, Watch(target.pid) as watch, Workload(program, "-n", 2 * N) as other:
        other_text = TargetText.of(other.pid, program)
        assert other_text.breakpoints()
        for process in (target, other):
            process.run()
        watch.stop()
        window = watch.window()
        watch.close()
        assert other_text.differences() == {}
        assert other.exit() == 0
    assert parks_and_readies(window) == (2 * N, 2 * N)
    assert window.foreign_hits >= 8 * N


def test_two_processes_of_one_binary_are_watched_at_once(tmp_path: Path) -> None:
    program = own_copy("pingpong", tmp_path)
    with (
        Workload(program, "-n", N) as one,
        Workload(program, "-n", 2 * N) as two,
        attaching(one.pid, "--json") as first,
        Watch(two.pid) as watch,
    ):
        first.await_probes(TargetText.of(one.pid, program), 1)
        for process in (one, two):
            process.go()
        for process in (one, two):
            process.done()
        watch.stop()
        window, report = watch.window(), first.end_json()
    assert parks_and_readies(report) == (2 * N, 2 * N)
    assert parks_and_readies(window) == (4 * N, 4 * N)


def test_target_in_namespaces_of_its_own() -> None:
    with Workload(binary("pingpong"), "-n", N, namespaces=True) as target, Watch(target.pid) as watch:
        target.run()
        watch.stop()
        window = watch.window()
    assert target.ready["pid"] == 1
    assert window.target.pid == target.pid
    assert parks_and_readies(window) == (2 * N, 2 * N)


@pytest.mark.parametrize("fate", ["deleted", "replaced", "replaced by a text"])
def test_binary_is_no_longer_what_it_was(fate: str, tmp_path: Path) -> None:
    program = own_copy("pingpong", tmp_path, "1.27")
    with Workload(program, "-n", N) as target:
        program.unlink()
        if fate == "replaced":
            shutil.copy(binary("hello", "1.21"), program)
        elif fate == "replaced by a text":
            program.write_text("no program\n")
        with Watch(target.pid) as watch:
            target.run()
            watch.stop()
            window = watch.window()
            watch.close()
        assert TargetText.of(target.pid, binary("pingpong")).differences() == {}
    assert (window.target.exe, window.target.go_version) == (str(program), "go1.27.3")
    assert parks_and_readies(window) == (2 * N, 2 * N)


def test_cpu_limit_and_throttling_are_those_of_the_cgroup() -> None:
    with (
        CpuLimit(0.1) as limit,
        Workload(binary("spinners"), "-duration", "1500ms", limit=limit) as target,
    ):
        outer_before = limit.statistics()
        with Watch(target.pid) as watch:
            inner_before = limit.statistics()
            target.run()
            inner_after = limit.statistics()
            window = watch.window()
            outer_after = limit.statistics()
    assert window.target.cgroup_path == f"/{limit.path.name}"
    assert window.target.cgroup_hierarchy == ("cpu" if limit.version == 1 else "cgroup2")
    assert window.target.quota_cores == pytest.approx(0.1)
    assert window.throttling
    throttled = "throttled_time" if limit.version == 1 else "throttled_usec"
    unit_ns = 1 if limit.version == 1 else 1000
    told = (window.throttling.periods, window.throttling.throttled_periods, window.throttling.throttled_ns // unit_ns)
    for key, value in zip(("nr_periods", "nr_throttled", throttled), told, strict=True):
        assert inner_after[key] - inner_before[key] <= value <= outer_after[key] - outer_before[key]
    assert window.throttling.throttled_periods >= 3


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_end_with_the_summary(signal_number: signal.Signals) -> None:
    with Workload(binary("pingpong"), "-n", N) as target, attaching(target.pid, "--interval", 0.1) as attach:
        attach.await_line()
        target.run()
        done = attach.end(signal_number)
        assert target.alive
    assert (done.returncode, done.stderr) == (0, "")
    assert "ended: interrupted\n" in done.stdout
    assert "main.ping" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_impatience_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C over and over: whatever it interrupts, there is no traceback and no breakpoint."""
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", N) as target, attaching(target.pid, "--interval", 0.1) as attach:
        attach.await_line()
        while attach.process.poll() is None:
            attach.process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        done = attach.end()
        assert TargetText.of(target.pid, program).differences() == {}
    assert done.returncode in (0, 130)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("moment_seconds", [0.2, 0.6, 1.0])
def test_interrupted_before_it_began(moment_seconds: float, tmp_path: Path) -> None:
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", N) as target, attaching(target.pid, "--json") as attach:
        time.sleep(moment_seconds)
        attach.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            attach.process.wait(20)
        # Python drops an interrupt that comes while it runs a destructor as it starts: whoever waits presses again.
        done = attach.end(None if attach.process.poll() is not None else signal.SIGINT)
        assert TargetText.of(target.pid, program).differences() == {}
    assert done.returncode in (0, 130, -signal.SIGINT)  # the last while Python itself starts
    assert "schedtrace" not in done.stderr


def test_reader_goes_early() -> None:
    with Workload(binary("pingpong"), "-n", N) as target, attaching(target.pid, "--interval", 0.1) as attach:
        assert attach.await_line()
        assert attach.process.stdout
        attach.process.stdout.close()  # as `| head -1` does
        target.run()
        assert attach.process.wait(60) == 141
        assert attach.process.stderr
        assert attach.process.stderr.read() == ""
        assert target.alive


@pytest.mark.parametrize("seconds", [0.4, 1.5])
def test_duration(seconds: float) -> None:
    with Workload(binary("hello")) as target:
        done = run("attach", target.pid, "--duration", seconds, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["ended"]) == (0, "", "the duration is over")
    assert seconds <= report["window_seconds"] < seconds + 2


def test_without_tracefs_mounted_and_without_kernel_headers() -> None:
    with Workload(binary("hello")) as target:
        prefix = elsewhere(HIDE_HEADERS, UNMOUNT_TRACEFS)
        done = run("attach", target.pid, "--duration", 0.2, prefix=prefix, env={"BCC_KERNEL_SOURCE": None})
    assert (done.returncode, done.stderr) == (0, "")
    assert "ended: the duration is over" in done.stdout


def test_tracefs_may_be_read_only() -> None:
    with Workload(binary("hello")) as target:
        prefix = [*elsewhere(TRACEFS_READ_ONLY), *without("sys_admin")]
        done = run("attach", target.pid, "--duration", 0.2, prefix=prefix)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_has_what_it_promises(tmp_path: Path) -> None:
    program = own_copy("pingpong", tmp_path)
    with Workload(program, "-n", N) as target, attaching(target.pid, "--json") as attach:
        attach.await_probes(TargetText.of(target.pid, program), 1)
        target.run()
        report = attach.end_json()
    histogram = {"count", "sum_seconds", "p50_seconds", "p90_seconds", "p99_seconds", "max_seconds", "buckets"}
    assert set(report) >= {
        *("schema", "target", "window_seconds", "transitions", "sched_latency", "states", "top", "threads"),
        *("probes", "unseen", "lost", "overhead_seconds"),
    }
    assert report["schema"] == "schedtrace.attach/1"
    assert {key: report["target"][key] for key in ("pid", "exe", "go_version", "level", "symbols")} == {
        "pid": target.pid,
        "exe": str(program),
        "go_version": "go1.27.3",
        "level": "full",
        "symbols": "symtab",
    }
    assert report["target"]["cgroup"]["path"].startswith("/")
    assert all(set(row) == {"from", "to", "count"} for row in report["transitions"])
    latency = report["sched_latency"]
    assert set(latency) == {*histogram, "by_cause"}
    assert all(set(value) == histogram for value in latency["by_cause"].values())
    assert set(report["threads"]) >= {"run_queue"}
    assert set(report["threads"]["run_queue"]) == histogram
    assert all(set(row) == {"state", "reason", "seconds", "count"} for row in report["states"])
    assert all(set(row) >= {"function", "site", "hits"} for row in report["probes"])
    # sane values, and those that are known
    assert 1 <= report["window_seconds"] < 120
    assert parks_and_readies(report) == (2 * N, 2 * N)
    transitions = {(row["from"], row["to"]): row["count"] for row in report["transitions"]}
    assert transitions["runnable", "running"] >= 2 * N
    assert latency["count"] == sum(cause["count"] for cause in latency["by_cause"].values())
    assert latency["by_cause"]["channel"]["count"] >= 2 * N
    assert latency["by_cause"]["new"]["count"] >= 2
    assert latency["buckets"][-1] == {"le": "+Inf", "count": latency["count"]}
    counts = [bucket["count"] for bucket in latency["buckets"]]
    assert counts == sorted(counts)
    assert 0 < latency["p50_seconds"] <= latency["p90_seconds"] <= latency["p99_seconds"] <= latency["max_seconds"]
    assert latency["max_seconds"] <= latency["sum_seconds"] <= report["window_seconds"] * 4
    assert {row["state"] for row in report["states"]} >= {"running", "runnable", "waiting"}
    assert {row["reason"] for row in report["states"] if row["state"] == "waiting"} & {"chan receive", "chan send"}
    assert sum(row["hits"] for row in report["probes"]) >= 6 * N
    assert report["foreign_hits"] == 0
    assert report["unseen"] == ["system calls: a goroutine in one counts as running"]
    assert 0 < report["overhead_seconds"] < 5


def test_standard_streams_may_be_closed() -> None:
    with Workload(binary("hello")) as target:
        command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *COMMAND, "attach", str(target.pid), "--duration", "0.2"]
        assert subprocess.run(command, check=False, timeout=120, env=environment({})).returncode == 0
        assert target.alive
