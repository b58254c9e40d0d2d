"""What /proc knows about one process: who it is, whether it is still the same, where its code is mapped.

:func:`open_process` looks a PID up once and holds a pidfd on it. While that pidfd says the process lives,
its number can't have been given to another process, so all of /proc/PID read before then was about this
process. The methods of :class:`Process` read anew at every call. Sources: proc(5), pidfd_open(2), the
kernel's Documentation/filesystems/proc.rst.
"""

import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from schedtrace.errors import AttachFailed, NodeUnsupported, NotTraceable, PermissionDenied, SchedtraceError
from schedtrace.proc_formats import (
    AT_ENTRY,
    MappedFile,
    Mapping,
    SchedStat,
    Stat,
    auxiliary_value,
    mapped_files,
    parse_maps,
    parse_schedstat,
    parse_stat,
    parse_status,
)

CAP_SYS_PTRACE = 19

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_ELF64_ENTRY_OFFSET = 24
_DELETED = " (deleted)"
_LOOKS = 3


@dataclass(frozen=True)
class ExecutableIdentity:
    """The file behind /proc/PID/exe as stat(2) shows it. Two processes of one binary compare equal, also
    when the file has been unlinked since."""

    device: int
    inode: int
    deleted: bool = field(compare=False)


@dataclass(frozen=True)
class Namespaces:
    """Inode numbers of the namespaces; 0 where the kernel has no such namespace."""

    pid: int
    mnt: int
    user: int


class PidFd:
    """A pidfd: tells whether the process it was opened for has exited, and can't be fooled by a reused
    number."""

    def __init__(self, pid: int) -> None:
        """Raises OSError as pidfd_open(2) does."""
        self._fd = os.pidfd_open(pid)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait at most so long for the exit of the process; True when it has exited (also if nobody reaped
        it yet)."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(timeout_seconds * 1000))

    def fileno(self) -> int:
        """The descriptor, readable once the process has exited."""
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Process:
    """A process as it was when :func:`open_process` looked, and a hold on it. Close it, or use it in
    ``with``.

    ``exe`` is the executable's name as the target sees it, for people; open ``exe_path`` instead
    (/proc/PID/exe), which also leads to a file that was unlinked or that lies in another mount namespace.
    ``name`` is the base name of ``exe``. ``uid`` is the effective user id. ``container_pid`` is the PID in
    the innermost PID namespace.
    """

    pid: int
    start_time_ticks: int
    exe: str
    identity: ExecutableIdentity
    name: str
    uid: int
    namespaces: Namespaces
    container_pid: int
    cmdline: tuple[str, ...]
    image: tuple[int, int] = field(repr=False)
    pidfd: PidFd = field(repr=False, compare=False)

    @property
    def exe_path(self) -> str:
        return f"/proc/{self.pid}/exe"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the pidfd. May be called twice."""
        self.pidfd.close()

    def exited(self) -> bool:
        """Has the process exited?"""
        return self.pidfd.wait(0)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait at most ``timeout_seconds`` for the process to exit. True if it has."""
        return self.pidfd.wait(timeout_seconds)

    def still_same(self) -> bool:
        """Does the process live and run the program it was opened with? False after exec, also of the same
        file (unless address randomisation is off, which makes two runs of one file look alike)."""
        try:
            stat = read_stat(self.pid)
            identity = _identity(self.pid)[1]
        except OSError:
            return False
        same = (stat.start_time_ticks, stat.image, identity) == (
            self.start_time_ticks,
            self.image,
            self.identity,
        )
        return same and not self.exited()

    def open_executable(self) -> int:
        """A descriptor of the executable, for reading. It leads to the same file whatever becomes of the
        file's name and of the process. The caller closes it."""
        with self._reading():
            return os.open(self.exe_path, os.O_RDONLY | os.O_CLOEXEC)

    def thread_ids(self) -> tuple[int, ...]:
        """Thread ids in ascending order, in the caller's PID namespace."""
        with self._reading():
            return _numbers_in(f"/proc/{self.pid}/task")

    def thread_count(self) -> int:
        """How many threads there are."""
        with self._reading():
            return os.stat(f"/proc/{self.pid}/task").st_nlink - 2  # noqa: PTH116 (as of any directory, and one a thread)

    def cpu_seconds(self) -> float:
        """CPU time, user and system, of all its threads, those that ended included. Resolution is a clock
        tick (10 ms nearly everywhere)."""
        with self._reading():
            return read_stat(self.pid).cpu_seconds

    def open_fd_count(self) -> int:
        """How many file descriptors are open."""
        folder = f"/proc/{self.pid}/fd"
        with self._reading():
            # Linux 6.2 and later say it as the size; before, that is always 0.
            return os.stat(folder).st_size or len(os.listdir(folder))  # noqa: PTH116, PTH208 (paths are dear)

    def environment(self) -> dict[str, str]:
        """The environment the process was started with. What it changed since then is not seen."""
        with self._reading():
            entries = _read(self.pid, "environ").split(b"\0")
        pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
        return {name: value for name, _, value in pairs}

    def schedstats(self) -> dict[int, SchedStat]:
        """Scheduler statistics of every thread, by thread id. Threads that end meanwhile are left out, and
        all are if the kernel keeps none (CONFIG_SCHED_INFO)."""
        found = ((tid, read_schedstat(self.pid, tid)) for tid in self.thread_ids())
        return {tid: stat for tid, stat in found if stat is not None}

    def mappings(self) -> tuple[Mapping, ...]:
        """All of /proc/PID/maps, by ascending address."""
        with self._reading():
            return parse_maps(_read(self.pid, "maps"))

    def load_bias(self) -> int:
        """What to add to a virtual address in the executable's file to get the address in the running
        process: 0 if it isn't position independent.

        The kernel told the process its entry point (AT_ENTRY) and the file says where that was to be.
        Unlike the lowest mapping it stays right when a program remaps its text, and on overlayfs and btrfs,
        where maps and stat(2) name different devices and inodes.

        Raises NotTraceable if the executable is no 64-bit little-endian ELF file, or if the process has
        exited or executed another program.
        """
        with self._reading():
            entry = auxiliary_value(_read(self.pid, "auxv"), AT_ENTRY)
            with Path(self.exe_path).open("rb") as file:
                header = file.read(_ELF64_ENTRY_OFFSET + 8)
        if self.exited():
            raise _gone(self.pid, self.name)
        if entry is None or not self.still_same():
            raise NotTraceable(f"process {self.pid} ({self.name}) has executed another program meanwhile")
        if len(header) < _ELF64_ENTRY_OFFSET + 8 or not header.startswith(_ELF64_LITTLE_ENDIAN):
            raise NotTraceable(f"{self.exe} (PID {self.pid}) is not a 64-bit little-endian ELF file")
        return entry - int.from_bytes(header[_ELF64_ENTRY_OFFSET:], "little")

    def shared_objects(self) -> tuple[MappedFile, ...]:
        """The files other than the executable of which the process maps code, by ascending address: its
        shared libraries and, with -buildmode=c-shared or plugin, the Go program itself."""
        return tuple(
            file
            for file in mapped_files(self.mappings())
            if file.path != self.exe
            and (file.device, file.inode) != (self.identity.device, self.identity.inode)
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what /proc answers into the error a user should see."""
        try:
            yield
        except (FileNotFoundError, ProcessLookupError):
            raise _gone(self.pid, self.name) from None
        except PermissionError:
            raise _denied(self.pid, self.name, self.uid) from None


def open_process(pid: int) -> Process:
    """Look a process up and hold on to it.

    Raises NotTraceable if there is no such process, if it is a thread of one, a kernel thread, a zombie, or
    exits or executes other programs while it is looked at; PermissionDenied if it is another user's and
    CAP_SYS_PTRACE is missing, or if /proc hides it.
    """
    pidfd = _open_pidfd(pid)
    try:
        for _ in range(_LOOKS):
            process = _look(pid, pidfd)
            if process.still_same():
                return process
            if process.exited():
                raise _gone(pid, process.name)
        raise NotTraceable(f"process {pid} keeps executing other programs: try again once it has settled")
    except BaseException:
        pidfd.close()
        raise


def in_initial_pid_namespace() -> bool:
    """Does this process see the PIDs that the kernel itself uses, and BPF with it?"""
    return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE  # noqa: PTH116


def effective_capabilities() -> int:
    """The effective capabilities of this process, one bit each (linux/capability.h)."""
    return int(parse_status(_read("self", "status"))["CapEff"], 16)


def read_stat(pid: int) -> Stat:
    """/proc/PID/stat. Raises OSError."""
    return parse_stat(_read(pid, "stat"))


def read_schedstat(pid: int, tid: int) -> SchedStat | None:
    """Scheduler statistics of one thread, None if it has gone or the kernel keeps none."""
    try:
        text = _read(pid, f"task/{tid}/schedstat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return parse_schedstat(text)


def _look(pid: int, pidfd: PidFd) -> Process:
    comm, uid = "?", -1
    try:
        stat = read_stat(pid)
        comm = stat.comm
        status = parse_status(_read(pid, "status"))
        uid = int(status["Uid"].split()[1])
        _refuse_what_runs_no_program(pid, stat, status)
        exe, identity = _identity(pid)
        namespaces = Namespaces(*(_namespace(pid, kind) for kind in ("pid", "mnt", "user")))
        cmdline = _read(pid, "cmdline").removesuffix(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        if not pidfd.wait(0) and comm == "?":
            raise PermissionDenied(
                f"process {pid} exists but /proc hides it (hidepid): seeing it needs CAP_SYS_PTRACE;"
                " run as root or grant that capability"
            ) from None
        raise _gone(pid, comm) from None
    except PermissionError:
        raise _denied(pid, comm, uid) from None
    return Process(
        pid=pid,
        start_time_ticks=stat.start_time_ticks,
        exe=exe,
        identity=identity,
        name=exe.rpartition("/")[2],
        uid=uid,
        namespaces=namespaces,
        container_pid=int(status.get("NSpid", str(pid)).split()[-1]),
        cmdline=tuple(os.fsdecode(argument) for argument in cmdline.split(b"\0")) if cmdline else (),
        image=stat.image,
        pidfd=pidfd,
    )


def _refuse_what_runs_no_program(pid: int, stat: Stat, status: dict[str, str]) -> None:
    if stat.is_kernel_thread:
        raise NotTraceable(f"PID {pid} ({stat.comm}) is a kernel thread, not a program")
    if stat.state in "ZX":
        if stat.thread_count > 1:
            raise NotTraceable(
                f"the main thread of process {pid} ({stat.comm}) has ended while others run on,"
                " which no Go program does"
            )
        parent = status["PPid"]
        raise NotTraceable(
            f"process {pid} ({stat.comm}) has exited: a zombie until its parent {parent} reaps it"
        )


def _open_pidfd(pid: int) -> PidFd:
    try:
        return PidFd(pid)
    except OverflowError:
        raise _absent(pid) from None
    except OSError as error:
        raise _pidfd_refusal(pid, error) from None


def _pidfd_refusal(pid: int, error: OSError) -> SchedtraceError:
    if error.errno == errno.ENOSYS:
        return NodeUnsupported("the kernel has no pidfd_open (5.3): schedtrace needs 5.10 or newer")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return AttachFailed(f"no file descriptor left to hold process {pid}: raise the limit (ulimit -n)")
    if error.errno == errno.EPERM:
        return PermissionDenied("a seccomp filter forbids pidfd_open: allow it, or run without that filter")
    try:
        # A thread's number is no process's, but /proc answers to it, although it doesn't list it.
        status = parse_status(_read(pid, "status"))
    except OSError:
        return _absent(pid)
    if status["Tgid"] != str(pid):
        return NotTraceable(
            f"{pid} is a thread of process {status['Tgid']} ({status['Name']}): give that PID"
        )
    return _absent(pid)


def _absent(pid: int) -> NotTraceable:
    return NotTraceable(f"there is no process {pid}: `schedtrace list` shows the Go processes of this node")


def _gone(pid: int, name: str) -> NotTraceable:
    return NotTraceable(f"process {pid} ({name}) has exited")


def _denied(pid: int, name: str, uid: int) -> PermissionDenied:
    whose = f"process {pid} ({name}) of user {uid}"
    if effective_capabilities() & 1 << CAP_SYS_PTRACE:
        return PermissionDenied(
            f"{whose}: reading it is refused although CAP_SYS_PTRACE is there; it counts only in the target's"
            " user namespace or one above, and a security module (SELinux, AppArmor) can forbid it"
        )
    return PermissionDenied(
        f"{whose}: looking into it needs CAP_SYS_PTRACE; run as root or grant that capability"
    )


def _identity(pid: int) -> tuple[str, ExecutableIdentity]:
    """Name and identity of the executable. Raises OSError."""
    link = f"/proc/{pid}/exe"
    text = os.readlink(link)  # noqa: PTH115 (Path would normalise the name)
    file = os.stat(link)  # noqa: PTH116
    key = (file.st_dev, file.st_ino)
    # The kernel marks an unlinked file, but nobody stops a file from being called that.
    deleted = text.endswith(_DELETED) and all(
        _file_key(root + text) != key for root in (f"/proc/{pid}/root", "")
    )
    return text.removesuffix(_DELETED) if deleted else text, ExecutableIdentity(*key, deleted)


def _file_key(path: str) -> tuple[int, int] | None:
    try:
        file = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return file.st_dev, file.st_ino


def _namespace(pid: int, kind: str) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino  # noqa: PTH116
    except FileNotFoundError:
        if Path(f"/proc/{pid}/ns").exists():
            return 0
        raise


def _numbers_in(directory: str) -> tuple[int, ...]:
    return tuple(sorted(int(name) for name in os.listdir(directory) if name.isdigit()))  # noqa: PTH208


def _read(pid: int | str, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()
