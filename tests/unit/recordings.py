"""Recordings made up for tests: a small one with every kind of frame and event."""

import io
from pathlib import Path
from typing import Any

import numpy as np

from schedtrace import events, recording_frames
from schedtrace.events import EventType, Flag
from schedtrace.recording import Writer
from schedtrace.window import Target, Throttling

STARTED_NS = 1_000_000_000
G, OTHER_G = 0xC000002380, 0xC000004A80
START_PC = 0x47F000
RUNNABLE, RUNNING, WAITING, DEAD = 1, 2, 4, 6

HEADER = recording_frames.Header("0.1.0", "6.18.0", "x86_64", 2, STARTED_NS, 1_790_000_000_000_000_000)
TARGET = recording_frames.RecordedTarget(
    slot=1,
    target=Target(
        pid=1234,
        exe="/srv/caf\udce9",
        name="server",
        go_version="go1.27.2",
        level="full",
        mode="casgstatus",
        symbols="symtab",
        cgroup_path="/a",
        cgroup_hierarchy="cpu",
        cgroup_id=77,
        quota_cores=0.5,
    ),
    started_ns=STARTED_NS,
    reasons=("", "chan receive", "sleep"),
    probes=(recording_frames.RecordedProbe("runtime.casgstatus", "+0 push rbp", True),),
    unseen=("system calls",),
    waits_divided=True,
    goroutines_of_threads=True,
    limit_watched=True,
    stops_seen=True,
    stop_reasons=("unknown", "GC mark termination", "read mem stats"),
)
END = recording_frames.TargetEnd(
    slot=1,
    time_ns=STARTED_NS + 9_000_000,
    ended="the duration is over",
    threads=4,
    goroutines=2,
    hits=(5,),
    foreign_hits=0,
    lost={"interval_began_before_window": 1},
    throttling=Throttling(10, 2, 5_000_000),
    overhead_ns=4_000,
    cgroup_id=78,
    kernel=recording_frames.KernelCounts({14: 2}, {3: (1,) * 25 + (30, 20)}, {}, (0,) * 27),
)


def transition(time_ns: int, left: int, new: int, **fields: int) -> Any:
    """One event; ``old`` is ``left`` unless given, and times are counted from the recording's start."""
    event = np.zeros(1, events.TRANSITION)
    given = {"type": EventType.TRANSITION, "slot": 1, "tid": 101, "g": G, "old": left, "since_ns": time_ns, **fields}
    given["since_ns"] += STARTED_NS
    for name, value in {"time_ns": STARTED_NS + time_ns, "left": left, "new": new, **given}.items():
        event[name] = value
    return event.view(events.EVENT)


def goroutine(time_ns: int, start_pc: int = START_PC, goid: int = 0, **fields: int) -> Any:
    """A goroutine that was not seen before, or whose id is known now (``flags=0``)."""
    event = np.zeros(1, events.GOROUTINE)
    given = {"type": EventType.GOROUTINE, "slot": 1, "g": G, "flags": Flag.FIRST, **fields}
    for name, value in {"time_ns": STARTED_NS + time_ns, "start_pc": start_pc, "goid": goid, **given}.items():
        event[name] = value
    return event.view(events.EVENT)


def switch(time_ns: int, kind: EventType, since_ns: int | None = None, **fields: int) -> Any:
    """A thread that goes onto a CPU or off it."""
    event = np.zeros(1, events.SWITCH)
    given = {"type": kind, "slot": 1, "tid": 101, **fields}
    for name, value in {"time_ns": STARTED_NS + time_ns, **given}.items():
        event[name] = value
    event["since_ns"] = 0 if since_ns is None else STARTED_NS + since_ns
    return event.view(events.EVENT)


def off_cpu(time_ns: int, off_since_ns: int, runnable_since_ns: int, **fields: int) -> Any:
    """A thread that is on a CPU again, and a goroutine with it."""
    event = np.zeros(1, events.OFF_CPU)
    given = {"type": EventType.OFF_CPU, "slot": 1, "tid": 101, "start_pc": START_PC, **fields}
    given["off_since_ns"], given["runnable_since_ns"] = STARTED_NS + off_since_ns, STARTED_NS + runnable_since_ns
    for name, value in {"time_ns": STARTED_NS + time_ns, **given}.items():
        event[name] = value
    return event.view(events.EVENT)


def wait(time_ns: int, kernel_ns: int, undivided_ns: int = 0, **fields: int) -> Any:
    """What a goroutine waited for that begins to run at that time."""
    event = np.zeros(1, events.WAIT)
    given = {"type": EventType.WAIT, "slot": 1, "tid": 101, "g": G, **fields}
    for name, value in {"time_ns": STARTED_NS + time_ns, "kernel_ns": kernel_ns, **given}.items():
        event[name] = value
    event["undivided_ns"] = undivided_ns
    return event.view(events.EVENT)


def stop(time_ns: int, since_ns: int | None, stopped_ns: int | None = None, **fields: int) -> Any:
    """The world is to be started again; None: not known when."""
    event = np.zeros(1, events.STOP)
    given = {"type": EventType.STOP, "slot": 1, "tid": 101, **fields}
    given |= {} if since_ns is not None else {"flags": Flag.BEGAN_BEFORE}
    known = {name: ns for name, ns in (("since_ns", since_ns), ("stopped_ns", stopped_ns)) if ns is not None}
    given |= {name: STARTED_NS + ns for name, ns in known.items()}
    for name, value in {"time_ns": STARTED_NS + time_ns, **given}.items():
        event[name] = value
    return event.view(events.EVENT)


def throttled(time_ns: int, since_ns: int, throttled_ns: int, periods: int = 1, **fields: int) -> Any:
    """The counters of the CPU limit have grown."""
    event = np.zeros(1, events.THROTTLED)
    given = {"type": EventType.THROTTLED, "slot": 1, "throttled_ns": throttled_ns, "periods": periods, **fields}
    given |= {"time_ns": STARTED_NS + time_ns, "since_ns": STARTED_NS + since_ns}
    for name, value in given.items():
        event[name] = value
    return event.view(events.EVENT)


def some_events() -> Any:
    """A goroutine that is made, runs, waits, and another one that was there before."""
    return np.concatenate(
        [
            switch(1_000, EventType.THREAD_ON, 400, other_tid=9, cpu=1),
            goroutine(2_000),
            transition(2_000, DEAD, RUNNABLE, cause=0),
            goroutine(5_000, goid=18, flags=0),
            transition(5_000, RUNNABLE, RUNNING, since_ns=2_000),
            transition(9_000, RUNNING, WAITING, since_ns=5_000, reason=1),
            goroutine(9_500, goid=7, g=OTHER_G),
            transition(9_500, WAITING, RUNNABLE, g=OTHER_G, since_ns=0, reason=2, cause=7, flags=Flag.BEGAN_BEFORE),
            switch(10_000, EventType.THREAD_OFF, prev_state=1, cpu=1),
        ]
    )


def some_events_and_what_threads_do() -> Any:
    """Besides, the goroutine waited for the kernel for a third of its wait to run, and another one was off the CPU."""
    happened = some_events()
    ran = happened["time_ns"] == STARTED_NS + 5_000
    happened["flags"][ran & (happened["type"] == EventType.TRANSITION)] = Flag.DIVIDED
    return np.concatenate([happened[:3], off_cpu(3_000, 2_500, 2_500), wait(5_000, 1_000), happened[3:]])


def written(*pieces: Any) -> bytes:
    """A file of these frames and arrays of events, behind :data:`HEADER`."""
    file = io.BytesIO()
    writer = Writer(file, HEADER)
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            writer.events(piece)
        else:
            writer.frame(piece)
    return file.getvalue()


def whole_file() -> bytes:
    """A recording with every kind of frame."""
    return written(
        TARGET,
        some_events()[:4],
        recording_frames.Lost(cpu=1, count=3, since_ns=STARTED_NS + 5_100, until_ns=STARTED_NS + 8_000),
        recording_frames.Gap(since_ns=STARTED_NS + 5_100, until_ns=STARTED_NS + 8_000, count=12, why="not kept"),
        recording_frames.Trigger(time_ns=STARTED_NS + 5_000, slot=1, g=G, waited_ns=3_000),
        some_events()[4:],
        recording_frames.Symbols(1, {START_PC: "main.worker"}),
        END,
        recording_frames.Footer(STARTED_NS + 9_000_000, "interrupted", sent=12, lost=3, written=9),
    )


def stored(folder: Path, content: bytes) -> str:
    """The content as a file; its path."""
    path = folder / "some.rec"
    path.write_bytes(content)
    return str(path)
