"""The agent's log: one line an event, as text or JSON, and never more than a few lines of one kind.

A node can hold thousands of processes that all fail in one way. Each kind of event (a fixed word such as
"attach_failed") may therefore fill only so many lines in a period; what exceeds that is counted, and the count is said
in one line of its own.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

Level = Literal["info", "warning", "error"]
Field = str | int | float | bool | None

LINES_PER_KIND = 10
PERIOD_SECONDS = 60.0

_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)


@dataclass
class _Period:
    """What became of the events of one kind since ``began``."""

    level: Level
    began: float
    lines: int = 0
    suppressed: int = 0


class EventLog:
    """Writes events to a stream; for use by several threads at once.

    ``lines_per_kind`` events of one kind are written in ``period_seconds``, beginning with the first. A stream that
    can't be written to is no reason to stop watching: the event is lost.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        as_json: bool = False,
        lines_per_kind: int = LINES_PER_KIND,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._stream = stream
        self._as_json = as_json
        self._lines_per_kind = lines_per_kind
        self._period_seconds = period_seconds
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._periods: dict[str, _Period] = {}

    def info(self, kind: str, message: str, /, **fields: Field) -> None:
        """Something that happened as it should."""
        self._event("info", kind, message, fields)

    def warning(self, kind: str, message: str, /, **fields: Field) -> None:
        """Something is not seen, or seen in part."""
        self._event("warning", kind, message, fields)

    def error(self, kind: str, message: str, /, **fields: Field) -> None:
        """The agent can't do its work."""
        self._event("error", kind, message, fields)

    def tick(self) -> None:
        """Say how much was suppressed in periods that are over. To be called now and then; :meth:`info` and the others
        do it too."""
        with self._lock:
            self._end_periods(self._clock() - self._period_seconds)

    def close(self) -> None:
        """Say how much was suppressed in all periods. The stream stays open."""
        with self._lock:
            self._end_periods(float("inf"))

    def _event(self, level: Level, kind: str, message: str, fields: dict[str, Field]) -> None:
        with self._lock:
            now = self._clock()
            self._end_periods(now - self._period_seconds)
            period = self._periods.setdefault(kind, _Period(level, now))
            if period.lines < self._lines_per_kind:
                period.lines += 1
                self._write(level, kind, message, fields)
            else:
                period.suppressed += 1

    def _end_periods(self, began_by: float) -> None:
        for kind in [kind for kind, period in self._periods.items() if period.began <= began_by]:
            period = self._periods.pop(kind)
            if period.suppressed:
                message = f"{period.suppressed} more like the last {period.lines} were not written"
                self._write(period.level, kind, message, {"suppressed": period.suppressed})

    def _write(self, level: Level, kind: str, message: str, fields: dict[str, Field]) -> None:
        moment = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._as_json:
            line = json.dumps({"time": moment, "level": level, "event": kind, "message": message, **fields})
        else:
            pairs = "".join(f" {name}={_text(value)}" for name, value in fields.items())
            line = f"{moment} {level:<7} {kind}: {_printable(message)}{pairs}"
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # full, gone, or closed
            pass


def _text(value: Field) -> str:
    """A value in one word, quoted if it isn't plain."""
    text = (
        {None: "none", True: "yes", False: "no"}.get(value) if value is None or isinstance(value, bool) else str(value)
    )
    return text if text and _PLAIN.fullmatch(text) else json.dumps(text)


def _printable(text: str) -> str:
    """Messages quote names of files and processes, which are whatever strangers made them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
