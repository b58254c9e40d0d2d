"""Compiling bpf/ with BCC. The only module that imports bcc.

A :class:`Compilation` only succeeds if the shared structs are those of :mod:`schedtrace.abi`. This module imports
little, so that the compiler can begin while the rest is imported.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from schedtrace import tracefs
from schedtrace.bpf_text import FOLDER, OPTIONAL_PROGRAMS, source_text
from schedtrace.errors import NodeUnsupported
from schedtrace.guards import explained, uninterrupted

_CLONE_FS = 0x200  # linux/sched.h
# Of no use to these programs, and a tenth of the time to compile.
_QUICK = ("-g0", "-fno-unroll-loops", "-fno-vectorize", "-fno-slp-vectorize")


@dataclass(frozen=True)
class Sizes:
    """How many entries the maps have. This process is a target, too, while the cost of a hit is measured."""

    targets: int = 2
    goroutines: int = 1 << 17
    functions: int = 1 << 14
    threads: int = 1 << 14


class Compilation:
    """BCC's work on bpf/, in a thread: nothing has to wait for it before a :class:`Session` is made of it. Close it, or
    use it in ``with``.

    Until it is closed or a session has been made, what is written to descriptor 2 may be lost: report nothing there.
    """

    def __init__(
        self,
        sizes: Sizes = Sizes(),
        programs: Collection[str] = (),
        *,
        process_events: bool = False,
        recording_pages: int = 0,
    ) -> None:
        """Begin. ``programs``: what will be needed, as far as that is known. With ``process_events`` also what
        :meth:`Session.executed` needs; with ``recording_pages`` what :meth:`Session.events` needs: the size of its
        buffer, a power of two."""
        self.sizes = sizes
        self._process_events = process_events
        self.recording_pages = recording_pages
        # BCC wants a kernel source tree; our minimal headers are all that these programs need of one.
        os.environ["BCC_KERNEL_SOURCE"] = str(FOLDER / "headers")
        self._bpf: Any = None
        self._begin(programs)

    def _begin(self, programs: Collection[str]) -> None:
        self._optional = OPTIONAL_PROGRAMS.intersection(programs)
        self._failure: Exception | None = None
        self._disturbs_nobody = threading.Event()
        self._thread = threading.Thread(target=self._compile, name="compilation")
        with uninterrupted():
            self._thread.start()
            self._disturbs_nobody.wait()

    def _compile(self) -> None:
        if _has_own_directory():
            self._disturbs_nobody.set()
        flags = [*_QUICK, *(f"-DMAX_{name.upper()}={value}" for name, value in vars(self.sizes).items())]
        flags += [f"-DWITH_{program.upper()}" for program in self._optional]
        flags += ["-DWITH_PROCESS_EVENTS"] * self._process_events
        flags += [f"-DRECORDING_PAGES={self.recording_pages}"] * bool(self.recording_pages)
        try:
            tracefs.ensure_mounted()  # BCC reads what arguments a tracepoint has
            bcc = import_bcc()
            # Not yet on tracepoints: to take programs out of them takes 0.2 s, which a refusal need not wait for.
            detached = type("Detached", (bcc.BPF,), {"_trace_autoload": lambda _self: None})
            with explained("the kernel or BCC refuses the BPF programs", NodeUnsupported):
                self._bpf = detached(text=source_text().encode(), cflags=flags)
        except Exception as error:  # noqa: BLE001 (raised again by finish)
            self._failure = error
        self._disturbs_nobody.set()

    def finish(self, programs: Collection[str]) -> Any:
        """Wait until it is done, and attach the tracepoints. Returns BCC's object, with ``programs`` in it and the maps
        made. To be called once.

        Raises NodeUnsupported if BCC is missing or the kernel refuses, also because BCC's idea of the shared structs
        differs from ours; what :func:`tracefs.ensure_mounted` raises.
        """
        if not OPTIONAL_PROGRAMS.intersection(programs) <= self._optional:
            # Only now the plan is known, and it is one of the few that need one of these.
            self.close()
            self._begin(programs)
        with uninterrupted():
            self._thread.join()
        if self._failure:
            raise self._failure
        with explained("the kernel refuses the BPF programs", NodeUnsupported), uninterrupted():
            import_bcc().BPF._trace_autoload(self._bpf)  # noqa: SLF001
        return self._bpf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until it is done, and free all. May be called twice."""
        # BCC would take up what was left half done when Python ends, and close the same descriptors again.
        with uninterrupted():
            self._thread.join()
            if self._bpf:
                self._bpf.cleanup()


def _has_own_directory() -> bool:
    """Give this thread a working directory of its own: BCC changes it, and with it what relative paths mean. False if
    that is refused, as by a container's seccomp profile."""
    refused: int = ctypes.CDLL(None).unshare(_CLONE_FS)
    return not refused


def import_bcc() -> Any:
    """BCC's Python module. Raises NodeUnsupported if it is not there."""
    try:
        import bcc
        import bcc.libbcc
    except (ImportError, OSError, AttributeError) as error:
        # OSError: its library is missing; AttributeError: the library is another one
        raise NodeUnsupported(
            f"BCC's Python module can't be used ({error}): install the distribution's package "
            "(Debian, Ubuntu: apt-get install python3-bpfcc) and run in a Python that sees it; the package bcc on "
            "PyPI is another thing"
        ) from None
    bcc.lib = bcc.libbcc.lib
    return bcc
