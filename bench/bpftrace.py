"""bpftrace on a Go program, as one would use it without schedtrace: probes by function name that count in maps."""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.measurement import BenchError

THREE = ("runtime.gopark", "runtime.ready", "runtime.execute")
CASGSTATUS = ("runtime.casgstatus",)
START_SECONDS = 60.0
STOP_TRIES, STOP_SECONDS = 6, 10.0
_ATTACHED = "attached"


@contextmanager
def attached(program: Path, functions: Sequence[str]) -> Iterator[None]:
    """Count calls of those functions of ``program``, in whatever process, for as long as the block lasts.

    Raises BenchError if bpftrace is missing, or fails, or has seen no call of one of them.
    """
    if shutil.which("bpftrace") is None:
        raise BenchError("bpftrace is not installed (Debian: apt-get install bpftrace)")
    # What BEGIN prints is read when all probes are in.
    script = f'BEGIN {{ printf("{_ATTACHED}\\n"); }}\n' + "".join(
        f'uprobe:{program}:"{name}" {{ @["{name}"] = count(); }}\n' for name in functions
    )
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(["bpftrace", "-e", script], stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout
            _wait_until_attached(process.stdout.fileno())
            yield
            counts = {name: int(count) for name, count in re.findall(r"@\[(\S+)\]: (\d+)", _interrupted(process))}
            if missed := [name for name in functions if not counts.get(name)]:
                errors.seek(0)
                raise BenchError(f"bpftrace saw no {', '.join(missed)}: {errors.read().decode()}")
        finally:
            process.kill()
            process.communicate()


def _interrupted(process: subprocess.Popen[bytes]) -> str:
    """What it prints at Ctrl-C. It misses one that comes while it is busy, so it gets another after some time."""
    for _ in range(STOP_TRIES):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _errors = process.communicate(timeout=STOP_SECONDS)
            return output.decode()
    raise BenchError("bpftrace does not end")


def _wait_until_attached(descriptor: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    seen = b""
    while _ATTACHED.encode() not in seen:
        readable, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
        piece = os.read(descriptor, 4096) if readable else b""
        if not piece:
            raise BenchError(f"bpftrace did not attach: {seen.decode()!r}")
        seen += piece
