"""``schedtrace attach`` while it goes on: a live screen on a terminal, plain lines into a pipe, or at its end one JSON
object.

Ctrl-C, SIGTERM, the end of the duration and the end of the target all lead to the same summary.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from schedtrace.bpf_text import RECORD
from schedtrace.compilation import Compilation, Sizes
from schedtrace.procfs import open_process
from schedtrace.progress import Progress
from schedtrace.stopping import Stop, stop_signals
from schedtrace.streams import is_ours, is_plain
from schedtrace.window import SAMPLED_LEVEL

if TYPE_CHECKING:
    from schedtrace.attach import Watch
    from schedtrace.screen import View
    from schedtrace.terminal import Terminal
    from schedtrace.window import Window


class _Output:
    """What is done with what is seen while the session goes on: nothing. ``tick_seconds``: it wants to be asked so
    often whether the session may go on; ``at_once``: it shows something from the start."""

    tick_seconds = inf
    at_once = False

    def show(self, window: Window) -> None:
        """All that was seen so far."""

    def goes_on(self) -> bool:
        """False when the user has ended it."""
        return True


class _Lines(_Output):
    """Plain lines."""

    def __init__(self) -> None:
        from schedtrace.report import IntervalLines

        self._lines = IntervalLines()

    def show(self, window: Window) -> None:
        print(self._lines.next_line(window), flush=True)


class _Screen(_Output):
    """The whole terminal."""

    tick_seconds = 0.05
    at_once = True

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._view: View | None = None

    def show(self, window: Window) -> None:
        from schedtrace.screen import View

        self._view = replace(self._view, latest=window) if self._view else View(window)
        self._draw()

    def _draw(self) -> None:
        from schedtrace.screen import frame

        if self._view:
            size = self._terminal.size()
            view = replace(self._view, has_keys=self._terminal.has_keys)
            self._terminal.draw(frame(view, *size), size)

    def goes_on(self) -> bool:
        from schedtrace.screen import press

        self._terminal.attend()
        before = self._view
        for key in self._terminal.pressed():
            if self._view and (view := press(self._view, key)) is None:
                return False
            self._view = self._view and view
        if self._view != before or self._terminal.needs_frame():
            self._draw()
        return True


def _until_end(
    watch: Watch, stop: Stop, duration_seconds: float | None, interval_seconds: float, output: _Output
) -> str:
    """Show the window so far at every interval until the session ends; why it has ended."""
    now = monotonic()
    deadline = inf if duration_seconds is None else now + duration_seconds
    next_show = now if output.at_once else now + interval_seconds
    try:
        while not stop.is_set():
            left = min(next_show, deadline) - monotonic()
            ended = watch.ended(max(min(left, output.tick_seconds), 0.0))
            if ended:
                return ended
            if monotonic() >= deadline:
                return "the duration is over"
            if not output.goes_on():
                break
            if monotonic() >= next_show:
                next_show = monotonic() + interval_seconds
                output.show(watch.window())
    except KeyboardInterrupt:
        pass
    return "interrupted"


def attach(
    pid: int,
    *,
    duration_seconds: float | None,
    interval_seconds: float,
    level: str,
    syscalls: bool,
    max_goroutines: int,
    as_json: bool,
) -> None:
    """Watch ``pid`` and print what is seen to standard output, until the duration, the target or the user ends it."""
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        open_process(pid).close()  # the usual refusals don't have to wait for the compiler
        start = stack.enter_context(Progress(f"attaching to process {pid}"))
        programs = {RECORD} if level == SAMPLED_LEVEL else set()
        compilation = stack.enter_context(Compilation(Sizes(goroutines=max_goroutines), programs))
        from schedtrace.attach import Watch  # while BPF is compiled

        watch = stack.enter_context(Watch(pid, compilation, level=level, syscalls=syscalls))
        start.finish()
        # What prints is imported while the first data come in.
        from rich.console import Console

        from schedtrace.report import summary
        from schedtrace.report_json import window_json

        until_end = partial(_until_end, watch, stop, duration_seconds, interval_seconds)
        console = Console(highlight=False)
        if as_json:
            with Progress(f"watching process {pid}"):
                ended = until_end(_Output())
        elif is_plain(1) or not is_ours(1) or not console.is_terminal:
            ended = until_end(_Lines())
        else:
            from schedtrace.terminal import Terminal

            with stop.held_back(), Terminal(console) as terminal:
                ended = until_end(_Screen(terminal))
        watch.stop()
        window = watch.window(ended)
        if as_json:
            json.dump(window_json(window), sys.stdout)
            print(flush=True)
        else:
            console.print(summary(window))
        with Progress("taking the probes out"):
            watch.close()
