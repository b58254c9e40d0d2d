"""Cgroups and log links as a kubelet makes them, so that processes started there are pods' to an agent."""

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.cgroup import ROOT

PERIOD_US = 100_000
REMOVE_SECONDS = 10.0


@dataclass(frozen=True)
class Pods:
    """Pods of one container each, with a limit of one CPU. ``log_root`` holds the links."""

    log_root: Path
    cgroups: tuple[Path, ...]
    names: tuple[str, ...]


def enter(cgroup: Path, command: Sequence[str | Path]) -> list[str]:
    """The command, changed to start inside the cgroup; the process id is that of the process started."""
    return ["/bin/sh", "-c", f'echo $$ > "{cgroup}/cgroup.procs" && exec "$@"', "sh", *map(str, command)]


@contextmanager
def pods(count: int) -> Iterator[Pods]:
    """So many, for as long as the block; what was started in them must have ended by then."""
    version_1 = (ROOT / "cpu/tasks").exists()
    parent = (ROOT / "cpu" if version_1 else ROOT) / f"schedtrace-bench-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-logs-") as folder:
        links = Path(folder, "containers")
        links.mkdir()
        made: list[Path] = []
        cgroups, names = [], []
        try:
            for i in range(count):
                uid, container_id, name = str(uuid.uuid4()), os.urandom(32).hex(), f"bench-{i}"
                cgroup = parent / "kubepods" / f"pod{uid}" / container_id
                for directory in (*reversed(cgroup.parents), cgroup):
                    if directory.is_relative_to(parent) and directory not in made:
                        directory.mkdir()
                        made.append(directory)
                        if not version_1:
                            (directory.parent / "cgroup.subtree_control").write_text("+cpu")
                if version_1:
                    (cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (cgroup / "cpu.cfs_quota_us").write_text(str(PERIOD_US))
                else:
                    (cgroup / "cpu.max").write_text(f"{PERIOD_US} {PERIOD_US}")
                link = links / f"{name}_bench_main-{container_id}.log"
                link.symlink_to(f"/var/log/pods/bench_{name}_{uid}/main/0.log")
                cgroups.append(cgroup)
                names.append(name)
            yield Pods(Path(folder), tuple(cgroups), tuple(names))
        finally:
            for directory in reversed(made):
                _remove(directory)


def _remove(cgroup: Path) -> None:
    deadline = time.monotonic() + REMOVE_SECONDS
    while time.monotonic() < deadline:  # busy until the last of its processes is reaped
        with contextlib.suppress(OSError):
            cgroup.rmdir()
            return
        time.sleep(0.05)
