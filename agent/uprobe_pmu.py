"""Uprobes through perf's uprobe PMU, and whether the kernel gives us those: asked by trying.

Which capability it wants depends on the kernel: CAP_PERFMON was enough until the fix of CVE-2025-38466,
which asks for CAP_SYS_ADMIN and was carried back to older kernels. Source: perf_event_open(2),
include/uapi/linux/perf_event.h, kernel/events/core.c.
"""

import ctypes
import errno
import fcntl
import os
import platform
import struct
from pathlib import Path

PMU_TYPE = "sys/bus/event_source/devices/uprobe/type"

TRACEPOINT = 2  # PERF_TYPE_TRACEPOINT
_SOFTWARE, _DUMMY = 1, 9  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY
ANY_PROCESS = -1

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_PERF_ATTR_SIZE_VER1 = 72
_PERF_FLAG_FD_CLOEXEC = 8
_PERF_EVENT_IOC_SET_BPF = 0x40042408


def refusal(root: str = "/") -> int:
    """0 if a uprobe can be opened through the PMU, else the error number: EACCES without the right, ENOENT
    if there is no such PMU. The probe is put on a file made for it, which no process maps, and taken away
    at once."""
    memory_file = os.memfd_create("schedtrace-check")
    try:
        os.write(memory_file, bytes(4096))
        os.close(_open_uprobe(f"/proc/self/fd/{memory_file}", 0, ANY_PROCESS, root))
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        os.close(memory_file)
    return 0


def events_refusal() -> int:
    """0 if we may open perf events at all, of any process, as tracepoints need it; else the error number.
    Distributions' kernels refuse them with EACCES to CAP_PERFMON, depending on kernel.perf_event_paranoid."""
    try:
        os.close(_open(_SOFTWARE, _DUMMY, ANY_PROCESS))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def attach(program_fd: int, path: str, file_offset: int, pid: int = ANY_PROCESS) -> int:
    """Run a BPF program of the kprobe kind at an instruction of the file at ``path``; with ``pid``, only in
    that process. Returns the event's descriptor: closing it takes the probe out. Raises OSError.
    """
    return _run_at(_open_uprobe(path, file_offset, pid), program_fd)


def open_event(program_fd: int, kind: int, number: int, pid: int) -> int:
    """The same for a perf event of another kind, :data:`TRACEPOINT`."""
    return _run_at(_open(kind, number, pid), program_fd)


def _run_at(event: int, program_fd: int) -> int:
    try:
        fcntl.ioctl(event, _PERF_EVENT_IOC_SET_BPF, program_fd)
    except OSError:
        os.close(event)
        raise
    return event


def _open_uprobe(path: str, file_offset: int, pid: int, root: str = "/") -> int:
    """perf_event_open of a uprobe. Raises OSError: ENOENT if there is no such PMU."""
    pmu_type = int(Path(root, PMU_TYPE).read_text())
    name = ctypes.create_string_buffer(os.fsencode(path))
    return _open(pmu_type, 0, pid, uprobe_path=ctypes.addressof(name), probe_offset=file_offset)


def _open(kind: int, config: int, pid: int, *, uprobe_path: int = 0, probe_offset: int = 0) -> int:
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    attributes = struct.pack(
        "=IIQQQQQIIQQ",
        *(kind, _PERF_ATTR_SIZE_VER1, config),
        *(1, 0, 0, 0),  # sample_period, sample_type, read_format, flags
        *(0, 0),  # wakeup_events, bp_type
        *(uprobe_path, probe_offset),  # config1, config2
    )
    # All threads of a process are seen wherever they run; for every process, the event must be on some CPU.
    cpu = 0 if pid == ANY_PROCESS else -1
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_char_p(attributes),
        *(ctypes.c_int(value) for value in (pid, cpu, -1)),  # no group
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(descriptor)
