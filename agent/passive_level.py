"""The passive level of many processes at once, for scrapes: what was read last of each, and who can't be read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from schedtrace.errors import SchedtraceError
from schedtrace.passive import PassiveReader
from schedtrace.patience import Patience
from schedtrace.procfs import Process, open_process
from schedtrace.runtime_plan import RuntimePlan
from schedtrace.runtime_state import RuntimeState, RuntimeTotals

_MOST_REMEMBERED = 1000
_MOST_FAILURES = 2
"""A read may fail once: of a program that hasn't come as far as its first goroutine."""


@dataclass(eq=False)
class _Target:
    process: Process
    reader: PassiveReader
    before: RuntimeTotals | None
    """What was counted before it was dropped and watched again."""
    state: RuntimeState | None = None
    totals: RuntimeTotals | None = None
    """Since it has been watched, this time."""
    current: bool = False
    failures: int = 0
    in_use: bool = False
    """The reading thread has it, or is left behind with it."""

    def take(self, state: RuntimeState) -> None:
        """This was read now. What it comes to remains the same object while it is the same."""
        if state is not self.state:
            counted = RuntimeTotals.of(state)
            self.totals = counted.since(self.before) if self.before else counted
        self.state, self.current, self.failures = state, True, 0


class PassiveLevel:
    """:meth:`read` is for one thread, the others for any."""

    def __init__(self, refused: Callable[[int, str], None]) -> None:
        """``refused`` is told the PID and the reason when a process is given up."""
        self._refused = refused
        self._lock = threading.Lock()
        self._targets: dict[int, _Target] = {}
        self._left: dict[int, tuple[Process, RuntimeTotals]] = {}
        """What dropped processes that live on had counted: they may come back."""
        self._leaving: list[_Target] = []  # dropped while in use
        self._patience: Patience[_Target, RuntimeState | None] = Patience()

    def watch(self, process: Process, plan: RuntimePlan, load_bias: int) -> None:
        """Read this process from now on. Raises SchedtraceError if it has gone or can't be read."""
        own = open_process(process.pid)  # which may stay open after the other is closed
        with self._lock:
            former, before = self._left.pop(process.pid, (None, None))
        if former is None or _running(former) != _running(own):
            before = None
        try:
            target = _Target(own, PassiveReader(own, plan, load_bias), before)
        except BaseException:
            own.close()
            raise
        if _running(own) != _running(process):
            own.close()
            return
        with self._lock:
            self._targets[process.pid] = target

    def drop(self, pid: int) -> None:
        """Read this process no longer."""
        with self._lock:
            target = self._targets.pop(pid, None)
            if target is None:
                return
            if target.state and not target.process.exited() and len(self._left) < _MOST_REMEMBERED:
                self._left[pid] = (target.process, RuntimeTotals.of(target.state))
            if target.in_use:
                self._leaving.append(target)
            else:
                target.process.close()

    def totals(self, pid: int) -> RuntimeTotals | None:
        """What the runtime of this process had counted when it was read last; None if it never was. Since the process
        began, or since it was watched again after :meth:`drop`."""
        with self._lock:
            target = self._targets.get(pid)
            return target.totals if target else None

    def state(self, pid: int) -> RuntimeState | None:
        """What the last :meth:`read` read of this process; None if it can't be read."""
        with self._lock:
            target = self._targets.get(pid)
            return target.state if target and target.current else None

    def read(self) -> None:
        """Read all processes."""
        with self._lock:
            self._left = {pid: left for pid, left in self._left.items() if Path(f"/proc/{pid}").exists()}
            targets = {pid: t for pid, t in self._targets.items() if t.failures < _MOST_FAILURES}
            for target in targets.values():
                target.in_use, target.current = True, False
        results = self._patience.call({target: target.reader.read for target in targets.values()})
        refusals = []
        with self._lock:
            for pid, target in targets.items():
                result = results[target]
                target.in_use = target in self._patience.hanging
                if isinstance(result, SchedtraceError):
                    target.failures += 1
                    if target.failures == _MOST_FAILURES:
                        refusals.append((pid, str(result)))
                elif result is not None:
                    target.take(result)
            for target in [target for target in self._leaving if target not in self._patience.hanging]:
                self._leaving.remove(target)
                target.process.close()
        for pid, reason in refusals:
            self._refused(pid, reason)

    def close(self) -> None:
        """Let go of the processes."""
        for pid in list(self._targets):
            self.drop(pid)


def _running(process: Process) -> tuple[object, ...]:
    """What tells one run of a program from another."""
    return process.pid, process.start_time_ticks, process.identity, process.image
