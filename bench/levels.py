"""What each level of seeing costs real servers under a fixed load, and what other ways to see a scheduler cost.

The load is so many requests a second, well below what the server can do, so that the same work is done whatever is
attached: the server's CPU time a request is compared. After that there is as much load as is answered, for the most
requests a second. Clients and server share the machine's CPUs.
"""

import http.client
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import bpftrace, event_script
from bench.agents import agent
from bench.measurement import BenchError, Spread, alternate, print_conditions, print_table, process_cpu_ns
from bench.working import Served, serving
from schedtrace.attach import Watch
from schedtrace.plan import make_plan
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL

ROUNDS = 5
RATES = {"net/http": 4000, "nats-server": 4000, "caddy": 1500, "etcd": 400}
"""Servers -> requests (nats-server: messages) a second: a tenth to a quarter of a CPU."""
SECONDS, MOST_SECONDS = 2.0, 1.0
AGENT_SECONDS = 20.0
"""The agent's windows are seldom: a time in which there are some."""
TRACE_SECONDS = 3600
WARM_SECONDS = 1.0

OFF, AGENT = "nothing", "schedtrace agent, as it is by default"
PASSIVE, SAMPLED, FULL = "schedtrace: passive", "schedtrace: sampled", "schedtrace: full"
THREE = "bpftrace on gopark, ready, execute"
ONE = "bpftrace on casgstatus"
SCRIPT = "BCC script, an event for each of the three"
TRACE = "Go's execution trace"
_EVENTS, _LOST = "events", "lost"

Way = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Measured:
    """Of one variant in one round."""

    request_us: float
    rate: float
    most: float
    p99_ms: float


class _Ways:
    """What can be attached to a server."""

    def __init__(self, server: Served, folder: Path, *, compared: bool) -> None:
        self._server, self._folder = server, folder
        self.seen: Counter[str] = Counter()
        """What the script got, and what was lost."""
        self.all: dict[str, Way] = {
            OFF: nullcontext,
            PASSIVE: partial(self._agent, "none", "--level", "passive"),
            FULL: partial(self._watched, FULL_LEVEL),
            AGENT: partial(self._agent, "1"),
        }
        if make_plan(str(server.program)).sampled:
            self.all[SAMPLED] = partial(self._watched, SAMPLED_LEVEL)
        if compared:
            self.all |= {
                THREE: partial(bpftrace.attached, server.program, bpftrace.THREE),
                ONE: partial(bpftrace.attached, server.program, bpftrace.CASGSTATUS),
                SCRIPT: partial(event_script.attached, server.program, self.seen),
                TRACE: partial(_execution_trace, server.load.address),
            }

    @contextmanager
    def _watched(self, level: str) -> Iterator[None]:
        with Watch(self._server.pid, level=level) as watch:
            yield
            watch.stop()
            if not sum(probe.hits for probe in watch.window().probes):
                raise BenchError(f"no probe of level {level} was hit")

    @contextmanager
    def _agent(self, max_overhead: str, *arguments: str) -> Iterator[None]:
        (self._folder / "containers").mkdir(exist_ok=True)
        selected: list[str | Path] = ["--log-root", self._folder, "--select", f"*/*/*/{self._folder.name}", *arguments]
        with agent(self._folder, selected, max_overhead=max_overhead) as one:
            if "schedtrace_target_info{" not in one.get("/metrics"):
                raise BenchError(f"the agent doesn't watch the server: {one.log.read_text()[-500:]}")
            yield
            one.stop()


@contextmanager
def _execution_trace(address: str) -> Iterator[None]:
    """Go's own, switched on in the server and sent to whoever asked for it, who throws it away."""
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", f"/debug/pprof/trace?seconds={TRACE_SECONDS}")
    got = 0

    def read() -> None:
        nonlocal got
        answer = connection.getresponse()
        while piece := answer.read1(1 << 16):
            got += len(piece)

    reader = threading.Thread(target=_until_closed, args=(read,))
    reader.start()
    try:
        time.sleep(0.5)  # until it has begun
        yield
    finally:
        connection.sock.shutdown(2)  # the server stops tracing when nobody reads
        reader.join()
        connection.close()
    if not got:
        raise BenchError("no execution trace came")


def _until_closed(read: Callable[[], None]) -> None:
    try:
        read()
    except (OSError, http.client.HTTPException):
        return


def _measured(server: Served, rate: float, seconds: float, way: Way) -> Measured:
    with way():
        before = process_cpu_ns(server.pid)
        done = server.load.run(seconds, rate)
        cpu_ns = process_cpu_ns(server.pid) - before
        most = server.load.run(MOST_SECONDS)
    return Measured(
        cpu_ns / 1000 / done.answers, done.answers / done.seconds, most.answers / most.seconds, done.p99_seconds * 1000
    )


def measure(name: str, rounds: int) -> None:
    """Measure and print the table of one server. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as temporary:
        folder = Path(temporary)
        with serving(name, folder) as server:
            server.load.run(WARM_SECONDS)
            ways = _Ways(server, folder, compared=name == "net/http")
            seconds = {AGENT: AGENT_SECONDS}
            variants = {
                variant: partial(_measured, server, RATES[name], seconds.get(variant, SECONDS), way)
                for variant, way in ways.all.items()
            }
            _print(name, alternate(variants, rounds))
    if ways.seen[_LOST]:
        lost = 100 * ways.seen[_LOST] / (ways.seen[_LOST] + ways.seen[_EVENTS])
        print(f"the BCC script lost {lost:.0f} % of its events")


def _print(name: str, rounds: list[dict[str, Measured]]) -> None:
    rows = []
    for variant in (OFF, PASSIVE, SAMPLED, FULL, AGENT, THREE, ONE, SCRIPT, TRACE):
        if variant in rounds[0]:
            # Of each round, what was measured with it and with nothing.
            pairs = [(one[variant], one[OFF]) for one in rounds]
            added = Spread.of([100 * (one.request_us / off.request_us - 1) for one, off in pairs])
            more = Spread.of([100 * (one.most / off.most - 1) for one, off in pairs])
            p99_ms, rate, most = (
                Spread.of([getattr(one, value) for one, _ in pairs]).median for value in ("p99_ms", "rate", "most")
            )
            request_us = Spread.of([one.request_us for one, _ in pairs]).text(1)
            cells = [f"{p99_ms:.1f}", f"{rate:.0f}", f"{most:.0f}", more.text(0)]
            rows.append([variant, request_us, added.text(0), *cells])
        elif variant == SAMPLED:
            rows.append([variant, "not possible", *["-"] * 5])
    header = [
        f"{name}, {RATES[name]} requests/s",
        "µs a request",
        "% added",
        "p99, ms",
        "answered/s",
        "at most/s",
        "% more",
    ]
    print_table(header, rows)


def main() -> None:
    print("Servers under a fixed load: CPU time of the server a request, and what it can answer at most")
    print("(medians, in brackets the middle half of the rounds)")
    print_conditions()
    names = [name for name in sys.argv[1:] if not name.isdigit()]
    rounds = next((int(number) for number in sys.argv[1:] if number.isdigit()), ROUNDS)
    for name in names or RATES:
        print()
        measure(name, rounds)


if __name__ == "__main__":
    main()
