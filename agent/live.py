"""``schedtrace attach`` on the screen: a table that renews itself on a terminal, plain lines into a pipe, or one JSON
object.

Ctrl-C, SIGTERM, the end of the duration and the end of the target all lead to the same summary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from typing import TYPE_CHECKING

from schedtrace.procfs import open_process
from schedtrace.session import Compilation, Sizes
from schedtrace.stopping import Stop, stop_signals

if TYPE_CHECKING:
    from schedtrace.attach import Watch
    from schedtrace.window import Window


def _until_end(
    watch: Watch,
    stop: Stop,
    duration_seconds: float | None,
    interval_seconds: float,
    show: Callable[[Window], None],
) -> str:
    """Show the window so far at every interval until the session ends; why it has ended."""
    deadline = None if duration_seconds is None else monotonic() + duration_seconds
    try:
        while not stop.is_set():
            left = interval_seconds if deadline is None else min(interval_seconds, deadline - monotonic())
            ended = watch.ended(max(left, 0.0))
            if ended:
                return ended
            if deadline is not None and monotonic() >= deadline:
                return "the duration is over"
            show(watch.window())
    except KeyboardInterrupt:
        pass
    return "interrupted"


def attach(
    pid: int,
    *,
    duration_seconds: float | None,
    interval_seconds: float,
    syscalls: bool,
    max_goroutines: int,
    as_json: bool,
) -> None:
    """Watch ``pid`` and print what is seen to standard output, until the duration, the target or the user ends it."""
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        open_process(pid).close()  # the usual refusals don't have to wait for the compiler
        compilation = stack.enter_context(Compilation(Sizes(goroutines=max_goroutines)))
        from schedtrace.attach import Watch  # while BPF is compiled

        watch = stack.enter_context(Watch(pid, compilation, syscalls=syscalls))
        # What prints is imported while the first data come in.
        from rich.console import Console
        from rich.live import Live

        from schedtrace import report
        from schedtrace.report_json import window_json

        console = Console(highlight=False)
        if as_json:
            ended = _until_end(watch, stop, duration_seconds, interval_seconds, lambda _window: None)
        elif console.is_terminal and not console.is_dumb_terminal:
            with Live(console=console, refresh_per_second=4, screen=False, transient=True) as screen:
                ended = _until_end(
                    watch, stop, duration_seconds, interval_seconds, lambda w: screen.update(report.live_view(w))
                )
        else:
            lines = report.IntervalLines()
            ended = _until_end(
                watch, stop, duration_seconds, interval_seconds, lambda w: print(lines.next_line(w), flush=True)
            )
        watch.stop()
        window = watch.window(ended)
        if as_json:
            json.dump(window_json(window), sys.stdout)
            print()
        else:
            console.print(report.summary(window))
