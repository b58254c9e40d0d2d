"""Can this process load BPF? Asked by ``make test`` and by the tests that need it, so that they agree."""

import ctypes
import importlib.util
import os
import platform

_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_BPF_PROG_LOAD = 5
_BPF_PROG_TYPE_KPROBE = 2  # what uprobes are loaded as
# r0 = 0; exit
_PROGRAM = bytes([0xB7, 0, 0, 0, 0, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0])


class _ProgLoad(ctypes.Structure):
    """The head of union bpf_attr for BPF_PROG_LOAD, as long as linux/bpf.h first had it (Linux 4.1)."""

    _fields_ = (
        ("prog_type", ctypes.c_uint32),
        ("insn_cnt", ctypes.c_uint32),
        ("insns", ctypes.c_uint64),
        ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32),
        ("log_size", ctypes.c_uint32),
        ("log_buf", ctypes.c_uint64),
        ("kern_version", ctypes.c_uint32),
    )


def required() -> bool:
    """True where tests that need the kernel may not be left out: in CI, or when asked for."""
    return os.environ.get("CI", "").lower() == "true" or os.environ.get("SCHEDTRACE_REQUIRE_KERNEL") == "1"


def missing() -> str | None:
    """None if BPF programs can be loaded with BCC here, else one line on what is missing."""
    if importlib.util.find_spec("bcc") is None:
        return (
            "BCC's Python module is missing (Debian: apt-get install python3-bpfcc, in a venv that sees it)"
        )
    number = _SYS_BPF.get(platform.machine())
    if number is None:
        return f"machine {platform.machine()} is neither x86_64 nor aarch64"
    code = ctypes.create_string_buffer(_PROGRAM, len(_PROGRAM))
    license_text = ctypes.create_string_buffer(b"GPL")
    attributes = _ProgLoad(
        prog_type=_BPF_PROG_TYPE_KPROBE,
        insn_cnt=len(_PROGRAM) // 8,
        insns=ctypes.addressof(code),
        license=ctypes.addressof(license_text),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(number, _BPF_PROG_LOAD, ctypes.byref(attributes), ctypes.sizeof(attributes))
    if descriptor >= 0:
        os.close(descriptor)
        return None
    reason = os.strerror(ctypes.get_errno())
    return f"the kernel loads no BPF program for us: {reason} (run as root, or with CAP_BPF and CAP_PERFMON)"
