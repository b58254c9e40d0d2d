"""How long it takes from the start of `schedtrace attach` to the first data, and where that time goes.

    python -m bench.attach_time           nats-server and caddy, started for it
    python -m bench.attach_time PID ...   processes that run already

Each time is taken in a fresh Python process, as a user starts it. That runs with real-time priority, so that it is the
time on a machine that has nothing else to do.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.attach_stages import COUNTING, CPU, DATA, IMPORTS, STAGES
from bench.measurement import BenchError, Spread, print_conditions, print_limit, print_table
from bench.targets import SERVERS, real_server

ROOT = Path(__file__).parents[1]
FIRST = ("chrt", "--fifo", "1")
RUNS = 5
LIMIT_SECONDS = 1.0
LINE = "first line of the command at"
ROWS = (IMPORTS, *STAGES, COUNTING, DATA, CPU, LINE)


def _first_line_seconds(pid: int) -> float:
    """Of the command itself, into a pipe, at its shortest interval: from its start to its first line."""
    start = time.monotonic()
    command = [sys.executable, "-m", "schedtrace", "attach", str(pid), "--interval", "0.1", "--duration", "0.4"]
    with subprocess.Popen([*FIRST, *command], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        seconds = time.monotonic() - start
        process.stdout.read()
    if process.returncode:
        raise BenchError(f"{' '.join(command)}: exit status {process.returncode}")
    return seconds


def _runs(pid: int) -> list[dict[str, float]]:
    """Seconds by row, of several fresh processes."""
    runs = []
    for _ in range(RUNS):
        command = [sys.executable, "-m", "bench.attach_stages", str(pid), str(time.monotonic())]
        done = subprocess.run([*FIRST, *command], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
        if done.returncode:
            raise BenchError(f"attach to {pid}: {done.stderr}")
        runs.append({**json.loads(done.stdout), LINE: _first_line_seconds(pid)})
    return runs


def _spread(runs: list[dict[str, float]], row: str) -> Spread:
    """Milliseconds."""
    return Spread.of([1000 * run[row] for run in runs if row in run])


@contextlib.contextmanager
def _targets(pids: Sequence[int]) -> Iterator[dict[str, int]]:
    with contextlib.ExitStack() as stack:
        if pids:
            yield {Path(f"/proc/{pid}/exe").resolve().name: pid for pid in pids}
        else:
            yield {name: stack.enter_context(real_server(name)) for name in SERVERS}


def main(pids: Sequence[int] = ()) -> None:
    print("Milliseconds from the start of `schedtrace attach` (fresh processes; medians, in brackets the middle half)")
    print_conditions()
    print()
    with _targets(pids) as targets:
        runs = {name: _runs(pid) for name, pid in targets.items()}
        sizes = {name: Path(f"/proc/{pid}/exe").stat().st_size for name, pid in targets.items()}
    rows = [
        [row, *(_spread(of_one, row).text(0) if row in of_one[0] else "none" for of_one in runs.values())]
        for row in ROWS
    ]
    print_table(["", *(f"{name}, {sizes[name] / 1e6:.0f} MB" for name in runs)], rows)
    for name, of_one in runs.items():
        what = DATA if DATA in of_one[0] else COUNTING
        text = f"{name} ({_spread(of_one, CPU).median / 1000:.2f} s of CPU time): {what}"
        print_limit(text, _spread(of_one, what).median / 1000, LIMIT_SECONDS, unit=" s")


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
