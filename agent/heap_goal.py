"""The heap's size at which the collector wants a cycle to end, from its pacer's fields. Pure.

After heapGoalInternal and memoryLimitHeapGoal in runtime/mgcpacer.go, Go 1.19 to 1.27.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_GOAL = 1 << 62  # with GOGC=off the goal is 2**64 - 1
_MAX = (1 << 64) - 1
_MIN_RUNWAY = 64 << 10
_MIN_HEADROOM = 1 << 20
_HEADROOM_PERCENT = 3
_HEADROOM_IN_PERCENT_SINCE = 21


def heap_goal_bytes(fields: Mapping[str, int], minor: int) -> int | None:
    """The goal in bytes; None if there is none. ``fields`` are those of gcControllerState, as unsigned words; ``minor``
    is Go's version 1.minor."""
    goal = fields["gcPercentHeapGoal"]
    limited = _memory_limit_goal(fields, minor)
    if limited < goal:
        goal = limited
    else:
        goal = max(goal, fields["sweepDistMinTrigger"])
        if fields["triggered"] != _MAX:
            goal = max(goal, fields["triggered"] + _MIN_RUNWAY)
    return goal if goal < _NO_GOAL else None


def _memory_limit_goal(fields: Mapping[str, int], minor: int) -> int:
    free, ready, limit = fields["heapFree"], fields["mappedReady"], fields["memoryLimit"]
    # The runtime reads these again if they don't fit together, which a moment's difference can cause.
    other = max(ready - free - (fields["totalAlloc"] - fields["totalFree"]), 0)
    overage = max(ready - limit, 0)
    if other + overage >= limit:
        return fields["heapMarked"]
    goal = limit - (other + overage)
    headroom = _MIN_HEADROOM
    if minor >= _HEADROOM_IN_PERCENT_SINCE:
        headroom = max(headroom, goal // 100 * _HEADROOM_PERCENT)
    goal = headroom if goal < 2 * headroom else goal - headroom
    return max(goal, fields["heapMarked"])
