"""``schedtrace agent``: the fleet and the exporter as one process, from start to SIGTERM."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import FrameType

from schedtrace.binaries import Binaries
from schedtrace.bpf_text import all_programs
from schedtrace.check import require_capabilities
from schedtrace.compilation import Compilation, Sizes
from schedtrace.exporter import Exporter
from schedtrace.fleet import Fleet
from schedtrace.governor import Governor, Policy
from schedtrace.logs import EventLog
from schedtrace.malloc import bound_memory, give_back_memory
from schedtrace.node import prepare_node
from schedtrace.pods import PodIndex
from schedtrace.procfs import running_pids
from schedtrace.report_json import processes_json
from schedtrace.selection import Selection
from schedtrace.session import Session
from schedtrace.tls import TlsFiles
from schedtrace.web import Address, MetricsServer
from schedtrace.window import PASSIVE_LEVEL


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
    max_overhead: float | None
    """Share of a target's CPU time that watching it may cost; None: watch it all the time, whatever that costs."""
    level: str
    """The most that may be done: :data:`PASSIVE_LEVEL`, :data:`SAMPLED_LEVEL` or :data:`FULL_LEVEL` (window.py)."""
    tls: TlsFiles | None


def run(options: Options) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP does nothing: there is no configuration to read again.

    Raises SchedtraceError if the node or the options can't be used.
    """
    stop = threading.Event()
    fleet: Fleet | None = None

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        if fleet:
            fleet.wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    bound_memory()
    _raise_file_limit()
    selection = Selection.parse(options.select)
    events = EventLog(sys.stderr, as_json=options.log_json)
    require_capabilities()
    prepare_node()
    # One target is this process, while the cost of a hit is measured.
    sizes = Sizes(targets=options.max_targets + 1, goroutines=options.max_goroutines)
    with ExitStack() as stack:
        binaries = stack.enter_context(closing(Binaries()))  # it forks, which is cheap before the compiler is loaded
        binaries.look_ahead(running_pids())  # while the compiler works
        compilation = stack.enter_context(Compilation(sizes, all_programs(), process_events=True))
        session = stack.enter_context(Session(compilation, all_programs()))
        give_back_memory()  # the compiler in this process has left 15 MB of it
        governor = None
        if options.max_overhead is not None and options.level != PASSIVE_LEVEL:
            governor = Governor(Policy(options.max_overhead))
        fleet = Fleet(session, PodIndex(options.log_root), selection, events, binaries, governor, options.level)
        server = MetricsServer(
            options.listen,
            Exporter(fleet.view, options.max_series),
            events,
            ready=lambda: "" if fleet.ready.is_set() else "still looking at what runs here",
            processes=lambda: processes_json(fleet.processes()),
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


def _raise_file_limit() -> None:
    """A process that is watched takes three descriptors and more: use all that may be had."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
