"""The programs of hit_parts.c, loaded and attached the way a session does it."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from schedtrace import uprobe_multi, uprobe_pmu
from schedtrace.bpf_text import FOLDER

G_BYTES = 448  # what the allocator rounds a runtime.g of Go 1.27 up to


class Parts:
    """The programs of hit_parts.c, loaded. Close it, or use it in ``with``."""

    def __init__(self) -> None:
        import bcc  # noqa: TID251 (these are no session's programs)

        self._bcc = bcc
        os.environ["BCC_KERNEL_SOURCE"] = str(FOLDER / "headers")
        self._bpf = bcc.BPF(
            text=(Path(__file__).parent / "hit_parts.c").read_bytes(), cflags=[f"-I{FOLDER}", f"-DTGID={os.getpid()}"]
        )
        targets = self._bpf[b"targets"]
        targets[targets.Key(os.getpid())] = targets.Leaf()
        self._links_work = uprobe_multi.refusal() == 0
        self._links: list[int] = []

    def attach(self, name: str, fd: int, file_offsets: Sequence[int], *, perf: bool = False) -> None:
        """Put a program on instructions of a file: by one link for all, or by a perf event each where there are no
        links or it is asked for. Raises OSError."""
        multi = self._links_work and not perf
        attach_type = uprobe_multi.ATTACH_TYPE if multi else -1
        program = self._bpf.load_func(name.encode(), self._bcc.BPF.KPROBE, attach_type=attach_type).fd
        self._bpf.funcs.pop(name.encode())  # the next one may be attached to something else
        path = f"/proc/self/fd/{fd}"
        if multi:
            self._links.append(uprobe_multi.attach(program, path, file_offsets))
        else:
            self._links += [uprobe_pmu.attach(program, path, offset) for offset in file_offsets]

    def follow(self, address: int, count: int) -> None:
        """Enter goroutines into the map that goroutine_lookup looks them up in."""
        goroutines = self._bpf[b"goroutines"]
        for i in range(count):
            key = goroutines.Key(address + i * G_BYTES, os.getpid(), 0)
            goroutines[key] = goroutines.Leaf()

    def detach(self) -> None:
        """Take all probes out."""
        links, self._links = self._links, []
        with ThreadPoolExecutor() as pool:  # each waits for the kernel's grace periods
            list(pool.map(os.close, links))

    def close(self) -> None:
        """Take all probes out and free the maps."""
        self.detach()
        self._bpf.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
