"""Go's own execution trace as an oracle: how often goroutines changed state, as the program itself recorded
it.

A trace of any release from 1.19 on is read with the newest release's ``go tool trace -d=parsed``, whose
text has, for each change, a line like ``M=1 P=0 G=9 StateTransition Time=7 GoID=9 Running->Waiting
Reason="chan receive"`` and, where a goroutine comes into being, the function it starts in as the first line
of a ``TransitionStack``.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools import toolchains

_TRANSITION = re.compile(
    r"^M=\S+ P=\S+ G=\S+ StateTransition Time=(\d+) GoID=(\d+) (\w+)->(\w+) Reason=\"(.*)\"$"
)
# "\truntime.main @ 0x43f0e0", with the type parameters of generic functions among the possible letters.
_FRAME = re.compile(r"^\t(\S.*) @ 0x[0-9a-f]+$")
BEFORE = "(before the trace)"


@dataclass(frozen=True)
class Transition:
    """One change of one goroutine's state; states and reasons are spelt as the trace spells them."""

    time_ns: int
    goroutine: int
    before: (
        str  # NotExist, Undetermined (what it was when the trace began), Runnable, Running, Waiting, Syscall
    )
    after: str
    reason: str


@dataclass
class Trace:
    """All changes of state in a trace, counted."""

    # (start function, before, after) -> number; the function is BEFORE for goroutines older than the trace.
    by_function: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    # (start function, reason) -> number of parks, Running->Waiting.
    parks: Counter[tuple[str, str]] = field(default_factory=Counter)
    goroutines: dict[int, str] = field(default_factory=dict)  # start function of each that began in the trace

    def count(self, before: str, after: str, *functions: str) -> int:
        """Transitions of that kind; of goroutines that started in these functions, or of all if none is
        named."""
        return sum(
            number
            for (function, *states), number in self.by_function.items()
            if states == [before, after] and (not functions or function in functions)
        )


def read(path: Path) -> Trace:
    """The trace in that file. Raises RuntimeError if the tool can't read it."""
    trace = Trace()
    for transition, start in _transitions(path):
        if start:
            trace.goroutines[transition.goroutine] = start
        function = trace.goroutines.get(transition.goroutine, BEFORE)
        trace.by_function[function, transition.before, transition.after] += 1
        if (transition.before, transition.after) == ("Running", "Waiting"):
            trace.parks[function, transition.reason] += 1
    return trace


def _transitions(path: Path) -> Iterator[tuple[Transition, str | None]]:
    """Every goroutine's changes, with the start function where it comes into being."""
    command: list[str | Path] = [toolchains.go_tool("trace"), "-d=parsed", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stdout
        assert tool.stderr
        lines = iter(tool.stdout)
        for line in lines:
            if not (match := _TRANSITION.match(line)):
                continue
            time, goroutine, before, after, reason = match.groups()
            start = None
            if before == "NotExist" and next(lines, "").startswith("TransitionStack="):
                frame = _FRAME.match(next(lines, ""))
                start = frame[1] if frame else None
            yield Transition(int(time), int(goroutine), before, after, reason), start
        errors = tool.stderr.read()
    if tool.returncode:
        raise RuntimeError(f"go tool trace can't read {path}: {errors}")
