"""Frames of the live screen at fixed sizes, and what keys do to it; what of them reaches a terminal."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen

from schedtrace.histogram import Histogram
from schedtrace.screen import SORTS, View, frame, press
from schedtrace.terminal import keys_in
from schedtrace.window import CAUSES, LivingGoroutine, Samples, StateTime, Throttling, WaitParts, Window
from tests.unit.windows import CHANNEL, NETWORK, RUN_QUEUE, example, function, slots

MS = 1_000_000
READ_LOOP = "github.com/nats-io/nats-server/v2/server.(*client).readLoop"
# By longest wait to run: first; by all of them: second; by time in its state: third.
LIVING = (
    LivingGoroutine(0xC000002000, "main.second", "running", "", 2 * MS, 40_000, 900 * MS, 3 * MS),
    LivingGoroutine(0xC000003000, READ_LOOP, "waiting", "IO wait", 8_000 * MS, 7, 5 * MS, 2 * MS),
    LivingGoroutine(0xC000001000, "main.first", "runnable", "", 60 * MS, 11, 77 * MS, 60 * MS),
    LivingGoroutine(0xC000004000, "main.fourth", "", "", None, 3, 4 * MS, 1 * MS),
)
MIXED = Histogram(slots(**{f"s{k}": (k + 1) * 10 for k in range(3, 20)}), 5_000 * MS, 400 * MS)


@pytest.fixture
def window() -> Window:
    return replace(example(), worst=LIVING, ended="")


@pytest.fixture
def full(window: Window) -> Window:
    """One in which everything is more than a small screen can show."""
    latency = {cause: replace(MIXED, sum_ns=(20 - i) * MS) for i, cause in enumerate(CAUSES)}
    states = tuple(StateTime("waiting", f"reason {i}", (40 - i) * 10**9, 2) for i in range(30))
    worst = tuple(replace(LIVING[0], g=i, max_runnable_ns=(90 - i) * MS) for i in range(80))
    functions = tuple(function(f"main.f{i}", i + 1) for i in range(30))
    return replace(window, sched_latency=latency, states=states, worst=worst, functions=functions)


def shown(view: View, width: int, height: int) -> list[str]:
    """Lines of the frame, which must fit."""
    rows = frame(view, width, height).plain.split("\n")
    assert len(rows) <= height
    assert all(cell_len(row) < width for row in rows)
    assert not any(character in "\t\x1b" for row in rows for character in row)
    return rows


def test_a_whole_frame(window: Window) -> None:
    assert shown(View(window), 80, 24) == [
        "nats-server  PID 1234  go1.27.2  full level (casgstatus, symtab)     for 10.0 s",
        "41 goroutines on 12 threads; CPU limit 0.50 cores; est. cost 0.2 % of a CPU",
        "lost: 23 (23 interval began before window)",
        "can't be seen here: system calls: a goroutine in one counts as running",
        "Waits to run, up to  times            Where goroutines are    time  goroutines",
        "     2 µs     41  █                   running               3.20 s        0.32",
        "     8 µs  2,000  █████████████████   runnable              700 ms       0.070",
        "    32 µs      2  █                   IO wait                410 s        41.0",
        "   128 µs      0",
        "   512 µs      0",
        "  2.05 ms      0",
        "  4.10 ms      3  █",
        "Sources of delay    count     p50     p90     p99      max    total",
        "network             2,004  6.0 µs  7.6 µs  8.0 µs  3.69 ms  19.0 ms",
        "channel                42  1.5 µs  1.9 µs   26 µs  28.8 µs   150 µs",
        "all goroutines      2,046  6.0 µs  7.6 µs  8.0 µs  3.69 ms  19.1 ms",
        "threads, for a CPU    405  3.0 µs  3.8 µs  590 µs   922 µs  5.04 ms",
        "THROTTLED by the CPU limit for 1.40 s (summed over CPUs), in 62 of 100 periods",
        "Worst goroutines seen alive, by longest wait to run  longest, all: waits to run",
        "began with                 is            for  longest      all    runs",
        "main.first                 runnable  60.0 ms  60.0 ms  77.0 ms      11",
        "main.second                running   2.00 ms  3.00 ms   900 ms  40,000",
        "server.(*client).readLoop  IO wait    8.00 s  2.00 ms  5.00 ms       7",
        "q: end   p: pause   s: sort goroutines by all waits to run",
    ]


def test_a_frame_of_samples(window: Window) -> None:
    samples = Samples(
        sched_latency={"channel": CHANNEL, "network": NETWORK},
        no_wait=7,
        stop_the_world={"stopping_gc": Histogram(), "stopped_gc": RUN_QUEUE},
        parts=WaitParts(19_150_000, 10_000_000, 1_000_000, 150_000),
    )
    target = replace(window.target, level="sampled", mode="record")
    sampled = replace(window, target=target, samples=samples, sched_latency={}, states=(), functions=(), worst=())
    assert shown(View(sampled), 80, 24)[4:] == [
        "Goroutines waiting to run, a sample  by what made them runnable",
        "  cause    samples     p50     p90     p99      max     mean",
        "  network    2,004  6.0 µs  7.6 µs  8.0 µs  3.69 ms  9.48 µs",
        "  channel       42  1.5 µs  1.9 µs   26 µs  28.8 µs  3.57 µs",
        "  all        2,046  6.0 µs  7.6 µs  8.0 µs  3.69 ms  9.36 µs",
        "",
        "What they waited for  of all time that the sample's goroutines waited to run",
        "  share  what                                                      time",
        "   42 %  for another goroutine to stop running (Go's queues)    8.00 ms",
        "   52 %  for the kernel to run the thread that was to run them  10.0 ms",
        "  5.2 %  for the world to be started again                      1.00 ms",
        "  0.8 %  not known which                                         150 µs",
        "",
        "Stops of the world  all; until the last has stopped, and until all run again",
        "  stop            count     p50     p90     p99     max    total",
        "  stopped for GC    405  3.0 µs  3.8 µs  590 µs  922 µs  5.04 ms",
        "",
        "                      count     p50     p90     p99     max    total",
        "  threads, for a CPU    405  3.0 µs  3.8 µs  590 µs  922 µs  5.04 ms",
        "q: end   p: pause",
    ]


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (149, 40), (151, 24), (200, 50), (400, 120)])
def test_what_is_too_much_is_cut_to_the_screen(full: Window, size: tuple[int, int]) -> None:
    rows = shown(View(full), *size)
    assert len(rows) == size[1]
    causes, bars, states, living = (
        [row for row in rows if re.match(pattern, row)]
        for pattern in (
            rf"({'|'.join(map(re.escape, CAUSES))}) +2,040 ",
            r" *(over )?[0-9.]+ (µs|ms|s) .*█",
            r".*(reason \d+|\(others\)) ",
            r"main.second ",
        )
    )
    assert len(causes) >= 3
    assert len(bars) >= 6
    assert len(states) >= 6
    assert len(living) >= 3
    # Nothing of the histogram is left out where neighbours share a row.
    assert sum(int(row.split()[2].replace(",", "")) for row in bars) == len(CAUSES) * sum(MIXED.slots)
    (title,) = [row for row in rows if row.startswith("Sources of delay")]
    assert title.startswith(f"Sources of delay ({len(causes)} of {len(CAUSES)}) ") == (len(causes) < len(CAUSES))
    (all_,) = [row for row in rows if row.startswith("all goroutines")]
    assert all_.split()[2] == "24,480"
    assert rows[-1].startswith("q: end")


def test_a_large_screen_shows_more(full: Window) -> None:
    small, large = (("\n".join(shown(View(full), *size))) for size in ((80, 24), (200, 50)))
    for only_there in ("/opt/nats/nats-server\n", "Who waited to run most, by start function", " runtime.g\n"):
        assert (only_there in small, only_there in large) == (False, True)
    assert large.count("main.f") >= 10
    assert re.search(r"^main.second +running +2.00 ms +90.0 ms +900 ms +40,000 +0x0$", large, re.MULTILINE)


@pytest.mark.parametrize("size", [(79, 24), (80, 23), (40, 10), (20, 4), (3, 2), (1, 1)])
def test_a_screen_too_small_says_so(full: Window, size: tuple[int, int]) -> None:
    rows = shown(View(full), *size) if size[0] > 1 else frame(View(full), *size).plain.split("\n")
    assert len(rows) <= size[1]
    said = f"{size[0]}×{size[1]}: all is shown from 80×24 on"
    assert rows[0] == said or (rows[0].endswith("…") and said.startswith(rows[0][:-1]))
    if size == (40, 10):
        assert rows == [
            "40×10: all is shown from 80×24 on",
            "nats-server PID 1234, 10.0 s",
            "waits to run: 24,480, 174 ms",
            "p50 9.8 ms  p99 386 ms  max 400 ms",
            "threads, for a CPU: p99 590 µs",
            "THROTTLED for 1.40 s",
            "lost: 23",
            "q: end   p: pause   s: sort goroutines…",
        ]


def test_nothing_seen_so_far(window: Window) -> None:
    empty = replace(
        window,
        duration_ns=0,
        sched_latency={},
        states=(),
        functions=(),
        run_queue=Histogram(),
        worst=(),
        unseen=(),
        lost={},
        throttling=None,
        overhead_ns=None,
    )
    for size in ((80, 24), (200, 50), (30, 10)):
        shown(View(empty), *size)
    text = "\n".join(shown(View(empty), 80, 24))
    for said in (
        "lost: nothing\n",
        "est. cost - of a CPU\n",
        "none has ended so far",
        "none was seen so far",
        "no CPU controller counts throttling here\n",
    ):
        assert said in text
    assert re.search(r"^all goroutines +0 +- +- +- +- +0$", text, re.MULTILINE)
    calm = replace(empty, throttling=Throttling(50, 0, 0))
    assert "not throttled by a CPU limit\n" in "\n".join(shown(View(calm), 80, 24))


def test_the_longest_of_waits(window: Window) -> None:
    slow = Histogram(slots(s23=1, s24=3), sum_ns=60_000 * MS, max_ns=20_000 * MS)
    rows = shown(View(replace(window, sched_latency={"other": slow})), 80, 24)
    assert [row[:18].rstrip("█") for row in rows[5:7]] == ["     8.39 s  1  ", "over 8.39 s  3  "]


def order(view: View) -> list[str]:
    rows = shown(view, 80, 30)
    start = next(i for i, row in enumerate(rows) if row.startswith("Worst goroutines"))
    return [row.split()[0].rpartition(".")[2] for row in rows[start + 2 : start + 6]]


def test_keys_sort(window: Window) -> None:
    view: View | None = View(window)
    seen = []
    for _ in range(len(SORTS) + 1):
        assert view
        title = next(row for row in shown(view, 80, 24) if row.startswith("Worst goroutines"))
        seen.append((title.split("  ")[0], order(view)))
        view = press(view, "s")
    assert seen == [
        ("Worst goroutines seen alive, by longest wait to run", ["first", "second", "readLoop", "fourth"]),
        ("Worst goroutines seen alive, by all waits to run", ["second", "first", "readLoop", "fourth"]),
        ("Worst goroutines seen alive, by time in this state", ["readLoop", "first", "second", "fourth"]),
        seen[0],
    ]


@pytest.mark.parametrize("key", ["p", " "])
def test_keys_pause_and_go_on(window: Window, key: str) -> None:
    paused = press(View(window), key)
    assert paused
    later = replace(paused, latest=replace(window, duration_ns=25_000 * MS, goroutines=3))
    for size in ((80, 24), (200, 50)):
        rows = shown(later, *size)
        assert rows[0].endswith("  PAUSED at 10.0 s")
        assert any(row.startswith("41 goroutines") for row in rows)
        assert rows[-1].startswith("q: end   p: go on   s: ")
    assert "PAUSED" in shown(later, 40, 10)[1]
    again = press(later, key)
    assert again
    rows = shown(again, 80, 24)
    assert rows[0].endswith("  for 25.0 s")
    assert rows[1].startswith("3 goroutines")


def test_keys_end_or_mean_nothing(window: Window) -> None:
    view = View(window, sort=1)
    assert press(view, "q") is None
    for key in "xQPS\r\n\x04?1é":
        assert press(view, key) == view
    assert shown(replace(view, has_keys=False), 80, 24)[-1] == "Ctrl-C: end"


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("ps q", "ps q"),
        ("\x1b[A\x1b[1;5Cp\x1b[15~", "p"),
        ("\x1bOS\x1bOPs", "s"),
        ("\x1bq", ""),
        ("\x1b", ""),
        ("\x1b[<0;12;7Mq", "q"),
        ("é", "é"),
    ],
)
def test_arrows_and_function_keys_are_no_letters(sent: str, keys: str) -> None:
    assert keys_in(sent) == keys


NAMES = st.text(min_size=1, max_size=120)


@given(name=NAMES, reason=NAMES, width=st.integers(1, 220), height=st.integers(1, 60))
def test_hostile_names_break_no_line(name: str, reason: str, width: int, height: int) -> None:
    window = example()
    window = replace(
        window,
        target=replace(window.target, name=name, exe=name, go_version=reason, cgroup_path=name),
        states=(StateTime("waiting", reason, 5, 1),),
        functions=(function(name, 1),),
        worst=(replace(LIVING[1], function=name, reason=reason),),
        unseen=(name,),
    )
    file = io.StringIO()
    console = Console(file=file, width=width, height=height)
    console.print(Screen(frame(View(window), width, height)), end="")
    rows = file.getvalue().split("\n")
    assert len(rows) == height
    assert all(cell_len(row) <= width and (row.isprintable() or not row) for row in rows)


@pytest.mark.parametrize(("no_color", "red"), [(False, True), (True, False)])
def test_no_color_leaves_no_colour(window: Window, no_color: bool, red: bool) -> None:
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        color_system="standard",
        width=80,
        height=24,
        _environ={"NO_COLOR": "1"} if no_color else {},
    )
    console.print(Screen(frame(View(window), 80, 24)), end="")
    written = file.getvalue()
    assert ("31m" in written, "36m" in written) == (red, red)
    assert "\x1b[1m" in written  # bold is no colour
