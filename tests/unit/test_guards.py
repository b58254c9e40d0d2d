"""Signals wait while something is done that must not stop half way."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from schedtrace.guards import uninterrupted

ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that a handler has been called for."""
    numbers: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        numbers.append(number)

    before = {number: signal.signal(number, hear) for number in ENDS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_waits(heard: list[int], number: int) -> None:
    with uninterrupted():
        signal.raise_signal(number)
        assert heard == []
    assert heard == [number]


def test_an_ignored_signal_stays_ignored_and_hides_no_other(heard: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
