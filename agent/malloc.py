"""The C library's heap, of a process that is to stay small for weeks. Only glibc's can be told anything."""

import ctypes

_LIBC = ctypes.CDLL(None)
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_LARGE_BYTES = 1 << 18


def bound_memory() -> None:
    """Have large buffers go back to the kernel at once, and threads not keep memory each for itself: else what one
    scrape needs for a moment stays for good."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        _LIBC.mallopt(_M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Give free memory back to the kernel, wherever it lies in the heap."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
