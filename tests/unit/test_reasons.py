"""Wait reasons: every one of every Go version has a meaning, and the same one whatever its number."""

import pytest

from schedtrace.abi import OFFSET_UNKNOWN, REASON_UNKNOWN, WakeCause
from schedtrace.reasons import really_runs, reason_name, target_record, wake_cause

GO_1_27 = (
    ("", "GC assist marking", "IO wait", "dumping heap")
    + ("",) * 10
    + ("sleep",)
    + ("",) * 23
    + ("coroutine",)
)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("IO wait", WakeCause.NETWORK),
        ("chan receive", WakeCause.CHANNEL),
        ("chan receive (durable)", WakeCause.CHANNEL),
        ("select (synctest)", WakeCause.SELECT),
        ("sync.WaitGroup.Wait (durable)", WakeCause.MUTEX),
        ("semacquire", WakeCause.MUTEX),
        ("sleep", WakeCause.TIMER),
        ("preempted", WakeCause.PREEMPTED),
        ("GC worker (idle)", WakeCause.GC),
        ("a reason of the future", WakeCause.OTHER),
        ("", WakeCause.OTHER),
    ],
)
def test_wake_cause(reason: str, cause: WakeCause) -> None:
    assert wake_cause(reason) == cause


def test_a_worker_that_works_runs_and_one_that_idles_waits() -> None:
    assert really_runs("GC worker (active)")
    assert not really_runs("GC worker (idle)")
    assert not really_runs("GC assist wait")


def test_reason_names() -> None:
    assert reason_name(GO_1_27, 14) == "sleep"
    assert reason_name(GO_1_27, 5) == "reason 5"
    assert reason_name(GO_1_27, 60) == "reason 60"
    assert reason_name(GO_1_27, REASON_UNKNOWN) == "unknown"


def test_target_record() -> None:
    record = target_record({"g.waitreason": 176, "coro.gp": 0}, GO_1_27, stale_reasons=False)
    assert (record.g_waitreason, record.coro_gp, record.g_preempt) == (176, 0, OFFSET_UNKNOWN)
    assert record.cause_of_reason[2] == WakeCause.NETWORK
    assert record.cause_of_reason[14] == WakeCause.TIMER
    assert record.running_reasons == (1 << 1) | (1 << 3)
    assert record.coroutine_reason == 38


def test_stale_reasons_say_nothing_about_running() -> None:
    assert target_record({}, GO_1_27, stale_reasons=True).running_reasons == 0
