"""A CPU-limited cgroup for as long as a ``with`` block, on cgroup v1 and v2, for demo and tests.

>>> with CpuLimit(cores=0.5) as limit:
...     server = subprocess.Popen(limit.enter(["nats-server"]))
"""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path("/sys/fs/cgroup")
PREFIX = "schedtrace-run-"  # followed by the process id of who made it
_serial = itertools.count()


class CgroupError(Exception):
    """No CPU-limited cgroup can be made here; the message says why."""


class CpuLimit:
    """A cgroup that may use ``cores`` CPUs; on leaving, what still runs in it is killed and it is removed.

    :param cores: CPU seconds per second
    :param period_seconds: the kernel hands out the quota once per this time; 0.001 to 1
    """

    def __init__(self, cores: float, *, period_seconds: float = 0.1) -> None:
        self._quota_us = int(cores * period_seconds * 1e6)
        self._period_us = int(period_seconds * 1e6)
        self.version = 1 if (ROOT / "cpu/cpu.cfs_quota_us").exists() or (ROOT / "cpu/tasks").exists() else 2
        self._parent = ROOT / "cpu" if self.version == 1 else ROOT
        self.path = self._parent / f"{PREFIX}{os.getpid()}-{next(_serial)}"

    def __enter__(self) -> Self:
        _remove_leftovers(self._parent)
        try:
            if self.version == 2 and "cpu" not in (ROOT / "cgroup.subtree_control").read_text().split():
                (ROOT / "cgroup.subtree_control").write_text("+cpu")
            self.path.mkdir()
            if self.version == 1:
                (self.path / "cpu.cfs_period_us").write_text(str(self._period_us))
                (self.path / "cpu.cfs_quota_us").write_text(str(self._quota_us))
            else:
                (self.path / "cpu.max").write_text(f"{self._quota_us} {self._period_us}")
        except OSError as error:
            _remove(self.path)
            raise CgroupError(f"no CPU limit can be set with {self.path}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove(self.path)

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        """The command, changed to start inside the cgroup."""
        return entering(self.path, command)

    def statistics(self) -> dict[str, int]:
        """cpu.stat: nr_periods, nr_throttled, and throttled_time (v1, ns) or throttled_usec (v2)."""
        lines = (self.path / "cpu.stat").read_text().splitlines()
        return {key: int(value) for key, value in (line.split() for line in lines)}

    def throttled_seconds(self) -> float:
        """Time for which the cgroup's threads were held back, summed over CPUs."""
        statistics = self.statistics()
        if self.version == 1:
            return statistics["throttled_time"] / 1e9
        return statistics["throttled_usec"] / 1e6


def entering(cgroup: Path, command: Sequence[str | Path]) -> list[str]:
    """The command, changed to start inside a cgroup; the process id is that of the process started."""
    script = f'echo $$ > "{cgroup}/cgroup.procs" && exec "$@"'
    return ["/bin/sh", "-c", script, "sh", *map(str, command)]


def _remove(path: Path) -> None:
    """Kill what runs in the cgroup and remove it; nothing happens if there is none."""
    for _ in range(200):
        with contextlib.suppress(FileNotFoundError):
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # busy until the last of its processes is reaped
            time.sleep(0.05)
        else:
            return
    raise CgroupError(f"{path} can't be removed: processes stay in it")


def _remove_leftovers(parent: Path) -> None:
    """Remove the cgroups, and what runs in them, whose maker was killed before it could."""
    for path in parent.glob(f"{PREFIX}*"):
        maker = path.name.removeprefix(PREFIX).split("-")[0]
        if not Path(f"/proc/{maker}").exists():
            _remove(path)
