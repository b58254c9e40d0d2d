"""The guest's kernel: which modules it takes, in which order, and that a command's words arrive as they are."""

import lzma
import subprocess
from pathlib import Path

import pytest

from tools import guest
from tools.toolchains import ToolchainError


def _module(depends: str) -> bytes:
    return b"\x7fELF...license=GPL\0depends=" + depends.encode() + b"\0retpoline=Y\0intree=Y\0"


def _kernel(folder: Path, modules: dict[str, bytes]) -> guest.Kernel:
    (folder / "boot").mkdir()
    (folder / "boot/vmlinuz-6.1.0").write_bytes(b"MZ")
    for path, content in modules.items():
        file = folder / "lib/modules/6.1.0" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return guest.kernel_in(folder)


def test_modules_come_after_those_they_depend_on(tmp_path: Path) -> None:
    kernel = _kernel(
        tmp_path,
        {
            "fs/9p/9p.ko.xz": lzma.compress(_module("9pnet,netfs")),
            "net/9p/9pnet.ko": _module(""),
            "net/9p/9pnet_virtio.ko": _module("9pnet,virtio,virtio_ring"),
            "fs/netfs/netfs.ko": _module(""),
            "fs/overlayfs/overlay.ko": _module(""),
            # as dashes in the file's name and underscores in the module's
            "drivers/virtio/virtio-ring.ko": _module("virtio"),
            "drivers/virtio/virtio.ko": _module(""),
            "drivers/net/dummy.ko": _module(""),
        },
    )
    modules = guest.modules_in_order(kernel)  # virtio_pci is built in here
    assert list(modules) == ["9pnet", "virtio", "virtio_ring", "9pnet_virtio", "netfs", "9p", "overlay"]
    assert modules["9p"] == _module("9pnet,netfs")


def test_a_kernel_that_cannot_mount_the_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="no module 9p"):
        guest.modules_in_order(_kernel(tmp_path, {"fs/overlayfs/overlay.ko": _module("")}))


def test_a_folder_without_a_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"0 files vmlinuz\*, expected one"):
        guest.kernel_in(tmp_path)


def test_the_words_of_the_command_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANG", "a 'b'")
    script = guest.shell_script(["sh", "-c", 'pwd; echo "$LANG|$1"; exit 7', "sh", "it's $HOME;"])
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, check=False, timeout=10)
    assert (done.returncode, done.stdout) == (7, f"{tmp_path}\na 'b'|it's $HOME;\n")
