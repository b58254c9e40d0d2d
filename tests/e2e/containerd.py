"""A containerd of our own: Debian's program with root, state and socket in a temporary folder, and nothing left of it.

What a run that was killed left behind is removed by the next: folders bear the process id of who made them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.cri import Cri
from tests.e2e.images import write_image
from tools import toolchains

PROGRAMS = Path(__file__).parent / "programs"
PREFIX = "schedtrace-e2e-"
NAMESPACE = "k8s.io"  # containerd's, for what comes through CRI
PAUSE_IMAGE = "localhost/pause:1"
STARTS_IN_SECONDS = 60.0
CGROUP_ROOT = Path("/sys/fs/cgroup")

_CONFIG = """version = 2
root = "{root}/root"
state = "{root}/state"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{root}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


class Containerd:
    """A running containerd; see :func:`running`. ``root``: its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = root / "c.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.cri = Cri(self.socket)

    def start(self) -> None:
        """Start and wait until CRI answers."""
        config = self.root / "config.toml"
        config.write_text(_CONFIG.format(root=self.root, socket=self.socket, pause=PAUSE_IMAGE))
        with (self.root / "containerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + STARTS_IN_SECONDS
        while not self.cri.ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"containerd doesn't answer: {(self.root / 'containerd.log').read_text()[-2000:]}")
            time.sleep(0.05)
        self.make_image(PAUSE_IMAGE, {"/pause": toolchains.build("1.27", PROGRAMS / "pause")}, ["/pause"])

    def make_image(self, name: str, files: Mapping[str, Path], entrypoint: Sequence[str], *, comment: str = "") -> None:
        """Make an image of files and import it; see :func:`write_image`."""
        archive = self.root / "image.tar"
        write_image(archive, name, files, entrypoint, comment=comment)
        self.ctr("images", "import", archive)
        archive.unlink()

    def ctr(self, *arguments: object, seconds: float = 60.0) -> str:
        """The output of containerd's own command line."""
        done = subprocess.run(
            ["ctr", "--address", self.socket, "--namespace", NAMESPACE, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"ctr {' '.join(map(str, arguments))}: {done.stderr}")
        return done.stdout

    def stop(self) -> None:
        """Remove all sandboxes and containers through CRI, then end it."""
        with suppress(Exception):
            for sandbox in self.cri.sandbox_ids():
                self.cri.remove_sandbox(sandbox)
        self.cri.close()
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextmanager
def running() -> Iterator[Containerd]:
    """A containerd for as long as the block; everything that belongs to it goes with it."""
    remove_leftovers()
    root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    root.chmod(0o755)
    containerd = Containerd(root)
    try:
        containerd.start()
        yield containerd
    finally:
        containerd.stop()
        remove_all_of(root)


def remove_leftovers() -> None:
    """Remove what is left of runs whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if not Path("/proc", pid).exists():
            remove_all_of(folder)


def remove_all_of(root: Path) -> None:
    """End the processes of the containerd in that folder, undo its mounts, remove its cgroups and the folder."""
    pods = [Path(line) for line in (root / "cgroups").read_text().splitlines()] if (root / "cgroups").exists() else []
    for process in _processes_of(root):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for path in pods:
        kill_and_remove_cgroup(str(path).lstrip("/"))
    for address in root.glob("state/io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed([point for point in mounts if point.startswith(f"{root}/")]):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
    shutil.rmtree(root, ignore_errors=True)


def _processes_of(root: Path) -> list[int]:
    """containerd and its shims: their command lines name the folder."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if words[0].rpartition(b"/")[2].startswith(b"containerd") and any(
                    os.fsencode(root) in word for word in words
                ):
                    found.append(int(path.name))
    return found


def hierarchies() -> list[Path]:
    """Where cgroup hierarchies are mounted."""
    kinds = ("cgroup", "cgroup2")
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(words[1]) for words in lines if words[2] in kinds]


def kill_and_remove_cgroup(path: str) -> None:
    """Kill what runs in that cgroup and below it, in whatever hierarchy, and remove it there; then its parents that are
    empty."""
    for hierarchy in hierarchies():
        top = hierarchy / path
        for _ in range(100):
            folders = [folder for folder, _, _ in os.walk(top, topdown=False)]
            for folder in folders:
                with suppress(OSError):
                    for pid in Path(folder, "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                with suppress(OSError):
                    Path(folder).rmdir()
            if not top.exists():
                break
            time.sleep(0.05)
        for parent in top.parents:
            if parent == hierarchy:
                break
            with suppress(OSError):
                parent.rmdir()
