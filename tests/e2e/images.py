"""Container images without a registry: a docker-archive with one layer, which ``ctr images import`` takes."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_image(
    archive: Path, name: str, files: Mapping[str, Path], entrypoint: Sequence[str], *, comment: str = ""
) -> None:
    """An image of executables: path in the image ("/app") -> file. Different comments make different layers, and so
    different inodes on the node, of the same files."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path, file in files.items():
            _add(tar, path.lstrip("/"), file.read_bytes(), 0o755)
        if comment:
            _add(tar, "comment", comment.encode(), 0o644)
        for folder in ("tmp", "control"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(info)
    content = layer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(archive, mode="w") as tar:
        _add(tar, config_name, config, 0o644)
        _add(tar, f"{digest}/layer.tar", content, 0o644)
        _add(tar, "manifest.json", json.dumps(manifest).encode(), 0o644)


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))
