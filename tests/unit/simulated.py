"""A made-up scheduler, whose recording is known in every detail: what a timeline has to find in it again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedtrace import events, recording_frames
from schedtrace.events import EventType, Flag
from tests.unit.recordings import STARTED_NS, TARGET, goroutine, switch, transition, written

IDLE, RUNNABLE, RUNNING, SYSCALL, WAITING, DEAD = 0, 1, 2, 3, 4, 6
CHANNEL, PREEMPTED, NEW, NETWORK = 3, 1, 0, 6
FIRST_G, FIRST_TID, FIRST_ID = 0xC000002000, 101, 7
START_PCS = (0x47F000, 0x480000, 0x481000)
SYMBOLS = {START_PCS[0]: "main.worker", START_PCS[1]: "example.com/a/b.(*Pool).serve"}  # of the third, no name is known


@dataclass(frozen=True, order=True)
class Span:
    """A goroutine, by id, was in a state; times count from the recording's start."""

    goid: int
    begin_ns: int
    end_ns: int
    state: str
    tid: int


@dataclass(frozen=True, order=True)
class ThreadSpan:
    """What a thread was for the kernel."""

    tid: int
    begin_ns: int
    end_ns: int
    state: str


@dataclass
class _Goroutine:
    goid: int
    g: int
    start_pc: int
    state: int = WAITING
    since_ns: int = 0
    tid: int = 0
    seen: bool = False
    named: bool = False
    begun_before: bool = True
    cause: int = 0
    reason: int = 1


@dataclass
class _Thread:
    tid: int
    runs: _Goroutine | None = None
    is_on: bool = True
    since_ns: int | None = None
    """Since when it has been what it is for the kernel; not known at first."""
    is_blocked: bool = False
    woken_ns: int = 0


@dataclass
class Simulation:
    """Runs ``steps`` steps. Afterwards: the events, and what happened."""

    steps: int
    seed: int = 1
    goroutines: int = 12
    threads: int = 3
    events: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    open_spans: list[Span] = field(default_factory=list)
    thread_spans: list[ThreadSpan] = field(default_factory=list)
    open_thread_spans: list[ThreadSpan] = field(default_factory=list)
    wakes: list[tuple[int, int, int]] = field(default_factory=list)
    """(time, id of the waker, id of the one woken)"""
    now_ns: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next_id = FIRST_ID + self.goroutines
        self._all = [
            _Goroutine(FIRST_ID + i, FIRST_G + 0x400 * i, START_PCS[i % len(START_PCS)]) for i in range(self.goroutines)
        ]
        self._threads = [_Thread(FIRST_TID + i) for i in range(self.threads)]
        for _ in range(self.steps):
            self.now_ns += self._random.randint(1, 5000)
            self._step()
        self.now_ns += 1000
        self._end()

    def _step(self) -> None:
        thread = self._random.choice(self._threads)
        if not thread.is_on or self._random.random() < 0.1:
            self._switch(thread)
        elif thread.runs is None:
            self._idle(thread)
        elif thread.runs.state == SYSCALL:
            self._move(thread, thread.runs, RUNNING)
        else:
            self._running(thread, thread.runs)

    def _idle(self, thread: _Thread) -> None:
        runnable = [g for g in self._all if g.state == RUNNABLE]
        waiting = [g for g in self._all if g.state == WAITING]
        if runnable and self._random.random() < 0.8:
            thread.runs = self._random.choice(runnable)
            self._move(thread, thread.runs, RUNNING)
        elif waiting:
            self._move(thread, self._random.choice(waiting), RUNNABLE, cause=NETWORK)

    def _running(self, thread: _Thread, runs: _Goroutine) -> None:
        waiting = [g for g in self._all if g.state == WAITING]
        dead = [g for g in self._all if g.state == DEAD]
        what = self._random.random()
        if what < 0.35 and waiting:
            self._wake(thread, runs, self._random.choice(waiting), CHANNEL)
        elif what < 0.45 and dead:
            self._create(thread, runs, self._random.choice(dead))
        elif what < 0.55:
            self._move(thread, runs, SYSCALL)
        elif what < 0.65:
            thread.runs = None
            self._move(thread, runs, RUNNABLE, cause=PREEMPTED)
        elif what < 0.7:
            thread.runs = None
            self._move(thread, runs, DEAD)
        else:
            thread.runs = None
            self._move(thread, runs, WAITING, reason=self._random.choice((1, 2)))

    def _create(self, thread: _Thread, by: _Goroutine, dead: _Goroutine) -> None:
        fresh = _Goroutine(self._next_id, dead.g, self._random.choice(START_PCS), DEAD, self.now_ns, begun_before=False)
        self._next_id += 1
        self._all[self._all.index(dead)] = fresh
        self._wake(thread, by, fresh, NEW)

    def _wake(self, thread: _Thread, by: _Goroutine, woken: _Goroutine, cause: int) -> None:
        self.wakes.append((self.now_ns, by.goid, woken.goid))
        self._move(thread, woken, RUNNABLE, cause=cause)

    def _move(self, thread: _Thread, g: _Goroutine, new: int, cause: int | None = None, reason: int = 0) -> None:
        if not g.seen:
            self.events.append(goroutine(self.now_ns, g.start_pc, 0, g=g.g, tid=thread.tid))
            g.seen = True
        if not g.named and g.state != DEAD:
            self.events.append(goroutine(self.now_ns, g.start_pc, g.goid, g=g.g, tid=thread.tid, flags=0))
            g.named = True
        self.events.append(
            transition(
                self.now_ns, g.state, new, tid=thread.tid, g=g.g, since_ns=g.since_ns, cpu=thread.tid % 2,
                flags=Flag.BEGAN_BEFORE if g.begun_before else 0, cause=g.cause if cause is None else cause,
                reason=reason or g.reason,
            )
        )  # fmt: skip
        if g.state != DEAD:
            self.spans.append(self._span(g))
        g.cause, g.reason = g.cause if cause is None else cause, reason or g.reason
        g.state, g.since_ns, g.begun_before = new, self.now_ns, False
        g.tid = thread.tid if new in (RUNNING, SYSCALL) else 0

    def _span(self, g: _Goroutine) -> Span:
        return Span(g.goid if g.named else 0, g.since_ns, self.now_ns, self._state(g), g.tid)

    @staticmethod
    def _state(g: _Goroutine) -> str:
        if g.state == RUNNABLE:
            causes = {CHANNEL: "channel", PREEMPTED: "preempted", NEW: "new", NETWORK: "network"}
            return f"runnable ({causes[g.cause]})"
        if g.state == WAITING:
            return f"waiting ({TARGET.reasons[g.reason]})"
        return {RUNNING: "running", SYSCALL: "syscall"}[g.state]

    def _switch(self, thread: _Thread) -> None:
        if thread.is_on:
            thread.is_blocked = self._random.random() < 0.5
            prev_state = 1 if thread.is_blocked else 0
            self.events.append(switch(self.now_ns, EventType.THREAD_OFF, tid=thread.tid, prev_state=prev_state, cpu=1))
            if thread.since_ns is not None:
                self.thread_spans.append(ThreadSpan(thread.tid, thread.since_ns, self.now_ns, "on CPU"))
            thread.is_on, thread.since_ns = False, self.now_ns
            return
        assert thread.since_ns is not None
        woken_ns = self._random.randint(thread.since_ns, self.now_ns) if thread.is_blocked else thread.since_ns
        if thread.is_blocked:
            self.thread_spans.append(ThreadSpan(thread.tid, thread.since_ns, woken_ns, "blocked"))
        self.thread_spans.append(ThreadSpan(thread.tid, woken_ns, self.now_ns, "runnable"))
        self.events.append(switch(self.now_ns, EventType.THREAD_ON, woken_ns, tid=thread.tid, cpu=1))
        thread.is_on, thread.since_ns = True, self.now_ns

    def _end(self) -> None:
        unnamed = {g.goid for g in self._all if not g.named}  # its id becomes known when it runs
        self.wakes = [(time_ns, by, 0 if woken in unnamed else woken) for time_ns, by, woken in self.wakes]
        self.open_spans = [self._span(g) for g in self._all if g.seen and g.state != DEAD]
        for thread in self._threads:
            if thread.since_ns is not None:
                state = "on CPU" if thread.is_on else "off CPU" if thread.is_blocked else "runnable"
                self.open_thread_spans.append(ThreadSpan(thread.tid, thread.since_ns, self.now_ns, state))

    def all_events(self) -> Any:
        """One array of all."""
        return np.concatenate([np.zeros(0, events.EVENT), *self.events])

    def frames(self, most: int) -> Iterator[Any]:
        """The events in frames of 1 to ``most``."""
        every, start = self.all_events(), 0
        while start < len(every):
            count = self._random.randint(1, most)
            yield every[start : start + count]
            start += count

    def file(self, most: int = 1000, *more: Any) -> bytes:
        """The recording as a file."""
        ended = recording_frames.Footer(STARTED_NS + self.now_ns, "interrupted", 0, 0, 0)
        return written(TARGET, *self.frames(most), recording_frames.Symbols(1, SYMBOLS), *more, ended)
