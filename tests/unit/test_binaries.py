"""Executables are told apart by identity, read once, and read ahead."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schedtrace import binaries
from schedtrace.binaries import Binaries, GoBinary, file_key
from schedtrace.plan import make_plan
from tests.workload import binary


@pytest.fixture
def known() -> Iterator[Binaries]:
    made = Binaries()
    yield made
    made.close()


@contextmanager
def _open(path: str | Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def _look(known: Binaries, path: str | Path) -> GoBinary | None:
    with _open(path) as descriptor:
        return known.look(descriptor)


def test_a_go_binary_has_the_plan_that_is_made_of_it_elsewhere(known: Binaries) -> None:
    path = binary("hello")
    found = _look(known, path)
    assert found
    assert found.plan
    assert found.plan.probes == make_plan(str(path)).probes
    assert (found.key, found.refusal) == (file_key(path.stat()), "")
    assert _look(known, path) is found


def test_what_is_not_go_is_remembered(known: Binaries) -> None:
    key = file_key(Path("/bin/sh").stat())
    assert not known.known_not_go(key)
    assert _look(known, "/bin/sh") is None
    assert known.known_not_go(key)


def test_what_is_go_and_refused_says_why_without_the_name_it_was_read_by(known: Binaries, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    whole = binary("hello").read_bytes()
    cut.write_bytes(whole[: len(whole) * 3 // 4])
    found = _look(known, cut)
    assert found
    assert found.plan is None
    assert found.refusal
    assert "/proc/" not in found.refusal


def test_a_file_that_changes_is_another(known: Binaries, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"#!/bin/sh\n")
    assert _look(known, file) is None
    file.write_bytes(binary("hello").read_bytes())
    found = _look(known, file)
    assert found
    assert found.plan


def test_executables_are_read_ahead_by_several(known: Binaries) -> None:
    known.look_ahead([os.getpid(), 1 << 30])  # the second doesn't exist
    with _open("/proc/self/exe") as descriptor:
        asked = [reader for reader in known._readers if reader.pending]
        assert [list(reader.pending) for reader in asked] == [[file_key(os.fstat(descriptor))]]
        known.look_ahead([os.getpid()])  # asked already
        assert len(asked[0].pending) == 1
        assert known.look(descriptor) is None
        assert not asked[0].pending


def test_readers_end_when_there_is_nothing_to_read(known: Binaries, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _look(known, "/bin/sh") is None
    known.tick()
    monkeypatch.setattr(binaries, "_IDLE_SECONDS", -1.0)
    known.tick()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert _look(known, "/bin/cat") is None
