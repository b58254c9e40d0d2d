"""The runtime's histogram: its buckets as its record function fills them, and what ours make of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedtrace.histogram import BOUNDS_SECONDS
from schedtrace.runtime_histogram import RuntimeHistogram, bounds_ns

OLD, NEW = 720, 160
DURATIONS = st.lists(st.one_of(st.integers(-5, 3000), st.integers(0, 1 << 34), st.integers(0, 1 << 50)), max_size=60)
# Of a bound of ours: what is counted as up to it, exactly, is what is shorter than this share of it.
SHARE = {OLD: 0.992, NEW: 0.896}


def record(durations_ns: list[int], buckets: int) -> RuntimeHistogram:
    """(*timeHistogram).record, as Go 1.19 and Go 1.27 have it."""
    counts, underflow, overflow = [0] * buckets, 0, 0
    for d in durations_ns:
        if d < 0:
            underflow += 1
        elif buckets == OLD:
            super_bucket, sub_bucket = 0, d
            if d >= 16:
                super_bucket = d.bit_length() - 4
                sub_bucket = (d >> (super_bucket - 1)) % 16
            counts[min(16 * super_bucket + sub_bucket, OLD - 1)] += 1
        else:
            bit = max(d.bit_length(), 9)
            bucket = 0 if d.bit_length() < 9 else bit - 8
            if bucket >= 40:
                overflow += 1
            else:
                counts[4 * bucket + (d >> (bit - 3)) % 4 if bucket else d >> 6] += 1
    return RuntimeHistogram(tuple(counts), underflow, overflow)


@pytest.mark.parametrize("buckets", [OLD, NEW])
@given(st.integers(0, (1 << 47) - 1))
def test_a_time_lies_in_its_bucket(buckets: int, duration_ns: int) -> None:
    histogram = record([duration_ns], buckets)
    (index,) = (i for i, n in enumerate(histogram.counts) if n)
    assert histogram.bounds_ns[index] <= duration_ns < histogram.bounds_ns[index + 1]


def test_bounds() -> None:
    assert bounds_ns(NEW)[:9] == (0, 64, 128, 192, 256, 320, 384, 448, 512)
    assert bounds_ns(NEW)[-2:] == (7 << 44, 1 << 47)
    assert bounds_ns(OLD)[:20] == (*range(17), 17, 18, 19)
    assert bounds_ns(OLD)[31:35] == (31, 32, 34, 36)
    for buckets in (OLD, NEW):
        assert len(bounds_ns(buckets)) == buckets + 1
        assert sorted(set(bounds_ns(buckets))) == list(bounds_ns(buckets))
    with pytest.raises(ValueError, match="161 buckets"):
        bounds_ns(161)


@pytest.mark.parametrize("buckets", [OLD, NEW])
@given(DURATIONS)
def test_what_our_bounds_say(buckets: int, durations_ns: list[int]) -> None:
    ours = record(durations_ns, buckets).histogram
    assert ours.count == len(durations_ns)
    for bound, cumulative in ours.buckets()[:-1]:
        assert cumulative == sum(d < SHARE[buckets] * bound * 1e9 for d in durations_ns), bound
    assert ours.buckets()[-1] == (BOUNDS_SECONDS[-1], len(durations_ns))


@pytest.mark.parametrize(("buckets", "error"), [(OLD, 1 / 32), (NEW, 1 / 8)])
@given(st.lists(st.integers(256, 1 << 46), min_size=1, max_size=60))
def test_how_far_off_sum_and_maximum_are(buckets: int, error: float, durations_ns: list[int]) -> None:
    ours = record(durations_ns, buckets).histogram
    assert ours.sum_ns == pytest.approx(sum(durations_ns), rel=error)
    assert max(durations_ns) < ours.max_ns <= max(durations_ns) * (1 + 2 * error)


def test_times_of_next_to_no_length_add_nothing() -> None:
    ours = record([0, 10, 63, -4], NEW).histogram
    assert (ours.count, ours.sum_ns, ours.max_ns, ours.slots[0]) == (4, 0, 64, 4)
    assert record([], NEW).histogram.max_ns == 0


def test_times_beyond_the_last_bound() -> None:
    ours = record([1 << 47, 1 << 49], NEW).histogram
    assert (ours.slots[-1], ours.sum_ns, ours.max_ns) == (2, 2 << 47, 1 << 47)


def test_growth() -> None:
    before, after = record([1, 100, 5000], NEW), record([1, 100, 5000, 5000], NEW)
    assert after.grown_from(before)
    assert after.grown_from(after)
    assert not before.grown_from(after)
    assert not RuntimeHistogram(after.counts, 0, 0).grown_from(RuntimeHistogram(before.counts, 1, 0))
    assert not RuntimeHistogram(after.counts, 0, 0).grown_from(RuntimeHistogram(before.counts, 0, 1))
    assert not record([1], OLD).grown_from(record([1], NEW))
