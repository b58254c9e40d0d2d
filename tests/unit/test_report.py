"""The summary and the interval lines of made-up windows; and their JSON."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from schedtrace.histogram import Histogram
from schedtrace.report import IntervalLines, summary
from schedtrace.report_json import window_json
from schedtrace.window import ProbeHits, Samples, StateTime, Throttling, WaitParts, Window
from tests.unit.windows import CHANNEL, NETWORK, POD, RUN_QUEUE, example, function, slots

ROOT = Path(__file__).parents[2]


@pytest.fixture
def window() -> Window:
    return example()


def test_the_whole_summary(window: Window) -> None:
    assert summary(window).plain == (
        "nats-server  PID 1234  go1.27.2  full level (casgstatus, symtab)\n"
        "/opt/nats/nats-server\n"
        "cgroup (cpu,cpuacct) …ble/pod0f6a3c7e-5f0d-4c1e-9b3a-2d8e7f6a5b4c/4ab74ab74ab7…\n"
        "watched for 10.0 s; 41 goroutines on 12 threads; CPU limit 0.50 cores\n"
        "ended: the duration is over\n"
        "\n"
        "THROTTLED by the CPU limit for 1.40 s (summed over CPUs), in 62 of 100 periods\n"
        "\n"
        "Goroutines waiting to run  runnable until running, by what made them runnable\n"
        "  cause    count     p50     p90     p99      max    total\n"
        "  network  2,004  6.0 µs  7.6 µs  8.0 µs  3.69 ms  19.0 ms\n"
        "  channel     42  1.5 µs  1.9 µs   26 µs  28.8 µs   150 µs\n"
        "  all      2,046  6.0 µs  7.6 µs  8.0 µs  3.69 ms  19.1 ms\n"
        "\n"
        "    up to  times\n"
        "     1 µs      1  █\n"
        "     2 µs     40  █\n"
        "     4 µs      0\n"
        "     8 µs  2,000  ████████████████████████████████████████\n"
        "    16 µs      0\n"
        "    32 µs      2  █\n"
        "    64 µs      0\n"
        "   128 µs      0\n"
        "   256 µs      0\n"
        "   512 µs      0\n"
        "  1.02 ms      0\n"
        "  2.05 ms      0\n"
        "  4.10 ms      3  █\n"
        "\n"
        "Threads waiting for a CPU  runnable for the kernel, not running\n"
        "  count     p50     p90     p99     max    total\n"
        "    405  3.0 µs  3.8 µs  590 µs  922 µs  5.04 ms\n"
        "\n"
        "Goroutines running, but not on a CPU  running for Go, their thread off the CPU\n"
        "  why                      count     p50     p90     p99      max    total\n"
        "  preempted by the kernel    405  3.0 µs  3.8 µs  590 µs   922 µs  5.04 ms\n"
        "  blocked in the kernel       42  1.5 µs  1.9 µs   26 µs  28.8 µs   150 µs\n"
        "\n"
        "Who ran, but not on a CPU, most  by the function the goroutine began with\n"
        "  function   times  longest  for a CPU  blocked\n"
        "  main.main    447   922 µs    5.04 ms   150 µs\n"
        "\n"
        "Where goroutines spend their time  goroutines: how many at a time, on average\n"
        "  state     wait reason    time  goroutines    times\n"
        "  running                3.20 s        0.32  123,456\n"
        "  runnable               700 ms       0.070  123,460\n"
        "  waiting   IO wait       410 s        41.0       99\n"
        "\n"
        "Who waited to run most  by the function the goroutine began with\n"
        "  function                     runs     mean  longest    total\n"
        "  server.(*client).readLoop  10,000  10.0 µs  7.50 ms   100 ms\n"
        "  main.main                   2,000  10.0 µs  1.50 ms  20.0 ms\n"
        "\n"
        "Who waited for something most  by the function the goroutine began with\n"
        "  function                   goroutines  waits  longest   total\n"
        "  server.(*client).readLoop          60  5,000   2.50 s  15.0 s\n"
        "  main.main                          12  1,000   500 ms  3.00 s\n"
        "\n"
        "Probes  dear: the kernel single-steps this instruction\n"
        "  function              instruction         hits\n"
        "  runtime.casgstatus    +0 push rbp        4,096\n"
        "  runtime.coroswitch_m  +0 cmp rsp   dear      3\n"
        "  1 more, hit seldom or never\n"
        "\n"
        "Can't be seen here\n"
        "  - system calls: a goroutine in one counts as running\n"
        "\n"
        "Lost  not counted, and why\n"
        "  times  reason\n"
        "     23  interval began before window\n"
        "\n"
        "Cost to the target\n"
        "  about 21.0 ms of CPU time, 0.2 % of one CPU (an estimate)\n"
        "  and 17 hits by other processes of the same executable"
    )


def printed(window: Window, **options: Any) -> str:
    """The summary as a console prints it."""
    file = io.StringIO()
    Console(file=file, highlight=False, **options).print(summary(window), soft_wrap=True)
    return file.getvalue()


def test_a_pipe_gets_plain_lines_and_a_terminal_the_same_in_colour(window: Window) -> None:
    piped = printed(window)
    coloured = printed(window, force_terminal=True, color_system="standard", width=80)
    assert "\x1b" not in piped
    assert "\x1b[1m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == piped
    assert all(len(line) <= 79 and line == line.rstrip() for line in piped.split("\n"))


def test_a_narrow_console_does_not_fold_tables(window: Window) -> None:
    assert printed(window, width=20) == printed(window, width=200)


def empty(window: Window) -> Window:
    return replace(
        window,
        duration_ns=0,
        transitions={},
        sched_latency={},
        wait={},
        states=(),
        functions=(),
        run_queue=Histogram(),
        off_cpu=None,
        off_cpu_functions=(),
        goroutines=0,
        probes=(ProbeHits("runtime.casgstatus", "+0 push rbp", True, 0),),
        foreign_hits=0,
        unseen=(),
        lost={},
        throttling=None,
        overhead_ns=None,
        ended="",
        target=replace(window.target, cgroup_path="", quota_cores=None),
    )


def test_a_window_in_which_nothing_happened(window: Window) -> None:
    assert summary(empty(window)).plain == (
        "nats-server  PID 1234  go1.27.2  full level (casgstatus, symtab)\n"
        "/opt/nats/nats-server\n"
        "watched for 0; 0 goroutines on 12 threads; no CPU limit\n"
        "\n"
        "Goroutines waiting to run  runnable until running, by what made them runnable\n"
        "  none ran in this time\n"
        "\n"
        "Threads waiting for a CPU  runnable for the kernel, not running\n"
        "  none waited\n"
        "\n"
        "Where goroutines spend their time  goroutines: how many at a time, on average\n"
        "  no goroutine was seen\n"
        "\n"
        "Probes\n"
        "  none was hit\n"
        "\n"
        "Lost\n"
        "  nothing\n"
        "\n"
        "Cost to the target\n"
        "  unknown: what a hit costs could not be measured here"
    )


def test_what_exceeds_the_last_bound(window: Window) -> None:
    slow = Histogram(slots(s23=1, s24=3), sum_ns=60_000_000_000, max_ns=20_000_000_000)
    text = summary(replace(window, sched_latency={"other": slow})).plain
    assert "\n       8.39 s      1  ██████████████\n" in text
    assert "\n  over 8.39 s      3  ████████████████████████████████████████\n" in text


def test_long_lists_are_cut_and_the_cut_is_said(window: Window) -> None:
    states = tuple(StateTime("waiting", f"reason {i}", 1_000_000_000, 2) for i in range(20))
    functions = tuple(function(f"main.f{i}", i + 1) for i in range(9))
    text = summary(replace(window, states=states, functions=functions)).plain
    assert len(re.findall(r"^  waiting   reason", text, re.MULTILINE)) == 12
    assert re.search(r"^  \(others\) +8.00 s +0.80 +16$", text, re.MULTILINE)
    assert "by the function the goroutine began with; 4 more" in text
    assert [int(n) for n in re.findall(r"^  main.f(\d)", text, re.MULTILINE)] == [8, 7, 6, 5, 4] * 2


def test_hostile_names_stay_text(window: Window) -> None:
    hostile = "\x1b]0;owned\x07\n[bold]x[/bold]"
    target = replace(window.target, name=hostile, exe=hostile, go_version=hostile, cgroup_path=hostile)
    functions = (function(hostile, 1),)
    text = printed(replace(window, target=target, functions=functions, ended=hostile, unseen=(hostile,)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("[bold]x[/bold]") == 8
    assert len(text.split("\n")) == len(printed(window).split("\n")) - 2  # one function less in two tables


def test_what_waits_were_for(window: Window) -> None:
    text = printed(replace(window, wait_parts=WaitParts(20_000_000, 5_000_000, None, 1_000_000)))
    lines = text.split("\n")
    start = lines.index("What they waited for  of all time that goroutines waited to run")
    assert [line.split("  ")[1:3] for line in lines[start + 2 : start + 5]] == [
        [" 70 %", "in Go's queues, or while the world was stopped"],
        [" 25 %", "for the kernel to run the thread that was to run them"],
        ["5.0 %", "not known which"],
    ]
    result = window_json(replace(window, wait_parts=WaitParts(20_000_000, 5_000_000, None, 1_000_000)))
    assert result["sched_delay_seconds"] == {
        "go_queue": 0.014,
        "kernel_run_queue": 0.005,
        "stop_the_world": None,
        "unknown": 0.001,
    }
    assert window_json(window)["sched_delay_seconds"] is None


@pytest.fixture
def sampled(window: Window) -> Window:
    """The same at the sampled level."""
    samples = Samples(
        sched_latency={"channel": CHANNEL, "network": NETWORK},
        no_wait=7,
        stop_the_world={"stopping_gc": Histogram(), "stopped_gc": RUN_QUEUE},
        parts=WaitParts(19_150_000, 10_000_000, 1_000_000, 150_000),
    )
    target = replace(window.target, level="sampled", mode="record")
    return replace(
        window, target=target, transitions={}, sched_latency={}, wait={}, states=(), functions=(), samples=samples
    )


def test_the_summary_of_samples(sampled: Window) -> None:
    text = printed(sampled)
    lines = text.split("\n")
    assert "sampled level (record, symtab)" in lines[0]
    assert "goroutines on" not in text
    assert re.search(r"^watched for 10.0 s; \d+ threads; ", text, re.MULTILINE)
    start = lines.index("Goroutines waiting to run, a sample  by what made them runnable")
    assert lines[start + 1 : start + 5] == [
        "  cause    samples     p50     p90     p99      max     mean",
        "  network    2,004  6.0 µs  7.6 µs  8.0 µs  3.69 ms  9.48 µs",
        "  channel       42  1.5 µs  1.9 µs   26 µs  28.8 µs  3.57 µs",
        "  all        2,046  6.0 µs  7.6 µs  8.0 µs  3.69 ms  9.36 µs",
    ]
    assert "every eighth time" in " ".join(text.split())
    parts = lines.index("What they waited for  of all time that the sample's goroutines waited to run")
    assert lines[parts + 1 : parts + 6] == [
        "  share  what                                                      time",
        "   42 %  for another goroutine to stop running (Go's queues)    8.00 ms",
        "   52 %  for the kernel to run the thread that was to run them  10.0 ms",
        "  5.2 %  for the world to be started again                      1.00 ms",
        "  0.8 %  not known which                                         150 µs",
    ]
    stops = lines.index("Stops of the world  all; until the last has stopped, and until all run again")
    assert lines[stops + 2].split()[:4] == ["stopped", "for", "GC", "405"]
    assert "stopping for GC" not in text
    assert "Where goroutines spend" not in text
    assert "Who waited" not in text


def test_the_summary_of_no_samples(sampled: Window) -> None:
    text = printed(replace(sampled, samples=Samples({}, 0, {}, WaitParts(0, 0, 0, 0))))
    assert "none of the sample ran in this time" in text
    assert "What they waited for" not in text
    assert "Stops of the world" not in text
    text = printed(replace(sampled, samples=Samples({}, 0, {"stopped_gc": Histogram()}, WaitParts(0, 0, 0, 0))))
    assert re.search(r"Stops of the world.*\n  none\n", text)


def test_interval_lines_of_samples(sampled: Window) -> None:
    titles, line = IntervalLines().next_line(sampled).split("\n")
    assert titles.split()[:2] == ["time", "samples/s"]
    assert line.split()[:3] == ["10.0", "s", "205"]


def test_the_json_of_samples(sampled: Window) -> None:
    result = window_json(sampled)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for key in ("transitions", "sched_latency", "sched_delay_seconds", "wait", "states", "top", "goroutines"):
        assert result[key] is None
    samples = result["samples"]
    assert samples["sched_latency"]["count"] == 2046
    assert set(samples["sched_latency"]["by_cause"]) == {"channel", "network"}
    assert samples["no_wait"] == 7
    assert samples["sched_delay_seconds"] == {
        "go_queue": pytest.approx(0.008),
        "kernel_run_queue": 0.01,
        "stop_the_world": 0.001,
        "unknown": 0.00015,
    }
    assert samples["stop_the_world"]["stopped_gc"]["count"] == 405
    assert samples["stop_the_world"]["stopping_gc"]["max_seconds"] is None


def test_interval_lines_tell_what_is_new(window: Window) -> None:
    more = Histogram(slots(s0=1, s3=2500, s12=3), 22_000_000, 3_690_000)
    later = replace(
        window,
        duration_ns=12_000_000_000,
        sched_latency={"channel": CHANNEL, "network": more},
        throttling=Throttling(120, 70, 1_650_000_000),
        lost={"interval_began_before_window": 23, "inconsistent_state": 4},
    )
    printer = IntervalLines()
    assert printer.next_line(window).split("\n") == [
        "     time    runs/s wait p50      p99      max threads p99 throttled   lost",
        "   10.0 s       205   6.0 µs   8.0 µs  3.69 ms      590 µs    1.40 s     23",
    ]
    assert printer.next_line(later) == (
        "   12.0 s       250   6.0 µs   8.0 µs  8.00 µs           -    250 ms      4"
    )
    assert printer.next_line(later) == (
        "   12.0 s         0        -        -        -           -         0      0"
    )


def test_json_of_a_window(window: Window) -> None:
    result = json.loads(json.dumps(window_json(window), allow_nan=False))
    assert result["schema"] == "schedtrace.attach/1"
    assert result["target"] == {
        "pid": 1234,
        "exe": "/opt/nats/nats-server",
        "name": "nats-server",
        "go_version": "go1.27.2",
        "level": "full",
        "mode": "casgstatus",
        "symbols": "symtab",
        "cgroup": {"path": POD, "hierarchy": "cpu,cpuacct", "id": 59, "cpu_quota_cores": 0.5},
    }
    assert result["window_seconds"] == 10.0
    assert result["transitions"] == [
        {"from": "running", "to": "waiting", "count": 2050},
        {"from": "waiting", "to": "runnable", "count": 2046},
    ]
    channel = result["sched_latency"]["by_cause"]["channel"]
    assert channel["count"] == 42
    assert channel["sum_seconds"] == 150e-6
    assert channel["p50_seconds"] == pytest.approx(1e-6 + 1e-6 * 21 / 40)
    assert channel["p99_seconds"] == pytest.approx(16e-6 + 12.8e-6 * (0.99 * 42 - 40) / 2)
    assert channel["max_seconds"] == 28.8e-6
    buckets = {bucket["le"]: bucket["count"] for bucket in channel["buckets"]}
    assert list(buckets) == [2**k / 1e6 for k in range(24)] + ["+Inf"]
    assert [buckets[k] for k in (1e-6, 2e-6, 16e-6, 32e-6, "+Inf")] == [0, 40, 40, 42, 42]
    assert result["sched_latency"]["count"] == 2046
    assert result["sched_latency"]["sum_seconds"] == pytest.approx(19.15e-3)
    assert result["threads"]["count"] == 12
    assert result["threads"]["run_queue"]["count"] == 405
    assert {reason: each["count"] for reason, each in result["off_cpu"].items()} == {
        "preempted": 405,
        "blocked": 42,
        "woken": 0,
    }
    assert result["off_cpu"]["blocked"]["sum_seconds"] == 150e-6
    assert result["off_cpu_top"] == [
        {
            "function": "main.main",
            "times": 447,
            "run_queue_seconds": 5.04e-3,
            "blocked_seconds": 150e-6,
            "max_seconds": 922e-6,
        }
    ]
    assert result["states"][0] == {"state": "waiting", "reason": "IO wait", "seconds": 410.0, "count": 99}
    assert [entry["function"] for entry in result["top"]] == [
        "github.com/nats-io/nats-server/v2/server.(*client).readLoop",
        "main.main",
    ]
    assert result["top"][1]["runnable_seconds"] == 0.02
    assert result["probes"][1] == {
        "function": "runtime.casgstatus",
        "site": "+0 push rbp",
        "emulated": True,
        "hits": 4096,
    }
    assert result["unseen"] == ["system calls: a goroutine in one counts as running"]
    assert result["lost"] == {"interval_began_before_window": 23, "inconsistent_state": 0}
    assert result["throttling"] == {"periods": 100, "throttled_periods": 62, "throttled_seconds": 1.4}
    assert result["overhead_seconds"] == 0.021
    assert result["ended"] == "the duration is over"


def test_json_of_a_window_in_which_nothing_happened(window: Window) -> None:
    result = json.loads(json.dumps(window_json(empty(window)), allow_nan=False))
    nothing = result["sched_latency"]
    assert (nothing["count"], nothing["sum_seconds"], nothing["p50_seconds"], nothing["max_seconds"]) == (
        0,
        0,
        None,
        None,
    )
    assert nothing["by_cause"] == {}
    assert result["throttling"] is None
    assert result["overhead_seconds"] is None
    assert result["target"]["cgroup"]["cpu_quota_cores"] is None


def test_every_key_of_the_json_is_documented(window: Window, sampled: Window) -> None:
    documented = (ROOT / "docs/json.md").read_text()

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            named = {"by_cause", "lost", "wait"}  # whose keys are names of causes and reasons
            below = [keys(v) for k, v in value.items() if k not in named]
            return set(value).union(*below)
        if isinstance(value, list):
            return set().union(*map(keys, value))
        return set()

    shown = keys(window_json(window)) | keys(window_json(sampled))
    missing = {key for key in shown if f"`{key}`" not in documented}
    assert missing == set()
