"""``make demo``: a real Go server, under load, with too little CPU, and what schedtrace says about it.

The server is nats-server as its makers built it. It gets three tenths of a CPU by a cgroup and as much work
as it can take.
"""

import argparse
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tools import kernel_access, toolchains
from tools.cgroup import CgroupError, CpuLimit
from tools.toolchains import ToolchainError

ROOT = Path(__file__).parents[1]
CORES = 0.3
START_SECONDS = 20.0


class DemoError(Exception):
    """The demo can't go on; the message says why."""


@contextlib.contextmanager
def running(command: Sequence[str | Path], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process whose output goes to a file; ended when the block is."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def nats_address(server: subprocess.Popen[bytes], folder: Path) -> tuple[str, int]:
    """Where the server listens, from the file it writes when it does."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError(f"nats-server ended: {(folder / 'server.log').read_text()}")
        for file in folder.glob("*.ports"):
            with contextlib.suppress(json.JSONDecodeError):  # not all of it is written yet
                host, port = json.loads(file.read_text())["nats"][0].removeprefix("nats://").rsplit(":", 1)
                return host, int(port)
        time.sleep(0.05)
    raise DemoError(f"nats-server does not listen after {START_SECONDS:.0f} s")


def demonstrate(command: str, folder: Path) -> int:
    """Start all, run the command with the server's process id, stop all. Returns the command's exit
    status."""
    program = toolchains.program("nats-server")
    with CpuLimit(CORES) as limit:
        serve = limit.enter([program, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", folder])
        with running(serve, folder / "server.log") as server:
            host, port = nats_address(server, folder)
            load_log = folder / "load.log"
            with running([sys.executable, "-m", "tools.nats_load", host, str(port)], load_log) as load:
                time.sleep(1)  # until the load is steady
                if load.poll() is not None:
                    raise DemoError(f"the load ended: {load_log.read_text()}")
                run = command.format(pid=server.pid)
                print(
                    f"nats-server, pid {server.pid}, limited to {CORES} CPUs, under load\n$ {run}\n",
                    flush=True,
                )
                before = limit.throttled_seconds()
                status = subprocess.call(shlex.split(run), cwd=ROOT)
                throttled = limit.throttled_seconds() - before
            report_load(load_log, throttled)
    return status


def report_load(log: Path, throttled_seconds: float) -> None:
    """Print what the load's clients saw meanwhile."""
    text = log.read_text()
    try:
        done = json.loads(text)
    except json.JSONDecodeError as error:
        raise DemoError(f"the load failed: {text}") from error
    print(
        f"\nMeanwhile its clients saw {done['messages_per_second']:,} messages and "
        f"{done['requests_per_second']:,} requests a second,\n"
        f"a request taking {done['request_p50_seconds'] * 1e3:.1f} ms (p50) to "
        f"{done['request_p99_seconds'] * 1e3:.1f} ms (p99); "
        f"the CPU limit held its threads back for {throttled_seconds:.1f} s since it began."
    )


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.split("\n")[0])
    schedtrace = shlex.quote(str(Path(sys.executable).with_name("schedtrace")))
    parser.add_argument(
        "--command",
        default=f"{schedtrace} attach {{pid}} --duration 8",
        help="what to run on the server, {pid} being its process id (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if missing := kernel_access.missing():
        print(f"demo: {missing}", file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, _interrupt)  # so that it, too, cleans up
    try:
        with tempfile.TemporaryDirectory(prefix="schedtrace-demo-") as folder:
            return demonstrate(options.command, Path(folder))
    except (DemoError, CgroupError, ToolchainError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
