"""Calls that strangers can make hang, with an end to waiting for them.

Memory of another process may be backed by whom it likes (a FUSE file system, userfaultfd), and then to read it waits
until that one answers; so do files of /proc about a process whose memory is being changed. No signal and no time limit
of the kernel's ends such a wait but the end of the process. So the calls are made in a thread, which is left behind if
one takes too long, and goes on by itself if it ever returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from time import monotonic
from typing import Generic, TypeVar

from schedtrace.errors import NotTraceable, SchedtraceError

_Key = TypeVar("_Key", bound=Hashable)
_Result = TypeVar("_Result")

PATIENCE_SECONDS = 2.0
MOST_LEFT_BEHIND = 8


class _Round(Generic[_Key, _Result]):
    """One thread's work, and how far it has come."""

    def __init__(self, calls: Mapping[_Key, Callable[[], _Result]]) -> None:
        self.results: dict[_Key, _Result | SchedtraceError] = {}
        self.current: _Key | None = None
        self.since = monotonic()
        self.left_behind = False
        self.changed = threading.Condition()
        self.done = False
        self.error: BaseException | None = None
        self._calls = dict(calls)

    def run(self) -> None:
        try:
            for key, call in self._calls.items():
                with self.changed:
                    if self.left_behind:
                        return
                    self.current, self.since = key, monotonic()
                result = _outcome(call)
                with self.changed:
                    if not self.left_behind:
                        self.results[key] = result
        except BaseException as error:  # noqa: BLE001 (for the caller's thread)
            self.error = error
        finally:
            with self.changed:
                self.done = True
                self.changed.notify_all()

    def wait(self, patience_seconds: float) -> bool:
        """Until all is done, or one call takes longer than that: then False."""
        with self.changed:
            while not self.done:
                left = self.since + patience_seconds - monotonic()
                if left <= 0:
                    self.left_behind = True
                    return False
                self.changed.wait(left)
        return True


class Patience(Generic[_Key, _Result]):
    """Makes calls one after the other. Not for use by several threads at once."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS, most_left_behind: int = MOST_LEFT_BEHIND) -> None:
        self._patience_seconds = patience_seconds
        self._most_left_behind = most_left_behind
        self._hanging: dict[threading.Thread, _Key] = {}

    @property
    def hanging(self) -> frozenset[_Key]:
        """Whose calls were left behind, when last looked at."""
        return frozenset(self._hanging.values())

    def call(self, calls: Mapping[_Key, Callable[[], _Result]]) -> dict[_Key, _Result | SchedtraceError]:
        """What each call returned, or the SchedtraceError that it raised: a NotTraceable if it took too long, if an
        earlier call for that key still hangs, or if already as many hang as may. Other exceptions are raised."""
        for thread in [thread for thread in self._hanging if not thread.is_alive()]:
            del self._hanging[thread]
        hanging = self.hanging
        results: dict[_Key, _Result | SchedtraceError] = {key: self._refusal() for key in calls if key in hanging}
        left = {key: call for key, call in calls.items() if key not in hanging}
        while left:
            if len(self._hanging) >= self._most_left_behind:
                reason = f"{len(self._hanging)} others let whoever reads their memory wait, and more are not tried"
                results.update({key: NotTraceable(reason) for key in left})
                break
            work: _Round[_Key, _Result] = _Round(left)
            thread = threading.Thread(target=work.run, name="schedtrace-reader", daemon=True)
            thread.start()
            finished = work.wait(self._patience_seconds)
            if work.error:
                raise work.error
            results.update(work.results)
            if not finished and work.current is not None:
                self._hanging[thread] = work.current
                results[work.current] = self._refusal()
            left = {key: call for key, call in left.items() if key not in results}
        return results

    def _refusal(self) -> NotTraceable:
        return NotTraceable(f"to read its memory takes more than {self._patience_seconds:g} s: it is not tried further")


def _outcome(call: Callable[[], _Result]) -> _Result | SchedtraceError:
    try:
        return call()
    except SchedtraceError as error:
        return error
