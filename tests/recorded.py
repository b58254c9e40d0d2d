"""Processes recorded in this process, beside what the kernel counted of them meanwhile."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from schedtrace.events import EVENT
from schedtrace.record import BUFFER_PAGES, MAX_GOROUTINES, Options, Recorded, RecordingSession, compilation
from schedtrace.recorded import Selection, windows
from schedtrace.recording import Recording
from schedtrace.window import Window

ALL = Selection()


@dataclass
class Result:
    """``recorded`` is there once the recording has ended."""

    path: str
    recorded: Recorded | None = None

    @property
    def live(self) -> list[Window]:
        """What attach would have shown: the kernel's own counts."""
        assert self.recorded
        return list(self.recorded.windows)

    def replayed(self, selection: Selection = ALL) -> list[Window]:
        """What report shows."""
        with Recording.open(self.path) as recording:
            assert recording.cut == ""
            return windows(recording, selection)

    def events(self) -> Any:
        """All events in the file."""
        with Recording.open(self.path) as recording:
            return np.concatenate([np.zeros(0, EVENT), *recording.events()])


@contextmanager
def recording(
    pids: Sequence[int],
    folder: Path,
    *,
    buffer_pages: int = BUFFER_PAGES,
    max_goroutines: int = MAX_GOROUTINES,
    drain: bool = True,
    **options: Any,
) -> Iterator[Result]:
    """Record these processes while the block runs, or until the recording ends by itself. Without ``drain``, nothing is
    read until the end."""
    result = Result(str(folder / "some.rec"))
    over = threading.Event()
    begun = compilation(len(pids), max_goroutines, buffer_pages)
    with RecordingSession(pids, begun, Options(result.path, **options)) as session:
        why = ["interrupted"]

        def record() -> None:
            why[0] = session.until_end(lambda: not over.is_set())

        thread = threading.Thread(target=record)
        if drain:
            thread.start()
        try:
            yield result
        finally:
            over.set()
            if drain:
                thread.join()
        result.recorded = session.finish(why[0])


def in_one_order(window: Window) -> Window:
    """States and functions with the same time come in any order. Single goroutines are shown while one watches only,
    stops of the world of recordings only."""
    return replace(
        window,
        functions=tuple(sorted(window.functions, key=lambda f: f.function)),
        off_cpu_functions=tuple(sorted(window.off_cpu_functions, key=lambda f: f.function)),
        worst=(),
        stops=None,
        states=tuple(sorted(window.states, key=lambda s: (s.state, s.reason))),
    )


def until(happened: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until it has happened, at most so long."""
    waiting = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if happened():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen in time")
