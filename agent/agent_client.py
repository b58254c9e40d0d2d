"""What an agent on this node says of the processes it watches: its /processes."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedtrace.errors import SchedtraceError

SCHEMA = "schedtrace.processes/1"
_SECONDS = 10.0
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class AgentView:
    """Of one process. ``level``: what is done now; ``seen_seconds`` and ``hits`` by level, ``overhead_seconds`` by
    whose CPU time; ``budget_seconds``: what may still be spent, None without a limit."""

    pid: int
    level: str
    seen_seconds: Mapping[str, float]
    hits: Mapping[str, int]
    overhead_seconds: Mapping[str, float]
    budget_seconds: float | None


def ask_agent(address: str) -> dict[int, AgentView]:
    """By PID. ``address``: HOST:PORT or a URL. Raises SchedtraceError if there is no agent that answers."""
    base = address if "://" in address else f"http://{address}"
    if not base.startswith(("http://", "https://")):
        raise SchedtraceError(f"{address}: not the address of an agent: give HOST:PORT, http:// or https://")
    try:
        with urllib.request.urlopen(f"{base.rstrip('/')}/processes", timeout=_SECONDS) as answer:
            content = json.loads(answer.read(_MOST_BYTES))
        if content["schema"] != SCHEMA:
            raise SchedtraceError(f"the agent at {address} is of another version: it says {content['schema']!r:.80}")
        return {view.pid: view for view in map(_view, content["processes"])}
    except urllib.error.HTTPError as error:
        error.close()
        raise SchedtraceError(f"{address}: no agent answers there, or an older one: {error.code}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise SchedtraceError(f"{address}: no agent answers there: {why}") from None
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise SchedtraceError(f"{address}: what answers there is no agent") from None


def _view(process: Mapping[str, Any]) -> AgentView:
    numbers = {
        key: {str(name): float(value) for name, value in dict(process[key]).items()}
        for key in ("seen_seconds", "hits", "overhead_seconds")
    }
    budget = process["budget_seconds"]
    return AgentView(
        pid=int(process["pid"]),
        level=str(process["level"]),
        seen_seconds=numbers["seen_seconds"],
        hits={level: int(n) for level, n in numbers["hits"].items()},
        overhead_seconds=numbers["overhead_seconds"],
        budget_seconds=None if budget is None else float(budget),
    )
