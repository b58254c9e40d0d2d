"""The cpu controller in cgroup2 for a while, moved there from cgroup v1 if need be, and back whatever happens.

For that its v1 hierarchy is unmounted, which takes that nothing is in it: no cgroups, and no Go program since 1.25,
which keeps the files of its CPU limit open. A process of its own brings everything back as soon as its standard input
ends: when the block ends, and when the test is killed.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNMOUNT_SECONDS = 60.0
APPEAR_SECONDS = 10.0
_TRY_AGAIN_SECONDS = 0.03

# $1 the v1 mount point, or nothing if there is none; $2 the cgroup2 one; $3 the cgroups below it that have to go; $4 is
# not empty if the controller was passed down before.
_RESTORE = """
cat >/dev/null
for folder in $(find "$2/$3" -depth -type d 2>/dev/null); do
    for try in 1 2 3 4 5 6 7 8 9; do
        for pid in $(cat "$folder/cgroup.procs"); do kill -9 "$pid"; done
        rmdir "$folder" && break
        sleep 0.1
    done
done
test "$4" || echo -cpu > "$2/cgroup.subtree_control" || exit 1
test "$1" || exit 0
for try in $(seq 100); do
    grep -q "^[^ ]* $1 cgroup " /proc/mounts && exit 0
    mount -t cgroup -o rw,relatime,cpu cgroup "$1" 2>/dev/null || sleep 0.1
done
exit 1
"""


class NotMoved(Exception):
    """The controller can't be moved; the message says why."""


@contextmanager
def cpu_in_cgroup2(below: str) -> Iterator[Path]:
    """The mount point of the cgroup2 hierarchy, with the cpu controller in it and passed down from its root. The cgroup
    ``below`` it, and what is in that, is removed at the end. Raises NotMoved, with everything as it was."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    unified = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    legacy = next((Path(words[1]) for words in mounts if words[2] == "cgroup" and "cpu" in words[3].split(",")), None)
    if unified is None:
        raise NotMoved("no cgroup2 hierarchy is mounted")
    control = unified / "cgroup.subtree_control"
    was_on = "cpu" if "cpu" in control.read_text().split() else ""
    restorer = subprocess.Popen(
        ["/bin/sh", "-c", _RESTORE, "restore", legacy or "", unified, below, was_on],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if legacy:
            _unmount(legacy)
        deadline = time.monotonic() + APPEAR_SECONDS
        while "cpu" not in (unified / "cgroup.controllers").read_text().split():
            if time.monotonic() > deadline:
                raise NotMoved("cgroup2 doesn't get the cpu controller")
            time.sleep(_TRY_AGAIN_SECONDS)
        control.write_text("+cpu")
        yield unified
    finally:
        assert restorer.stdin
        restorer.stdin.close()
        if restorer.wait(60):
            raise NotMoved(f"the cpu controller is not back where it was: mount -t cgroup -o cpu cgroup {legacy or ''}")


def _unmount(point: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    deadline = time.monotonic() + UNMOUNT_SECONDS
    while libc.umount2(os.fsencode(point), 0):
        if time.monotonic() > deadline:
            reason = os.strerror(ctypes.get_errno())
            groups = [path.name for path in point.iterdir() if path.is_dir()]
            raise NotMoved(
                f"{point} stays mounted for {UNMOUNT_SECONDS:g} s ({reason}): cgroups in it: {groups}; processes that "
                f"have files of it open: {sorted(_users(point))}"
            )
        time.sleep(_TRY_AGAIN_SECONDS)


def _users(point: Path) -> set[str]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink().is_relative_to(point):
                found.add(f"{link.parts[2]} ({Path('/proc', link.parts[2], 'comm').read_text().strip()})")
        except OSError:
            continue
    return found
