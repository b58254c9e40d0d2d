"""``schedtrace record`` and ``schedtrace report`` as commands: what they print, and when a recording ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from schedtrace.procfs import open_process
from schedtrace.progress import Progress
from schedtrace.stopping import stop_signals

if TYPE_CHECKING:
    from schedtrace.record import Options, Recorded
    from schedtrace.recorded import Selection

MIB = 1 << 20


def record(pids: Sequence[int], options: Options, *, max_goroutines: int, as_json: bool) -> None:
    """Record these processes, and print what is in the file then."""
    with stop_signals() as stop:
        for pid in pids:
            open_process(pid).close()  # the usual refusals don't have to wait for the compiler
        from schedtrace.record import RecordingSession, compilation

        who = f"process {pids[0]}" if len(pids) == 1 else f"{len(pids)} processes"
        with Progress(f"attaching to {who}") as start:
            begun = compilation(len(pids), max_goroutines)
            with RecordingSession(pids, begun, options) as session, stop.held_back():
                start.finish()
                with Progress(f"recording {who}, until Ctrl-C at the latest"):
                    recorded = session.finish(session.until_end(lambda: not stop.is_set()))
        if as_json:
            json.dump(_json(recorded, options), sys.stdout)
            print()
        else:
            print(_text(recorded, options))


def _text(recorded: Recorded, options: Options) -> str:
    lines = [
        f"{options.path}: {recorded.events:,} events, {recorded.bytes_written / MIB:.1f} MiB",
        f"ended: {recorded.ended}",
        f"lost: {recorded.lost:,} events, since they were not read fast enough" if recorded.lost else "lost: nothing",
    ]
    if options.when:
        lines.insert(1, f"{options.when.text}: {recorded.triggers:,} times")
    return "\n".join(lines)


def _json(recorded: Recorded, options: Options) -> dict[str, Any]:
    from schedtrace.report_json import window_json

    return {
        "schema": "schedtrace.record/1",
        "path": options.path,
        "ended": recorded.ended,
        "events": recorded.events,
        "bytes": recorded.bytes_written,
        "lost_events": recorded.lost,
        "triggers": recorded.triggers if options.when else None,
        "targets": [window_json(window) for window in recorded.windows],
    }


def report(path: str, selection: Selection, *, as_json: bool) -> None:
    """Print what a recording says of each of its targets."""
    from rich.console import Console

    from schedtrace.recorded import windows
    from schedtrace.recording import Recording
    from schedtrace.report import summary
    from schedtrace.report_json import window_json

    with Recording.open(path) as recording:
        found = windows(recording, selection)
    console = Console(highlight=False)
    for i, window in enumerate(found):
        if as_json:
            print(json.dumps(window_json(window)))
        else:
            console.print(*[""] * bool(i), summary(window), sep="\n")
