"""When something is written of a recording that is only kept in memory. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FOR_EVER_NS = 1 << 62
_UNITS_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


@dataclass(frozen=True)
class Condition:
    """A goroutine waited longer than that to run."""

    text: str
    latency_ns: int

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Of ``latency>50ms``. Raises ValueError."""
        found = re.fullmatch(r"\s*latency\s*>\s*(\d{1,18}(?:\.\d{1,18})?)\s*(ns|us|µs|ms|s)\s*", text)
        if not found:
            raise ValueError(f"{text!r} is no condition; say, for instance, latency>50ms (ns, us, ms, s)")
        return cls(text, min(round(float(found[1]) * _UNITS_NS[found[2]]), _FOR_EVER_NS))
