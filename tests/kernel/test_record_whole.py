"""What a recording has of a process as a whole: stops of the world, and when its CPU limit held it back."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedtrace.abi import GoroutineState as State
from schedtrace.condition import Condition
from schedtrace.events import EventType, of_type
from schedtrace.recording import Recording
from schedtrace.timeline import Timeline
from tests.command import run
from tests.recorded import Result, in_one_order, recording
from tests.workload import Workload, binary
from tools import toolchains
from tools.cgroup import CpuLimit

COLLECTIONS, READINGS = 23, 31
TOLERANCE = 0.1


def _stops(result: Result) -> Any:
    return of_type(result.events(), EventType.STOP)


def _length_ns(stops: Any) -> Any:
    return stops["time_ns"].astype(np.int64) - stops["since_ns"].astype(np.int64)


@pytest.mark.parametrize("version", toolchains.RELEASES)
def test_every_stop_of_the_world(tmp_path: Path, version: str) -> None:
    """As many as the program has made; and of the runtime's own times, those that it also has."""
    program, minor = binary("stops", version), int(version[2:])
    arguments = ("-collections", COLLECTIONS, "-readings", READINGS)
    with Workload(program, *arguments) as target, recording([target.pid], tmp_path) as result:
        facts = target.run()
    stops = _stops(result)
    (window,) = result.replayed()
    assert window.stops is not None
    counts = {reason: histogram.count for reason, histogram in window.stops.items()}
    if minor < 21:
        assert counts == {"reason not known": 2 * COLLECTIONS + READINGS}
    else:
        collecting = {"GC sweep termination": COLLECTIONS, "GC mark termination": COLLECTIONS}
        assert counts == {**collecting, "read mem stats": READINGS}
    assert sum(h.sum_ns for h in window.stops.values()) == _length_ns(stops).sum()
    assert (stops["since_ns"][1:] >= stops["time_ns"][:-1]).all()
    assert (stops["since_ns"] != 0).all()
    assert ((stops["stopped_ns"] != 0) == (minor >= 23)).all()
    # The runtime's times begin a little later, and last until the threads are woken.
    if minor >= 22:
        of_collector = np.isin(stops["reason"], (1, 2))
        for of, name in ((of_collector, "collecting"), (~of_collector, "other")):
            assert _length_ns(stops[of]).sum() < 3 * facts[f"{name}_seconds"] * 1e9
        assert _length_ns(stops).sum() > 0.5 * (facts["stopping_seconds"]) * 1e9
    if minor >= 23:
        stopping_ns = (stops["stopped_ns"] - stops["since_ns"]).sum()
        assert 0.5 < stopping_ns / (facts["stopping_seconds"] * 1e9) < 3
    assert in_one_order(result.replayed()[0]) == in_one_order(result.live[0])


@pytest.mark.parametrize("version", ["1.23", "1.27"])
def test_nothing_begins_to_run_while_the_world_is_stopped(tmp_path: Path, version: str) -> None:
    program = binary("mixed", version)
    with Workload(program, "-gc", "-duration", "3s") as target, recording([target.pid], tmp_path) as result:
        target.run()
    stops, moves = _stops(result), of_type(result.events(), EventType.TRANSITION)
    runs = np.sort(moves["time_ns"][(moves["old"] == State.RUNNABLE) & (moves["new"] == State.RUNNING)])

    def inside(begin: Any, end: Any) -> int:
        return int((np.searchsorted(runs, end) - np.searchsorted(runs, begin, "right")).sum())

    assert len(stops) > 50
    assert len(runs) > 10_000
    assert inside(stops["stopped_ns"], stops["time_ns"]) == 0
    # At other times as long, many do.
    lengths = stops["time_ns"] - stops["stopped_ns"]
    earlier = [inside(stops["since_ns"] - by - lengths, stops["since_ns"] - by) for by in (10**6, 2 * 10**6, 3 * 10**6)]
    assert max(earlier) > 5


def test_stops_that_cannot_be_seen(tmp_path: Path) -> None:
    """Recording goes on without, and the recording and what is made of it say so."""
    program = tmp_path / "stops"
    shutil.copy(binary("stops", strip=True), program)
    image = program.read_bytes()
    name = b"runtime.startTheWorldWithSema\0"
    assert image.count(name) == 1
    program.write_bytes(image.replace(name, b"runtime.startTheWorldWithSemz\0"))
    with Workload(program) as target, recording([target.pid], tmp_path) as result:
        target.run()
    assert len(_stops(result)) == 0
    (window,) = result.replayed()
    said = "stops of the world: the compiler left no function runtime.startTheWorldWithSema"
    assert said in window.unseen
    assert window.stops is None
    for form in ("perfetto", "chrome", "html"):
        out = tmp_path / form
        assert run("export", result.path, "--format", form, "-o", out).returncode == 0
        assert said.encode() in out.read_bytes()


@pytest.mark.parametrize(
    ("threads", "cores", "period_seconds"), [(1, 0.5, 0.1), (4, 0.5, 0.1), (4, 0.4, 0.02)]
)
def test_when_the_cpu_limit_held_it_back(
    tmp_path: Path, threads: int, cores: float, period_seconds: float
) -> None:
    """The kernel's counters say how often and how long, the switches of threads say when: both agree."""
    with (
        CpuLimit(cores=cores, period_seconds=period_seconds) as limit,
        Workload(binary("spinners"), "-threads", threads, "-locked", 0, limit=limit) as target,
        recording([target.pid], tmp_path) as result,
    ):
        target.run()
    events = of_type(result.events(), EventType.THROTTLED)
    whole = result.live[0].throttling
    assert whole
    assert whole.throttled_periods > 10
    assert abs(int(events["periods"].sum()) - whole.throttled_periods) <= 1
    assert events["throttled_ns"].sum() == pytest.approx(whole.throttled_ns, rel=TOLERANCE)
    with Recording.open(result.path) as read:
        throttles = np.concatenate([block.throttles for block in Timeline(read).blocks()])
        cpus = read.header.cpus
    assert throttles["throttled_ns"].sum() == events["throttled_ns"].sum()
    seen = throttles[throttles["is_seen"]]
    assert seen["throttled_ns"].sum() > (1 - TOLERANCE) * events["throttled_ns"].sum()
    length_ns = int((seen["end_ns"] - seen["begin_ns"]).sum())
    # Summed over CPUs, it is as long as was counted: on one CPU at least, on all at most.
    assert (1 - 2 * TOLERANCE) * whole.throttled_ns / cpus < length_ns < (1 + TOLERANCE) * whole.throttled_ns
    # Threads that always want to run are held back for what they may not use, if nobody else uses it.
    share = length_ns / result.live[0].duration_ns
    assert 0.5 * (1 - cores / min(threads, cpus)) < share < 1.3 * (1 - cores / min(threads, cpus))


def test_what_held_it_back_is_written_with_the_wait(tmp_path: Path) -> None:
    """When something waits too long because of the CPU limit, the file has that. Once it may come between two looks."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        when: dict[str, Any] = {"when": Condition.parse("latency>30ms"), "kept_seconds": 1.0, "pause_seconds": 60.0}
        with (
            CpuLimit(cores=0.3) as limit,
            Workload(binary("latencies"), "-duration", "2s", limit=limit) as target,
            recording([target.pid], folder, **when) as result,
        ):
            target.run()
        with Recording.open(result.path) as read:
            trigger = read.triggers[0]
        began_ns = trigger.time_ns - trigger.waited_ns
        held = [
            (int(each["since_ns"]), int(each["time_ns"])) for each in of_type(result.events(), EventType.THROTTLED)
        ]
        if any(since_ns < trigger.time_ns and began_ns < until_ns for since_ns, until_ns in held):
            break
    else:
        pytest.fail(f"{began_ns} to {trigger.time_ns}, and the limit: {held}")


def test_without_a_limit_nothing_is_said_of_one(tmp_path: Path) -> None:
    with Workload(binary("spinners"), "-duration", "500ms") as target, recording([target.pid], tmp_path) as result:
        target.run()
    assert Counter(result.events()["type"].tolist())[EventType.THROTTLED] == 0
