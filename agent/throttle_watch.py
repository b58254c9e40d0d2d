"""What the CPU limits of recorded processes held back, as events of the recording: no tracepoint tells of it, so the
kernel's counters (cpu.stat) are read again and again."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns

import numpy as np

from schedtrace.cgroups import CpuLimit, CpuStat
from schedtrace.events import EVENT, THROTTLED, Array, EventType


class ThrottleWatch:
    """``limits``: of each target that has one, by slot."""

    def __init__(self, limits: Mapping[int, CpuLimit]) -> None:
        self._looked_ns = monotonic_ns()
        self._limits = limits
        self._before: dict[int, CpuStat] = {}
        self.look()

    def look(self) -> Array:
        """What was held back since the look before this one: an event for each target of which that is so."""
        since_ns, self._looked_ns = self._looked_ns, monotonic_ns()
        grown = []
        for slot, limit in self._limits.items():
            if (now := limit.stat()) is None:
                continue  # the cgroup has gone, and the target with it
            before = self._before.get(slot, now)
            self._before[slot] = now
            more = now - before
            if more.throttled_periods > 0 or more.throttled_ns > 0:
                grown.append((slot, max(more.throttled_periods, 0), max(more.throttled_ns, 0)))
        events = np.zeros(len(grown), THROTTLED)
        events["type"], events["since_ns"], events["time_ns"] = EventType.THROTTLED, since_ns, monotonic_ns()
        for event, (slot, periods, ns) in zip(events, grown, strict=True):
            event["slot"], event["periods"], event["throttled_ns"] = slot, periods, ns
        found: Array = events.view(EVENT)
        return found
