"""What watching adds to a request of a saturated net/http server: schedtrace beside bpftrace with probes by name."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from bench import bpftrace
from bench.measurement import (
    BenchError,
    Rounds,
    Spread,
    alternate,
    compare,
    print_conditions,
    print_limit,
    print_table,
    process_cpu_ns,
)
from bench.targets import own_copy
from schedtrace.attach import Watch
from tools import toolchains

SERVER = Path(__file__).parent / "golang/httpserver"
VERSIONS = ("1.27", "1.24")  # the two modes: casgstatus, functions
ROUNDS = 5
SECONDS = 2
CONNECTIONS = 32  # one P has always a request to answer
LIMIT_PERCENT = 70.0

OFF, OURS, THREE = "nothing", "schedtrace", "bpftrace on gopark, ready, execute"
HITS = "hits a request"


@contextmanager
def serving(program: Path) -> Iterator[tuple[int, str]]:
    """The server as a process with one P; its process id and address."""
    process = subprocess.Popen([program, "-procs=1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def load(address: str) -> int:
    """As many requests as the server can answer, for some seconds; how many it answered."""
    if shutil.which("wrk") is None:
        raise BenchError("wrk is not installed (Debian: apt-get install wrk)")
    command = ["wrk", "--threads=1", f"--connections={CONNECTIONS}", f"--duration={SECONDS}s", f"http://{address}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    count = re.search(r"(\d+) requests in", done.stdout)
    if done.returncode or not count or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise BenchError(f"wrk: {done.stderr}{done.stdout}")
    return int(count[1])


def _request_us(pid: int, address: str) -> float:
    """CPU time of the server a request."""
    before = process_cpu_ns(pid)
    requests = load(address)
    return (process_cpu_ns(pid) - before) / 1000 / requests


class _Server:
    """Its requests, measured with this or that attached."""

    def __init__(self, program: Path, pid: int, address: str) -> None:
        self._program, self._pid, self._address = program, pid, address

    def off(self) -> float:
        return self._attached(nullcontext())

    def three(self) -> float:
        return self._attached(bpftrace.attached(self._program, bpftrace.THREE))

    def _attached(self, tracer: AbstractContextManager[None]) -> float:
        with tracer:
            return _request_us(self._pid, self._address)

    def ours(self) -> float:
        with Watch(self._pid) as watch:
            before = process_cpu_ns(self._pid)
            requests = load(self._address)
            spent_us = (process_cpu_ns(self._pid) - before) / 1000
            watch.stop()
            window = watch.window()
        self.hits = sum(probe.hits for probe in window.probes) / requests
        expected = ("interval_began_before_window", "thread_switch_unseen")
        if lost := {reason: n for reason, n in window.lost.items() if reason not in expected}:
            raise BenchError(f"schedtrace lost {lost}")
        return spent_us / requests


def _measure(version: str) -> tuple[Rounds, float]:
    with own_copy(toolchains.build(version, SERVER)) as program, serving(program) as (pid, address):
        load(address)  # until heap and threads are what they will be
        server = _Server(program, pid, address)
        ways: dict[str, Callable[[], float]] = {OFF: server.off, OURS: server.ours, THREE: server.three}
        return alternate(ways, ROUNDS), server.hits


def _total(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: one[name])


def _added_percent(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: 100 * (one[name] / one[OFF] - 1))


def compare_on(version: str) -> None:
    """Measure and print the table for one Go version. Raises BenchError."""
    rounds, hits = _measure(version)
    rows = [[name, _total(rounds, name).text(), _added_percent(rounds, name).text(0)] for name in (OFF, OURS, THREE)]
    print_table([f"Go {version}, attached:", "µs a request", "% added"], rows)
    print(f"schedtrace had {hits:.1f} hits a request")
    print_limit("schedtrace adds", _added_percent(rounds, OURS).median, LIMIT_PERCENT, unit=" %")


def main() -> None:
    print("CPU time of a net/http server a request, saturated (medians, in brackets the middle half of the rounds)")
    print_conditions()
    for version in VERSIONS:
        print()
        compare_on(version)


if __name__ == "__main__":
    main()
