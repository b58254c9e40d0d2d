"""A busy process in pieces of time that are put together: with something and without it, by turns.

What it takes to bring it in and out again lies between the pieces, and is in none of them.
"""

import time
from collections.abc import Callable

from bench.counted import Reading
from bench.intervals import Sample


class Pieces:
    """``now``: CPU time and work of the process so far. ``samples``: as if it had gone from piece to piece at once."""

    def __init__(self, now: Callable[[], Reading]) -> None:
        self._now = now
        self.samples: list[Sample] = []
        self._time_ns = self._cpu_ns = self._units = 0

    def take(self, level: str, seconds: float) -> None:
        """One more piece. ``level``: as of :class:`Sample`."""
        self._append(level)
        before, began_ns = self._now(), time.monotonic_ns()
        time.sleep(seconds)
        after, ended_ns = self._now(), time.monotonic_ns()
        self._time_ns += ended_ns - began_ns
        self._cpu_ns += after.cpu_ns - before.cpu_ns
        self._units += after.units - before.units
        if not level:
            self._append(level)  # the end of a piece with something is where the next one without begins

    def _append(self, level: str) -> None:
        self.samples.append(Sample(self._time_ns, self._cpu_ns, self._units, level))
