"""Go's own execution trace as an oracle: how often goroutines changed state, as the program itself recorded
it.

A trace of any release from 1.19 on is read with the newest release's ``go tool trace -d=parsed``, whose
text has, for each change, a line like ``M=1 P=0 G=9 StateTransition Time=7 GoID=9 Running->Waiting
Reason="chan receive"`` and below it the lines of a ``TransitionStack``: of the goroutine that changes or,
where one comes into being, the function it starts in. The tracer looks through the wrappers that the compiler
makes for ``go f(x)``: it names f.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools import toolchains

_TRANSITION = re.compile(r"^M=\S+ P=(-?\d+) G=\S+ StateTransition Time=(\d+) GoID=(\d+) (\w+)->(\w+) Reason=\"(.*)\"$")
# "\truntime.main @ 0x43f0e0", with the type parameters of generic functions among the possible letters.
_FRAME = re.compile(r"^\t(\S.*) @ 0x[0-9a-f]+$")
BEFORE = "(before the trace)"
GOYIELD = ("runtime.goyield", "runtime.semrelease1")  # the second in Go 1.22 and 1.23, which inline the first


@dataclass(frozen=True)
class Transition:
    """One change of one goroutine's state; states and reasons are spelt as the trace spells them."""

    time_ns: int
    goroutine: int
    before: str  # NotExist, Undetermined (what it was when the trace began), Runnable, Running, Waiting, Syscall
    after: str
    reason: str
    top: str  # the first frame of the TransitionStack, empty if there is none
    has_p: bool  # whether the thread that wrote it had a P


@dataclass
class Trace:
    """All changes of state in a trace, counted and summed up."""

    # (start function, before, after) -> number; the function is BEFORE for goroutines older than the trace.
    by_function: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    # (start function, reason) -> number of parks, Running->Waiting.
    parks: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Start function -> Running->Runnable that the trace calls preempted: by runtime.goyield, and all others.
    goyields: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[str] = field(default_factory=Counter)
    # Start function -> Syscall->Runnable where the thread had found another P by then.
    other_p: Counter[str] = field(default_factory=Counter)
    # (start function, state) -> time spent in that state by goroutines of the trace, while they lived.
    time_ns: Counter[tuple[str, str]] = field(default_factory=Counter)
    goroutines: dict[int, str] = field(default_factory=dict)  # start function of each that began in the trace

    def count(self, before: str, after: str, *functions: str) -> int:
        """Transitions of that kind; of goroutines that started in these functions, or of all if none is
        named."""
        return sum(
            number
            for (function, *states), number in self.by_function.items()
            if states == [before, after] and (not functions or function in functions)
        )

    def add(self, transition: Transition, began_ns: int | None) -> None:
        """Count one more. ``began_ns``: when the goroutine entered the state it leaves."""
        before, after = transition.before, transition.after
        if before == "NotExist" and transition.top:
            self.goroutines[transition.goroutine] = transition.top
        function = self.goroutines.get(transition.goroutine, BEFORE)
        self.by_function[function, before, after] += 1
        if began_ns is not None:
            self.time_ns[function, before] += transition.time_ns - began_ns
        if (before, after) == ("Running", "Waiting"):
            self.parks[function, transition.reason] += 1
        elif (before, after) == ("Running", "Runnable") and transition.reason == "preempted":
            kind = self.goyields if transition.top in GOYIELD else self.preemptions
            kind[function] += 1
        elif (before, after) == ("Syscall", "Runnable") and transition.has_p:
            self.other_p[function] += 1


def read(path: Path) -> Trace:
    """The trace in that file. Raises RuntimeError if the tool can't read it."""
    trace = Trace()
    began_ns: dict[int, int] = {}
    for transition in _transitions(path):
        trace.add(transition, began_ns.get(transition.goroutine))
        began_ns[transition.goroutine] = transition.time_ns
    return trace


def _transitions(path: Path) -> Iterator[Transition]:
    command: list[str | Path] = [toolchains.go_tool("trace"), "-d=parsed", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stdout
        assert tool.stderr
        pending: Transition | None = None  # until the first frame of its stack is known
        in_stack = False
        for line in tool.stdout:
            if match := _TRANSITION.match(line):
                if pending:
                    yield pending
                p, time, goroutine, before, after, reason = match.groups()
                pending = Transition(int(time), int(goroutine), before, after, reason, "", int(p) >= 0)
            elif in_stack and pending and (frame := _FRAME.match(line)):
                pending = replace(pending, top=frame[1])
            in_stack = line == "TransitionStack=\n"
        if pending:
            yield pending
        errors = tool.stderr.read()
    if tool.returncode:
        raise RuntimeError(f"go tool trace can't read {path}: {errors}")
