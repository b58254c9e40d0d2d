"""What watching adds to a message through nats-server: schedtrace beside bpftrace with probes by name.

The load is that of the demo, by clients written in Python: the server is busy and not saturated.
"""

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from bench.measurement import BenchError, print_conditions
from bench.targets import free_port, own_copy, running_server
from bench.under_load import ServerUnderLoad, print_comparison
from tools import toolchains

ROOT = Path(__file__).parents[1]
ROUNDS = 4
SECONDS = 2.0
START_SECONDS = 20.0


def _messages(monitor: int) -> int:
    """In and out since the server's start, by its own count."""
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/varz", timeout=10) as answer:
        counts = json.load(answer)
    return int(counts["in_msgs"]) + int(counts["out_msgs"])


def load(port: int, monitor: int) -> int:
    """The demo's load for some seconds; messages that went in and out."""
    before = _messages(monitor)
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.nats_load", "127.0.0.1", str(port)], stdout=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while _messages(monitor) == before:
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchError("the load on nats-server does not start")
            time.sleep(0.05)
        time.sleep(SECONDS)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
    return _messages(monitor) - before


def main() -> None:
    print("CPU time of nats-server a message, under load (medians, in brackets the middle half of the rounds)")
    print_conditions()
    print()
    port, monitor = free_port(), free_port()
    arguments = ("-a", "127.0.0.1", "-p", str(port), "-m", str(monitor))
    with (
        own_copy(toolchains.program("nats-server")) as program,
        running_server([program, *arguments], monitor) as pid,
    ):
        server = ServerUnderLoad(program, pid, lambda: load(port, monitor))
        rounds = server.measure(ROUNDS)
    print_comparison("nats-server", "message", rounds, server)


if __name__ == "__main__":
    main()
