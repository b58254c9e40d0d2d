"""What watching adds to a request of a saturated net/http server: schedtrace beside bpftrace with probes by name.

The server has a P for each CPU, as Go does by default. Two kinds of request: one that makes a small JSON document, as
the least of real services does, and one that does nothing, so that net/http and the scheduler are all that is measured.
"""

import re
import shutil
import subprocess
from pathlib import Path

from bench.measurement import BenchError, print_conditions, print_limit
from bench.targets import own_copy
from bench.under_load import OURS, ServerUnderLoad, added_percent, print_comparison
from tests import servers
from tools import toolchains

SERVER = Path(__file__).parent / "golang/httpserver"
VERSIONS = ("1.27", "1.24")  # the two modes: casgstatus, functions
ROUNDS = 7
SECONDS = 1
REQUESTS = {"a small JSON document": "/order?id=41", "two bytes": "/"}
CONNECTIONS = 32  # there is always a request to answer
LIMIT_PERCENT = 70.0


def load(url: str) -> int:
    """As many requests as the server can answer, for some seconds; how many it answered."""
    if shutil.which("wrk") is None:
        raise BenchError("wrk is not installed (Debian: apt-get install wrk)")
    command = ["wrk", "--threads=1", f"--connections={CONNECTIONS}", f"--duration={SECONDS}s", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    count = re.search(r"(\d+) requests in", done.stdout)
    failed = re.search(r"Non-2xx|Socket errors: (?!connect 0, read 0, write 0)", done.stdout)  # late is not failed
    if done.returncode or not count or failed:
        raise BenchError(f"wrk: {done.stderr}{done.stdout}")
    return int(count[1])


def compare_on(version: str, answer: str) -> None:
    """Measure and print the table for one Go version and one kind of request. Raises BenchError."""
    with (
        own_copy(toolchains.build(version, SERVER)) as program,
        servers.started("net/http", program.parent, program) as started,
    ):
        url = f"http://127.0.0.1:{started.port}{REQUESTS[answer]}"
        server = ServerUnderLoad(program, started.pid, lambda: load(url))
        rounds = server.measure(ROUNDS)
    print_comparison(f"Go {version}, {answer}", "request", rounds, server)
    print_limit("schedtrace adds", added_percent(rounds, OURS).median, LIMIT_PERCENT, unit=" %")


def main() -> None:
    print("CPU time of a net/http server a request, saturated (medians, in brackets the middle half of the rounds)")
    print_conditions()
    for answer in REQUESTS:
        for version in VERSIONS:
            print()
            compare_on(version, answer)


if __name__ == "__main__":
    main()
