"""Does the kernel give us uprobes through perf's uprobe PMU? Asked by trying.

Which capability it wants depends on the kernel: CAP_PERFMON was enough until the fix of CVE-2025-38466,
which asks for CAP_SYS_ADMIN and was carried back to older kernels. BCC tries the PMU first and falls back
to tracefs without a word, so only the same attempt tells which way will be used. Source:
perf_event_open(2), kernel/events/core.c.
"""

import ctypes
import errno
import os
import platform
import struct
from pathlib import Path

PMU_TYPE = "sys/bus/event_source/devices/uprobe/type"

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_PERF_ATTR_SIZE_VER1 = 72
_DISABLED = 1
_PERF_FLAG_FD_CLOEXEC = 8


def refusal(root: str = "/") -> int:
    """0 if a uprobe can be opened through the PMU, else the error number: EACCES without the right, ENOENT
    if there is no such PMU. The probe is put on a file made for it, which no process maps, and taken away
    at once."""
    try:
        pmu_type = int(Path(root, PMU_TYPE).read_text())
    except OSError:
        return errno.ENOENT
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    memory_file = os.memfd_create("schedtrace-check")
    try:
        os.write(memory_file, bytes(4096))
        descriptor = _open_uprobe(number, pmu_type, f"/proc/self/fd/{memory_file}")
        if descriptor < 0:
            return ctypes.get_errno()
        os.close(descriptor)
    finally:
        os.close(memory_file)
    return 0


def _open_uprobe(syscall_number: int, pmu_type: int, path: str) -> int:
    """perf_event_open of a uprobe on the first byte of a file; -1 and errno if it is refused."""
    name = ctypes.create_string_buffer(path.encode())
    attributes = struct.pack(
        "=IIQQQQQIIQQ",
        pmu_type,
        _PERF_ATTR_SIZE_VER1,
        *(0, 0, 0, 0),  # config, sample_period, sample_type, read_format
        _DISABLED,
        *(0, 0),  # wakeup_events, bp_type
        ctypes.addressof(name),  # config1: uprobe_path
        0,  # config2: probe_offset
    )
    every_process, first_cpu, no_group = ctypes.c_int(-1), ctypes.c_int(0), ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(
        ctypes.c_long(syscall_number),
        ctypes.c_char_p(attributes),
        every_process,
        first_cpu,
        no_group,
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )
    return int(descriptor)
