"""Signals that end a command which goes on until it is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether the user wants the command to end. A signal raises KeyboardInterrupt, but inside :meth:`held_back`."""

    def __init__(self) -> None:
        self._heard = 0
        self._patience = 0

    def hear(self, _signal: int, _frame: FrameType | None) -> None:
        """A signal has come."""
        self._heard += 1
        if self._heard > self._patience:
            raise KeyboardInterrupt

    def is_set(self) -> bool:
        """Has one come? Python drops what is raised while it runs a destructor or the like."""
        return self._heard > 0

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Signals are to be looked for, and raise nothing: what is done must not stop half way. Only those who send a
        third will be heard even where it hangs."""
        self._patience = 2
        try:
            yield
        finally:
            self._patience = 0


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """SIGTERM, and SIGHUP where it isn't ignored (nohup), count as Ctrl-C does; and SIGINT does also where it is
    ignored at the start, as by a shell in what it runs in the background."""
    stop = Stop()
    ours = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        ours.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop.hear) for number in ours}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
