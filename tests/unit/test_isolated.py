"""Reading in a process of its own: results, refusals, ways to die, and who is blamed for them."""

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schedtrace.errors import NotTraceable, PermissionDenied
from schedtrace.isolated import MOST_PENDING, Reader


@contextmanager
def _reader(read: Callable[[int], Any], **limits: Any) -> Iterator[Reader[str, Any]]:
    reader = Reader[str, Any](read, **limits)
    try:
        yield reader
    finally:
        reader.close()


def _ask(reader: Reader[str, Any], tag: str, path: str | Path = "/dev/null") -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return reader.ask(tag, descriptor)
    finally:
        os.close(descriptor)


def _call(function: Callable[[], Any], **limits: Any) -> Any:
    """What a reader that is asked one thing makes of it."""
    with _reader(lambda _: function(), **limits) as reader:
        assert _ask(reader, "one")
        answered = reader.answer()
    assert answered
    if answered[1].error:
        raise answered[1].error
    return answered[1].result


def _raise(error: Exception) -> None:
    raise error


def _beyond_the_end(path: Path) -> int:
    """Reads a mapping of which the file has been cut away."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        file.truncate(0)
        return content[0]


def test_a_result_of_any_size_comes_back() -> None:
    assert _call(lambda: {"large": b"x" * 3_000_000, "pid": os.getpid()})["large"] == b"x" * 3_000_000
    assert _call(os.getpid) != os.getpid()


def test_refusals_are_raised_here() -> None:
    with pytest.raises(PermissionDenied, match="needs this and that"):
        _call(lambda: _raise(PermissionDenied("needs this and that")))
    with pytest.raises(FileNotFoundError):
        _call(lambda: _raise(FileNotFoundError(2, "gone")))


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with pytest.raises(NotTraceable, match="SIGBUS"):
        _call(lambda: _beyond_the_end(tmp_path / "file"))


def test_too_slow() -> None:
    start = time.monotonic()
    with pytest.raises(NotTraceable, match=r"more than 0\.2 s"):
        _call(lambda: time.sleep(60), time_limit_seconds=0.2)
    assert time.monotonic() - start < 30


def test_too_much_memory() -> None:
    with pytest.raises(NotTraceable, match="memory"):
        _call(lambda: len(bytearray(200 << 20)), memory_limit_bytes=100 << 20)


def test_other_failures_are_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotTraceable, match="a fault of our own"):
        _call(lambda: _raise(ValueError("a fault of our own")))
    assert capfd.readouterr().err == ""
    with pytest.raises(NotTraceable, match="SIGSEGV"):
        _call(lambda: os.kill(os.getpid(), signal.SIGSEGV))


def test_files_are_read_in_turn_by_one_child(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(f"{name} has this")
    with _reader(lambda descriptor: (os.getpid(), os.read(descriptor, 100))) as reader:
        assert all(_ask(reader, name, tmp_path / name) for name in "abc")
        assert list(reader.pending) == ["a", "b", "c"]
        answers = [reader.answer() for _ in "abc"]
    assert [(each[0], each[1].result[1]) for each in answers if each and each[1].result] == [
        ("a", b"a has this"),
        ("b", b"b has this"),
        ("c", b"c has this"),
    ]
    assert len({each[1].result[0] for each in answers if each and each[1].result}) == 1


def test_only_what_a_fresh_reader_fails_at_is_refused(tmp_path: Path) -> None:
    def read(descriptor: int) -> bytes:
        content = os.read(descriptor, 100)
        if content == b"kill":
            os.kill(os.getpid(), signal.SIGSEGV)
        return content

    (tmp_path / "good").write_text("good")
    (tmp_path / "bad").write_text("kill")
    with _reader(read) as reader:
        for name in ("good", "bad", "good"):
            assert _ask(reader, name, tmp_path / name)
        answered = reader.answer()
        assert answered
        assert answered[1].result == b"good"
        assert reader.answer() is None  # it had read the other before
        assert not reader.pending
        assert _ask(reader, "bad", tmp_path / "bad")
        answered = reader.answer()
        assert answered
        assert answered[0] == "bad"
        assert "SIGSEGV" in str(answered[1].error)
        assert _ask(reader, "good", tmp_path / "good")
        answered = reader.answer()
        assert answered
        assert answered[1].result == b"good"


def test_it_takes_so_many_at_once() -> None:
    with _reader(lambda _: os.getpid()) as reader:
        assert [_ask(reader, str(i)) for i in range(MOST_PENDING + 1)] == [True] * MOST_PENDING + [False]
        assert all(reader.answer() for _ in range(MOST_PENDING))
        assert _ask(reader, "again")


def test_a_reader_is_replaced_in_time() -> None:
    with _reader(lambda _: os.getpid()) as reader:
        children = []
        for i in range(600):
            assert _ask(reader, str(i))
            answered = reader.answer()
            assert answered
            children.append(answered[1].result)
    assert len(set(children)) == 3
    assert children.count(children[0]) == 256


def test_a_reader_keeps_none_of_the_files_that_are_open_here() -> None:
    with Path("/dev/null").open("rb") as file:
        # 0 to 2, its two ends, the file that it reads, and the listing itself
        assert _call(lambda: sum(1 for _ in Path("/proc/self/fd").iterdir())) == 7
        with pytest.raises(OSError, match="Bad file descriptor"):
            _call(lambda: os.fstat(file.fileno()))


def test_no_child_is_left() -> None:
    _call(os.getpid)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
