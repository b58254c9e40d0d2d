"""What BCC's calls are wrapped in: their errors become one line, and signals wait until they are done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from schedtrace.errors import SchedtraceError


@contextmanager
def explained(what: str, kind: type[SchedtraceError]) -> Iterator[None]:
    """Turn a failure inside BCC into one line. libbcc writes the reason to file descriptor 2: it is caught here, with
    whatever else is written there meanwhile. One thread at a time may be in here."""
    with os.fdopen(os.memfd_create("schedtrace-stderr"), "w+b") as caught:
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except Exception as error:  # noqa: BLE001 (BCC raises plain Exception)
            caught.seek(0)
            lines = caught.read().decode(errors="replace").strip().splitlines()
            # The compiler's first error is the reason, its last line a count; others end with the reason.
            compiler_errors = [line for line in lines if ": error: " in line]
            said = "; ".join(line.strip() for line in compiler_errors[:1] or lines[-2:])
            raise kind(f"{what}: {error}{': ' + said if said else ''}") from None
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP while something is done that must not stop half way; they count
    afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs the handlers of signals in its main thread
        return
    arrived: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ours = [number for number in ends if signal.getsignal(number) not in (None, signal.SIG_IGN)]
    before = {number: signal.signal(number, remember) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
