"""Calls in a process of their own: results, refusals, and ways to die."""

import mmap
import os
import signal
import time
from pathlib import Path

import pytest

from schedtrace import isolated
from schedtrace.errors import NotTraceable, PermissionDenied


def _raise(error: Exception) -> None:
    raise error


def _beyond_the_end(path: Path) -> int:
    """Reads a mapping of which the file has been cut away."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        file.truncate(0)
        return content[0]


def test_a_result_of_any_size_comes_back() -> None:
    assert isolated.call(lambda: {"large": b"x" * 3_000_000, "pid": os.getpid()})["large"] == b"x" * 3_000_000
    assert isolated.call(os.getpid) != os.getpid()


def test_refusals_are_raised_here() -> None:
    with pytest.raises(PermissionDenied, match="needs this and that"):
        isolated.call(lambda: _raise(PermissionDenied("needs this and that")))
    with pytest.raises(FileNotFoundError):
        isolated.call(lambda: _raise(FileNotFoundError(2, "gone")))


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with pytest.raises(NotTraceable, match="SIGBUS"):
        isolated.call(lambda: _beyond_the_end(tmp_path / "file"))


def test_too_slow() -> None:
    start = time.monotonic()
    with pytest.raises(NotTraceable, match=r"more than 0\.2 s"):
        isolated.call(lambda: time.sleep(60), time_limit_seconds=0.2)
    assert time.monotonic() - start < 30


def test_too_much_memory() -> None:
    with pytest.raises(NotTraceable, match="memory"):
        isolated.call(lambda: len(bytearray(200 << 20)), memory_limit_bytes=100 << 20)


def test_other_failures_are_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotTraceable, match="a fault of our own"):
        isolated.call(lambda: _raise(ValueError("a fault of our own")))
    assert capfd.readouterr().err == ""
    with pytest.raises(NotTraceable, match="SIGSEGV"):
        isolated.call(lambda: os.kill(os.getpid(), signal.SIGSEGV))


def test_no_child_is_left() -> None:
    isolated.call(os.getpid)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
