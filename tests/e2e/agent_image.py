"""The image of deploy/Dockerfile, built here: on a base that debootstrap makes, since there may be no registry to ask.

Base and layers stay in the cache of ``tools.toolchains``, so that only what has changed is built again.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import toolchains

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
BASE = "localhost/debian:bookworm-slim"
BUILD_SECONDS = 540
_PIP_FILES = "/run/pip"
_PIP_OPTIONS = ("index-url", "find-links", "cert", "constraint")


def build(name: str, archive: Path) -> None:
    """Build the image and write it as a docker-archive."""
    state = toolchains.cache_dir() / "buildah"
    state.mkdir(exist_ok=True)
    base = toolchains.made_once(toolchains.cache_dir() / "debootstrap" / SUITE, _bootstrap) / "base.tar"
    if not _buildah(state, "images", "--quiet", "--filter", f"reference={BASE}"):
        container = _buildah(state, "from", "scratch")
        _buildah(state, "add", container, str(base), "/")
        _buildah(state, "commit", "--rm", container, BASE)
    with _pip_settings() as volumes:
        _buildah(
            state,
            "build",
            "--layers",
            "--pull-never",
            f"--build-arg=BASE={BASE}",
            *(f"--volume={volume}:ro" for volume in volumes),
            f"--file={ROOT / 'deploy/Dockerfile'}",
            f"--tag={name}",
            str(ROOT),
        )
    _buildah(state, "push", name, f"docker-archive:{archive}:{name}")


def _buildah(state: Path, *arguments: str) -> str:
    where = ["--root", str(state / "root"), "--runroot", str(state / "run"), "--storage-driver", "overlay"]
    done = subprocess.run(
        ["buildah", *where, *arguments],
        env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"buildah {' '.join(arguments)}: {(done.stdout + done.stderr)[-4000:]}")
    return done.stdout.strip()


def _bootstrap(folder: Path) -> None:
    """A minimal Debian from the mirror that this machine uses, as one archive."""
    uris = toolchains.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {SUITE}"],
        what="ask apt for its mirror",
    )
    mirror = uris.split()[0]
    with tempfile.TemporaryDirectory(dir=folder) as root:
        toolchains.run(["debootstrap", "--variant=minbase", SUITE, root, mirror], what="debootstrap")
        shutil.rmtree(Path(root, "var/cache/apt/archives"), ignore_errors=True)
        with tarfile.open(folder / "base.tar", "w") as tar:
            tar.add(root, arcname=".", filter=_no_devices)


def _no_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.isdev() else member


@contextmanager
def _pip_settings() -> Iterator[list[str]]:
    """Volumes ("HOST:CONTAINER") that let pip in the build reach the packages that it reaches here."""
    text = toolchains.run([sys.executable, "-m", "pip", "config", "list"], what="ask pip for its settings")
    settings: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        option = key.replace(":env:.", "").partition(".")[2] or key.rpartition(".")[2]
        if option in _PIP_OPTIONS:
            settings[option] = value.strip("'\"")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        volumes = [f"{folder / 'pip.conf'}:/etc/pip.conf", f"{folder}:{_PIP_FILES}"]
        lines = ["[global]"]
        for option, value in settings.items():
            words = []
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                if path.is_file():
                    # Not under its own name: the build has, or installs, files of its own there.
                    shutil.copy(path, folder / path.name)
                    word = f"{_PIP_FILES}/{path.name}"
                elif path.is_absolute() and path.is_dir():
                    volumes.append(f"{path}:{path}")
                words.append(word)
            lines.append(f"{option} = {' '.join(words)}")
        (folder / "pip.conf").write_text("\n".join(lines) + "\n")
        yield volumes
