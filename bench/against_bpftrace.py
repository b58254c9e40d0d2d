"""What watching adds to a round trip over two channels: schedtrace beside bpftrace with probes by name."""

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
from tests.workload import Workload, binary

VERSIONS = ("1.27", "1.22")  # the two modes: casgstatus, functions
ROUNDS = 4
ROUND_TRIPS = 30_000
LIMIT = 5.0

OFF, OURS = "nothing", "schedtrace"
THREE = "bpftrace on gopark, ready, execute"
ONE = "bpftrace on casgstatus"

Attach = Callable[[int], AbstractContextManager[None]]


@contextmanager
def _watched(pid: int) -> Iterator[None]:
    """With schedtrace at the full level, which must see every park."""
    with Watch(pid) as watch:
        yield
        watch.stop()
        seen = sum(f.parks for f in watch.window().functions if f.function in ("main.ping", "main.pong"))
    if seen != 2 * ROUND_TRIPS:
        raise BenchError(f"schedtrace saw {seen} parks of {2 * ROUND_TRIPS}")


def _round_trip_us(program: Path, attach: Attach) -> float:
    """CPU time of the workload's process a round trip, on one P so that there is one way to make it."""
    with Workload(program, "-n", ROUND_TRIPS, "-procs", 1) as target, attach(target.pid):
        before = process_cpu_ns(target.pid)
        target.run()
        return (process_cpu_ns(target.pid) - before) / 1000 / ROUND_TRIPS


def _measure(version: str) -> Rounds:
    with own_copy(binary("pingpong", version)) as program:
        ways: dict[str, Attach] = {
            OFF: lambda _: nullcontext(),
            OURS: _watched,
            THREE: lambda _: bpftrace.attached(program, bpftrace.THREE),
            ONE: lambda _: bpftrace.attached(program, bpftrace.CASGSTATUS),
        }

        def measured(way: Attach) -> Callable[[], float]:
            return lambda: _round_trip_us(program, way)

        return alternate({name: measured(way) for name, way in ways.items()}, ROUNDS)


def _added(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: one[name] - one[OFF])


def _times_ours(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: (one[name] - one[OFF]) / (one[OURS] - one[OFF]))


def _total(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: one[name])


def compare_on(version: str) -> None:
    """Measure and print the table for one Go version. Raises BenchError."""
    rounds = _measure(version)
    rows = [
        [name, _total(rounds, name).text(), _added(rounds, name).text(), _times_ours(rounds, name).text()]
        for name in (OFF, OURS, THREE, ONE)
    ]
    print_table([f"Go {version}, attached:", "µs a round trip", "µs added", "times schedtrace's"], rows)
    print_limit(f"{THREE}, times schedtrace's", _times_ours(rounds, THREE).median, LIMIT, at_least=True)


def main() -> None:
    print("CPU time of a round trip over two channels (medians, in brackets the middle half of the rounds)")
    print_conditions()
    for version in VERSIONS:
        print()
        compare_on(version)


if __name__ == "__main__":
    main()
