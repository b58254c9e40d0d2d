"""Runs a command under another Linux kernel, in a guest whose root is this machine's, read-only.

    python -m tools.guest bookworm -- .venv/bin/python -m schedtrace check
    python -m tools.guest /path/with/vmlinuz/and/modules -- uname -r

The kernel is a Debian suite's (fetched once, kept in ``kernels/`` of tools.toolchains' cache) or what a folder holds.
qemu emulates the processor, since not every machine can lend its own: a command takes about ten times as long as here,
and its times say nothing. The guest sees this machine's files, all of them; what it writes is gone afterwards. The
command runs as root in the folder that this is started in; what it prints is printed here, and its exit status is ours.

It takes root (to read all files) and Debian's packages qemu-system-x86 and busybox-static.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import toolchains
from tools.toolchains import ToolchainError, cache_dir, made_once

SUITES = ("bullseye", "bookworm", "trixie")
QEMU = "qemu-system-x86_64"
BUSYBOX = "/bin/busybox"
PACKAGES = ("qemu-system-x86", "busybox-static")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# What a root over 9p takes; what they depend on, they say themselves.
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
MEMORY_MIB = 3072
CPUS = 2
LOOK_SECONDS = 0.2
NOT_RUN = 125  # as env and docker have it: the command did not get to run, or did not end
PASSED_ON = ("HOME", "LANG", "PATH", "XDG_CACHE_HOME")

_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
for module in /modules/*; do insmod "$module"; done
mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose host /host
mount -t 9p -o trans=virtio,version=9p2000.L,msize=65536 exchange /exchange
mount -t tmpfs tmpfs /written
mkdir /written/upper /written/work
mount -t overlay -o lowerdir=/host,upperdir=/written/upper,workdir=/written/work overlay /root
mount -t proc proc /root/proc
mount -t sysfs sysfs /root/sys
mount -t devtmpfs devtmpfs /root/dev
mkdir -p /root/dev/shm /root/dev/pts
mount -t devpts devpts /root/dev/pts
mount -t tmpfs -o mode=1777 tmpfs /root/dev/shm
mount -t tmpfs tmpfs /root/run
mount -t cgroup2 cgroup2 /root/sys/fs/cgroup
mount -t tracefs tracefs /root/sys/kernel/tracing
mount -t securityfs securityfs /root/sys/kernel/security
mkdir -p /root/exchange
ifconfig lo up
chroot /root /bin/sh < /exchange/command > /exchange/output 2>&1
echo $? > /exchange/status
sync
poweroff -f
"""
_FOLDERS = ("bin", "proc", "modules", "host", "exchange", "written", "root")


@dataclass(frozen=True)
class Kernel:
    """``image``: what qemu boots. ``modules``: the folder of its modules, searched for :data:`MODULES`."""

    image: Path
    modules: Path


def kernel_in(folder: Path) -> Kernel:
    """The kernel in a folder as Debian's packages unpack it, or with vmlinuz* and the modules anywhere in it."""
    images = sorted(folder.rglob("vmlinuz*"))
    if len(images) != 1:
        raise ToolchainError(f"{folder}: {len(images)} files vmlinuz*, expected one")
    return Kernel(images[0], folder)


def fetch(suite: str) -> Path:
    """The kernel packages of a Debian suite for amd64, unpacked into the cache.

    apt works in a folder of its own there and asks the mirror that this machine's apt asks. Raises ToolchainError.
    """

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as state:
            apt = _private_apt(suite, Path(state))
            toolchains.run([*apt, "update", "-qq"], what=f"fetch the list of {suite}'s packages")
            # Without a status file nothing counts as installed, so that all that a kernel needs is named.
            planned = toolchains.run(
                [*apt, "install", "--simulate", "--no-install-recommends", "linux-image-amd64"],
                what=f"ask for {suite}'s kernel",
            )
            packages = re.findall(r"(?m)^Inst (linux-(?:image|modules|binary)-\S+)", planned)
            toolchains.run([*apt, "download", "-qq", *packages], cwd=Path(state), what=f"fetch {suite}'s kernel")
            for archive in Path(state).glob("*.deb"):
                toolchains.run(["dpkg-deb", "-x", archive, folder], what=f"unpack {archive.name}")

    return made_once(cache_dir() / "kernels" / suite, make)


def _private_apt(suite: str, state: Path) -> list[str | Path]:
    """apt-get that neither reads nor changes what this machine's apt knows, but for its mirror."""
    mirrors = toolchains.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"],
        what="ask apt for its mirror",
    )
    mirror = re.search(r"(?m)^Debian Debian main (\S+)$", mirrors)
    if not mirror:
        raise ToolchainError("apt knows no mirror of Debian (`apt-get update` as root may help)")
    (state / "lists/partial").mkdir(parents=True)
    (state / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror[1]} {suite} main\n")
    options = {
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state,
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        "APT::Sandbox::User": "root",
        "Acquire::Check-Valid-Until": "false",  # an old suite's signature expires, and nobody renews it
    }
    return ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]


def _module_file(kernel: Kernel, name: str) -> Path | None:
    """None if it is built in."""
    pattern = re.compile(re.escape(name).replace("_", "[-_]") + r"\.ko(\.xz)?")
    return next((path for path in kernel.modules.rglob("*.ko*") if pattern.fullmatch(path.name)), None)


def modules_in_order(kernel: Kernel, names: Sequence[str] = MODULES) -> dict[str, bytes]:
    """Name -> module, those first that others depend on. A module says in its section .modinfo what it depends on."""
    modules: dict[str, bytes] = {}

    def add(name: str) -> None:
        file = _module_file(kernel, name)
        if file is None or name in modules:
            return
        module = file.read_bytes()
        if file.suffix == ".xz":
            module = lzma.decompress(module)
        depends = re.search(rb"\0depends=([^\0]*)\0", module)
        for needed in depends[1].decode().split(",") if depends else []:
            if needed:
                add(needed)
        modules[name] = module

    for name in names:
        add(name)
    if "9p" not in modules:
        raise ToolchainError(f"{kernel.modules}: no module 9p (cloud kernels have none)")
    return modules


def _write_initramfs(kernel: Kernel, path: Path, scratch: Path) -> None:
    for folder in _FOLDERS:
        (scratch / folder).mkdir(parents=True)
    (scratch / "bin/busybox").write_bytes(Path(BUSYBOX).read_bytes())
    (scratch / "bin/busybox").chmod(0o755)
    (scratch / "init").write_text(_INIT)
    (scratch / "init").chmod(0o755)
    for number, (name, module) in enumerate(modules_in_order(kernel).items()):
        (scratch / f"modules/{number:02}-{name}.ko").write_bytes(module)
    names = "\n".join(str(file.relative_to(scratch)) for file in sorted(scratch.rglob("*")))
    with path.open("wb") as archive:
        subprocess.run(
            [BUSYBOX, "cpio", "-o", "-H", "newc"],
            input=names.encode(),
            stdout=archive,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            check=True,
        )


def shell_script(command: Sequence[str]) -> str:
    """The command for sh in the guest, with the folder and the variables (:data:`PASSED_ON`) of here."""
    exports = [f"export {name}={shlex.quote(os.environ[name])}" for name in PASSED_ON if name in os.environ]
    return "\n".join([*exports, f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)} </dev/null", ""])


def _qemu(kernel: Kernel, initramfs: Path, exchange: Path) -> list[str]:
    return [
        *(QEMU, "-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-m", str(MEMORY_MIB), "-smp", str(CPUS), "-no-reboot", "-nodefaults", "-display", "none"),
        *("-serial", f"file:{exchange / 'console'}"),
        *("-kernel", str(kernel.image), "-initrd", str(initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,multidevs=remap,readonly=on"),
        *("-virtfs", f"local,path={exchange},mount_tag=exchange,security_model=none,multidevs=remap"),
    ]


def run(kernel: Kernel, command: Sequence[str], timeout_seconds: float) -> int:
    """Boot, run, print what the command prints as it does, power off. Returns its exit status, :data:`NOT_RUN` if it
    has none (the console's last lines then say why)."""
    with tempfile.TemporaryDirectory(prefix="schedtrace-guest-") as folder:
        exchange = Path(folder, "exchange")
        exchange.mkdir()
        (exchange / "command").write_text(shell_script(command))
        (exchange / "output").touch()
        initramfs = Path(folder, "initramfs")
        _write_initramfs(kernel, initramfs, Path(folder, "content"))
        qemu = subprocess.Popen(_qemu(kernel, initramfs, exchange), stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + timeout_seconds
            with (exchange / "output").open("rb") as output:
                while qemu.poll() is None and time.monotonic() < deadline:
                    _print_new(output.read())
                    time.sleep(LOOK_SECONDS)
                _print_new(output.read())
            if qemu.poll() is None:
                print(f"guest: not done after {timeout_seconds:g} s", file=sys.stderr)
        finally:
            qemu.kill()
            qemu.wait()
        status = exchange / "status"
        if status.exists() and status.read_text().strip():
            return int(status.read_text())
        console = (exchange / "console").read_text(errors="replace") if (exchange / "console").exists() else ""
        print("guest: the command has no exit status; the console says:", file=sys.stderr)
        print(*console.splitlines()[-30:], sep="\n", file=sys.stderr)
        return NOT_RUN


def _print_new(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.guest", description=__doc__.split("\n")[0])
    parser.add_argument("kernel", help=f"{', '.join(SUITES)}, or a folder with vmlinuz and modules")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS")
    parser.add_argument("command", nargs="+", help="behind --")
    options = parser.parse_args(argv)
    missing = [path for path in (QEMU, BUSYBOX) if not shutil.which(path)]
    if missing or os.geteuid() != 0:
        print(f"guest: it takes root, {' and '.join(PACKAGES)}", file=sys.stderr)
        return NOT_RUN
    try:
        folder = fetch(options.kernel) if options.kernel in SUITES else Path(options.kernel)
        return run(kernel_in(folder), options.command, options.timeout)
    except ToolchainError as error:
        print(f"guest: {error}", file=sys.stderr)
        return NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
