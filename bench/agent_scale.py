"""The agent with many processes: time to ready, CPU when idle, memory, scrapes, time to stop.

Targets are copies of one Go program, each an executable of its own (the dearest case: each is planned and probed on its
own), idle but for what the runtime itself does. The agent sees them alone: `--select` names them.
"""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.measurement import BenchError
from tests.workload import Workload, binary

PORT = 19755
SCRAPES = 15
IDLE_SECONDS = 15.0
SIZES = (10, 50, 200)
DISTINCT = 100
"""Distinct executables; with more processes than that, some run the same."""
READY_SECONDS = 120.0


def _get(path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _anonymous_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def _family(pid: int) -> list[int]:
    """The agent and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(int(child) for child in children)]


@contextmanager
def _targets(count: int) -> Iterator[str]:
    """So many idle Go processes; the glob that their names match."""
    program = binary("pingpong")
    name = f"scale{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as folder, ExitStack() as stack:
        copies = [Path(shutil.copy(program, Path(folder) / f"{name}-{i}")) for i in range(min(count, DISTINCT))]
        for i in range(count):
            stack.enter_context(Workload(copies[i % len(copies)], "-n", 1))
        yield f"{name}-*"


def _measure(count: int) -> tuple[str, ...]:
    with _targets(count) as glob:
        command = [sys.executable, "-m", "schedtrace", "agent", "--listen", f"127.0.0.1:{PORT}"]
        start = time.monotonic()
        agent = subprocess.Popen([*command, "--select", f"*/*/*/{glob}"], stderr=subprocess.DEVNULL)
        try:
            while True:
                try:
                    _get("/readyz")
                    break
                except (urllib.error.URLError, ConnectionError):
                    if agent.poll() is not None or time.monotonic() - start > READY_SECONDS:
                        raise BenchError("the agent doesn't get ready") from None
                    time.sleep(0.05)
            ready_seconds = time.monotonic() - start
            watched = _get("/metrics").count("schedtrace_target_info{")
            before, began = sum(map(_cpu_seconds, _family(agent.pid))), time.monotonic()
            time.sleep(IDLE_SECONDS)
            idle = (sum(map(_cpu_seconds, _family(agent.pid))) - before) / (time.monotonic() - began)
            scrapes = []
            for _ in range(SCRAPES):
                began = time.monotonic()
                _get("/metrics")
                scrapes.append(time.monotonic() - began)
            memory = sum(map(_anonymous_mb, _family(agent.pid)))
            began = time.monotonic()
            agent.send_signal(signal.SIGTERM)
            agent.wait(60)
            stop_seconds = time.monotonic() - began
        finally:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
    return (
        str(count),
        str(watched),
        f"{ready_seconds:.1f} s",
        f"{idle * 100:.2f} %",
        f"{memory:.0f} MB",
        f"{statistics.median(scrapes) * 1e3:.0f} ms",
        f"{stop_seconds:.1f} s",
    )


def main() -> None:
    titles = ("processes", "series sets", "ready", "idle CPU", "memory", "scrape p50", "stop")
    print("The agent with many idle processes (idle CPU of one core; anonymous memory)\n")
    print("".join(f"{title:>12}" for title in titles))
    for count in SIZES:
        print("".join(f"{value:>12}" for value in _measure(count)), flush=True)


if __name__ == "__main__":
    main()
