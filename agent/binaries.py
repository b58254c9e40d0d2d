"""Executables by identity: which are Go, and the plan for those. A file is looked at once.

What is not Go is remembered too, so that the thousandth shell costs a stat and a look into a dict.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass

from schedtrace import isolated
from schedtrace.discovery import has_build_information
from schedtrace.errors import NotTraceable
from schedtrace.plan import ProbePlan, make_plan

_REMEMBERED = 4096

FileKey = tuple[int, int, int, int]
"""Device, inode, size and time of change in ns: another file under a reused inode number is another key."""


def file_key(status: os.stat_result) -> FileKey:
    """The identity of a file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


@dataclass(frozen=True)
class GoBinary:
    """An executable with a Go runtime; ``plan`` is None if it can't be watched, and ``refusal`` then says why."""

    key: FileKey
    plan: ProbePlan | None
    refusal: str

    def may_be_same_file(self, other: FileKey) -> bool:
        """Could the file ``other`` be the same inode to the kernel? On overlayfs each container shows a file of its
        image under a device of its own, with the inode number, size and times of the lower file."""
        return self.key[1:] == other[1:]


class Binaries:
    """The memory of executables, the most recent :data:`_REMEMBERED` of them."""

    def __init__(self) -> None:
        self._known: OrderedDict[FileKey, GoBinary | None] = OrderedDict()

    def known_not_go(self, key: FileKey) -> bool:
        """Is it certain, without a look at the file, that it has no Go in it?"""
        return self._known.get(key, True) is None

    def look(self, executable_fd: int, shown_as: str) -> GoBinary | None:
        """The Go binary open at ``executable_fd``; None if it isn't one."""
        key = file_key(os.fstat(executable_fd))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        path = f"/proc/self/fd/{executable_fd}"
        try:
            plan, refusal = isolated.call(lambda: _plan_or_refusal(path))
        except NotTraceable as error:
            plan, refusal = None, f"{shown_as}: {error}"
        binary = GoBinary(key, plan, refusal.replace(path, shown_as)) if plan or refusal else None
        self._known[key] = binary
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return binary


def _plan_or_refusal(path: str) -> tuple[ProbePlan | None, str]:
    """The plan of a Go binary, or why there is none; neither if it isn't Go."""
    try:
        return make_plan(path), ""
    except NotTraceable as error:
        return None, str(error) if has_build_information(path) else ""
