"""Executables by identity: which are Go, and the plan for those. A file is looked at once.

What is not Go is remembered too, so that the thousandth shell costs a stat and a look into a dict.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

from schedtrace.discovery import has_build_information
from schedtrace.errors import NotTraceable, PermissionDenied
from schedtrace.isolated import Answer, Reader
from schedtrace.plan import ProbePlan, make_plan
from schedtrace.runtime_plan import RuntimePlan

_REMEMBERED = 4096
_READERS = 2
_LAYOUTS = 64
_IDLE_SECONDS = 10.0
"""A reader with nothing to do ends after that: it holds memory."""

FileKey = tuple[int, int, int, int]
"""Device, inode, size and time of change in ns: another file under a reused inode number is another key."""

_Finding = tuple[ProbePlan | None, str]
"""The plan of a Go binary, or why there is none; neither if it isn't Go."""


def file_key(status: os.stat_result) -> FileKey:
    """The identity of a file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


@dataclass(frozen=True)
class GoBinary:
    """An executable with a Go runtime; ``plan`` is None if it can't be watched, and ``refusal`` then says why."""

    key: FileKey
    plan: ProbePlan | None
    refusal: str

    @property
    def key_without_device(self) -> tuple[int, ...]:
        """Equal for what may be one inode to the kernel: on overlayfs each container shows a file of its image under a
        device of its own, with the inode number, size and times of the lower file."""
        return self.key[1:]


class Binaries:
    """The memory of executables, the most recent :data:`_REMEMBERED` of them. Close it."""

    def __init__(self) -> None:
        """Fork the readers: while this process is still small, that is cheap."""
        self._known: OrderedDict[FileKey, GoBinary | None] = OrderedDict()
        self._plans: deque[ProbePlan] = deque(maxlen=_LAYOUTS)  # of different layouts
        self._readers = [Reader[FileKey, _Finding](_find) for _ in range(min(_READERS, os.cpu_count() or 1))]

    def known_not_go(self, key: FileKey) -> bool:
        """Is it certain, without a look at the file, that it has no Go in it?"""
        return self._known.get(key, True) is None

    def look_ahead(self, pids: Iterable[int]) -> bool:
        """Have the executables of these processes read meanwhile, as many as the readers take: :meth:`look` will ask
        for them soon. Returns whether there are any to read."""
        reading = False
        for pid in pids:
            with suppress(OSError):  # whoever looks will say what is wrong with it
                path = f"/proc/{pid}/exe"
                key = file_key(os.stat(path))  # noqa: PTH116
                if key in self._known:
                    continue
                reading = True
                if self._asked(key):
                    continue
                executable_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not self._ask(file_key(os.fstat(executable_fd)), executable_fd):
                        return True
                finally:
                    os.close(executable_fd)
        return reading

    def look(self, executable_fd: int) -> GoBinary | None:
        """The Go binary open at ``executable_fd``; None if it isn't one. Raises PermissionDenied."""
        key = file_key(os.fstat(executable_fd))
        while key not in self._known:
            reader = self._asked(key) or self._ask(key, executable_fd) or max(self._readers, key=_pending)
            answered = reader.answer()
            if answered is None:
                continue
            if answered[0] == key and isinstance(answered[1].error, PermissionDenied):
                raise answered[1].error
            self._learn(*answered)
        self._known.move_to_end(key)
        return self._known[key]

    def _asked(self, key: FileKey) -> Reader[FileKey, _Finding] | None:
        return next((reader for reader in self._readers if key in reader.pending), None)

    def _ask(self, key: FileKey, executable_fd: int) -> Reader[FileKey, _Finding] | None:
        """Ask the reader with least to do; None if it takes no more."""
        reader = min(self._readers, key=_pending)
        return reader if reader.ask(key, executable_fd) else None

    def _learn(self, key: FileKey, answer: Answer[_Finding]) -> None:
        if isinstance(answer.error, PermissionDenied):
            return  # that may change
        plan, refusal = answer.result or (None, str(answer.error or ""))
        self._known[key] = GoBinary(key, self._slim(plan), refusal) if plan or refusal else None
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _slim(self, plan: ProbePlan | None) -> ProbePlan | None:
        """The plan without what the agent has no use for, and with a layout and offsets that equal ones share: there
        can be thousands of plans, and there are few layouts."""
        if plan is None:
            return None
        slim = replace(plan, settings={}, notes=(), unseen=())
        for known in self._plans:
            if known.layout == plan.layout:
                return replace(slim, layout=known.layout, runtime=_sharing(plan.runtime, known.runtime))
        self._plans.append(slim)
        return slim

    def tick(self) -> None:
        """End readers that have had nothing to do for a while."""
        for reader in self._readers:
            if not reader.pending and monotonic() - reader.idle_since > _IDLE_SECONDS:
                reader.close()

    def close(self) -> None:
        """End the readers."""
        for reader in self._readers:
            reader.close()


def _pending(reader: Reader[FileKey, _Finding]) -> int:
    return len(reader.pending)


def _sharing(runtime: RuntimePlan | str, known: RuntimePlan | str) -> RuntimePlan | str:
    if isinstance(runtime, str) or isinstance(known, str) or runtime.offsets != known.offsets:
        return runtime
    return replace(runtime, offsets=known.offsets)


def _find(executable_fd: int) -> _Finding:
    path = f"/proc/self/fd/{executable_fd}"
    try:
        return make_plan(path), ""
    except NotTraceable as error:
        refusal = str(error).removeprefix(f"{path}: ").replace(path, "it")
        return None, refusal if has_build_information(path) else ""
