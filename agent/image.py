"""Which file of a process holds its Go runtime, how to watch it, and where the process has it.

It is the executable, or a shared object (-buildmode=c-shared) of a program that is not Go's.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from schedtrace.discovery import has_build_information
from schedtrace.errors import NotTraceable, SchedtraceError
from schedtrace.plan import ProbePlan, make_plan
from schedtrace.proc_formats import Mapping
from schedtrace.procfs import Process


@dataclass(frozen=True)
class Image:
    """A mapped Go binary. ``descriptor`` is open for reading, and the caller closes it; it leads to the same file
    whatever becomes of its name. ``load_bias`` plus an address as linked is the address in the process."""

    descriptor: int
    plan: ProbePlan
    load_bias: int
    shared_object: bool

    @property
    def path(self) -> str:
        """A path to the file for as long as the descriptor is open."""
        return _path(self.descriptor)


def open_image(process: Process, *, syscalls: bool = False, stops: bool = False) -> Image:
    """The file with the process's Go runtime; ``syscalls``, ``stops`` as for :func:`schedtrace.plan.make_plan`.

    Raises NotTraceable if neither its executable nor a shared object of it can be watched: the reason is the Go shared
    object's if there is one, else the executable's. PermissionDenied if they can't be read.
    """
    descriptor = process.open_executable()
    try:
        with _naming(f"{process.exe} (PID {process.pid})", _path(descriptor)):
            plan = replace(make_plan(_path(descriptor), syscalls=syscalls, stops=stops), path=process.exe)
        return Image(descriptor, plan, process.load_bias(), shared_object=False)
    except NotTraceable:
        os.close(descriptor)
        library = _go_library(process, syscalls=syscalls, stops=stops)
        if library is None:
            raise
        return library
    except BaseException:
        os.close(descriptor)
        raise


def _go_library(process: Process, *, syscalls: bool, stops: bool) -> Image | None:
    """The first shared object with a Go runtime that can be watched; None if none is Go's."""
    found: Image | None = None
    others: list[str] = []
    refusal: NotTraceable | None = None
    for mapping in _mapped_code(process):
        descriptor = _open(process, mapping)
        if descriptor is None:
            continue
        path, name = _path(descriptor), f"{mapping.path} in {process.exe} (PID {process.pid})"
        try:
            with _naming(name, path):
                plan = replace(make_plan(path, syscalls=syscalls, stops=stops), path=mapping.path)
        except NotTraceable as error:
            if has_build_information(path):
                refusal = refusal or error
        else:
            if found is None:
                found = Image(descriptor, plan, _bias(process, mapping, plan), shared_object=True)
                continue
            others.append(mapping.path)
        os.close(descriptor)
    if found is None and refusal:
        raise refusal
    if found and others:
        unseen = f"the goroutines of other Go runtimes in this process: {', '.join(others)}"
        found = replace(found, plan=replace(found.plan, unseen=(*found.plan.unseen, unseen)))
    return found


def _mapped_code(process: Process) -> Iterator[Mapping]:
    """One executable mapping of each file but the executable, by ascending address."""
    seen = {(process.identity.device, process.identity.inode)}
    for mapping in process.mappings():
        key = (mapping.device, mapping.inode)
        if mapping.inode and mapping.executable and key not in seen and mapping.path != process.exe:
            seen.add(key)
            yield mapping


def _open(process: Process, mapping: Mapping) -> int | None:
    """By map_files, which leads to the file itself but needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE, or by its name,
    if that still leads there."""
    by_name = f"/proc/{process.pid}/root{mapping.path}"
    for path in (f"/proc/{process.pid}/map_files/{mapping.start:x}-{mapping.end:x}", by_name):
        with suppress(OSError):
            file = os.stat(path)  # noqa: PTH116
            if stat.S_ISREG(file.st_mode) and (path != by_name or file.st_ino == mapping.inode):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _bias(process: Process, code: Mapping, plan: ProbePlan) -> int:
    """From the mapping that holds the first probe."""
    probe = plan.probes[0]
    for mapping in process.mappings():
        start = probe.file_offset - mapping.file_offset
        same = (mapping.device, mapping.inode) == (code.device, code.inode)
        if same and mapping.executable and 0 <= start < mapping.end - mapping.start:
            return mapping.start + start - probe.vaddr
    raise NotTraceable(f"process {process.pid} ({process.name}) has unloaded {code.path}")


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


@contextmanager
def _naming(name: str, path: str) -> Iterator[None]:
    """In errors about the file ``path`` put ``name`` instead."""
    try:
        yield
    except SchedtraceError as error:
        raise type(error)(str(error).replace(path, name)) from None
