"""``schedtrace agent``: the fleet and the exporter as one process, from start to SIGTERM."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from schedtrace.bpf_text import all_programs
from schedtrace.check import require_capabilities
from schedtrace.exporter import Exporter
from schedtrace.fleet import Fleet
from schedtrace.logs import EventLog
from schedtrace.node import prepare_node
from schedtrace.pods import PodIndex
from schedtrace.selection import Selection
from schedtrace.session import Compilation, Session, Sizes
from schedtrace.tls import TlsFiles
from schedtrace.web import Address, MetricsServer


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    listen: Address
    select: Sequence[str]
    log_root: str
    log_json: bool
    max_series: int
    max_targets: int
    max_goroutines: int
    tls: TlsFiles | None


def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP does nothing: there is no configuration to read again.

    Raises SchedtraceError if the node or the options can't be used.
    """
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    selection = Selection.parse(options.select)
    events = EventLog(sys.stderr, as_json=options.log_json)
    require_capabilities()
    prepare_node()
    # One target is this process, while the cost of a hit is measured.
    sizes = Sizes(targets=options.max_targets + 1, goroutines=options.max_goroutines)
    with (
        Compilation(sizes, all_programs(), process_events=True) as compilation,
        Session(compilation, all_programs()) as session,
    ):
        ctypes.CDLL(None).malloc_trim(0)  # the compiler in this process has left 15 MB of free memory behind
        fleet = Fleet(session, PodIndex(options.log_root), selection, events)
        server = MetricsServer(
            options.listen,
            Exporter(fleet.view, options.max_series),
            events,
            ready=lambda: "" if fleet.ready.is_set() else "still looking at what runs here",
            tls=options.tls,
        )
        server.start()
        events.info("listening", "serving metrics", address=str(server.address))
        try:
            fleet.run(stop)
        finally:
            server.close()
            fleet.close()
            events.info("stopped", "taking the probes out")
