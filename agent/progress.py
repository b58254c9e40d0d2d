"""What takes longer than a second says so: one line on the terminal of standard error, gone when it is done.

Written by a thread to a copy of descriptor 2: BCC's calls are made while that leads elsewhere (guards.py).
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from time import monotonic
from typing import Self

from schedtrace.streams import is_ours, is_plain

_PATIENCE_SECONDS = 1.0
_STEP_SECONDS = 0.5
_ERASE_LINE = b"\r\x1b[K"


class Progress:
    """Shows ``what`` and for how long it has gone on, in ``with``. Into a pipe or a file, and on a terminal that
    belongs to another job or can't erase a line, nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._descriptor: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if not is_plain(2):
            self._descriptor = os.dup(2)
            self._start = monotonic()
            self._thread.start()
        return self

    def _show(self) -> None:
        assert self._descriptor is not None
        wait = _PATIENCE_SECONDS
        with suppress(OSError):  # the terminal is gone
            while not self._done.wait(wait):
                if is_ours(self._descriptor):
                    said = f"schedtrace: {self._what} … {monotonic() - self._start:.0f} s"
                    width = os.get_terminal_size(self._descriptor).columns or 80
                    os.write(self._descriptor, _ERASE_LINE + said[: width - 1].encode())
                wait = _STEP_SECONDS
            if wait != _PATIENCE_SECONDS:
                os.write(self._descriptor, _ERASE_LINE)

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """It is done: the line goes. May be called twice."""
        if self._descriptor is not None:
            self._done.set()
            self._thread.join()
            os.close(self._descriptor)
            self._descriptor = None
