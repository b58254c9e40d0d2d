"""Calls that hang are left behind, and only those."""

import threading
from time import monotonic

import pytest

from schedtrace.errors import NotTraceable, PermissionDenied
from schedtrace.patience import Patience


def denied() -> int:
    raise PermissionDenied("no")


def test_results_and_refusals() -> None:
    assert Patience[int, int]().call({}) == {}
    results = Patience[str, int]().call({"a": lambda: 1, "b": denied, "c": lambda: 3})
    assert (results["a"], results["c"]) == (1, 3)
    assert isinstance(results["b"], PermissionDenied)


def test_other_errors_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Patience[str, int]().call({"a": lambda: 1 // 0})


def test_a_call_that_hangs() -> None:
    release = threading.Event()
    patience = Patience[str, int](patience_seconds=0.2)
    calls = {"a": lambda: 1, "hangs": lambda: int(release.wait(60)) + 1, "z": lambda: 3}
    before = monotonic()
    results = patience.call(calls)
    assert 0.2 <= monotonic() - before < 5
    assert (results["a"], results["z"]) == (1, 3)
    assert isinstance(results["hangs"], NotTraceable)
    assert "more than 0.2 s" in str(results["hangs"])
    # It isn't made again while it hangs, nor waited for.
    before = monotonic()
    assert isinstance(patience.call(calls)["hangs"], NotTraceable)
    assert monotonic() - before < 0.15
    release.set()
    deadline = monotonic() + 10
    while isinstance(patience.call(calls)["hangs"], NotTraceable):
        assert monotonic() < deadline
    assert patience.call(calls) == {"a": 1, "hangs": 2, "z": 3}


def test_no_more_than_some_are_left_behind() -> None:
    release = threading.Event()
    patience = Patience[int, bool](patience_seconds=0.05, most_left_behind=3)
    before = threading.active_count()
    calls = dict.fromkeys(range(10), lambda: release.wait(60))
    results = patience.call(calls)
    assert threading.active_count() - before == 3
    assert [("3 others" in str(results[key])) for key in calls] == [False] * 3 + [True] * 7
    assert isinstance(patience.call({99: lambda: True})[99], NotTraceable)
    release.set()
    deadline = monotonic() + 10
    while patience.call(calls) != dict.fromkeys(calls, True):
        assert monotonic() < deadline
