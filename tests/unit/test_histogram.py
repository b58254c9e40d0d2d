"""Buckets and quantiles, against prometheus_client's own histogram and numpy; the slot rule against the BPF code."""

import ctypes
import math
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram

from schedtrace.histogram import BOUNDS_SECONDS, SLOTS, Histogram, total

BPF = Path(__file__).parents[2] / "bpf"
EDGES_NS = [
    value
    for k in range(SLOTS)
    for value in (1000 * 2**k - 1, 1000 * 2**k, 1000 * 2**k + 1, 2 ** (k + 9), 2 ** (k + 10) - 1)
] + [0, 1, 511, 512, 999, 2**40, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def bpf_slot(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], int]:
    """histogram_slot() of bpf/maps.h, compiled for this machine."""
    folder = tmp_path_factory.mktemp("slot")
    (folder / "slot.c").write_text(
        "#define BPF_HASH(...)\n#define BPF_PERCPU_ARRAY(...)\n"
        "#define BPF_ARRAY(...)\n#define BPF_RINGBUF_OUTPUT(...)\n"
        '#include "maps.h"\n'
        "unsigned slot(unsigned long long ns) { return histogram_slot(ns); }\n"
    )
    library = folder / "slot.so"
    subprocess.run(
        [
            "gcc",
            "-O2",
            "-shared",
            "-fPIC",
            "-nostdinc",
            f"-I{BPF}",
            f"-I{BPF}/headers/include",
            "slot.c",
            "-o",
            library,
        ],
        cwd=folder,
        check=True,
        timeout=60,
    )
    function = ctypes.CDLL(str(library)).slot
    function.argtypes, function.restype = [ctypes.c_uint64], ctypes.c_uint
    return lambda ns: int(function(ns))


def _slot(ns: int) -> int:
    """The rule itself: the smallest k with ns <= 2**k microseconds, in whole numbers."""
    return next((k for k in range(SLOTS - 1) if ns <= 1000 << k), SLOTS - 1)


def _of(values_ns: list[int]) -> Histogram:
    slots = [0] * SLOTS
    for ns in values_ns:
        slots[_slot(ns)] += 1
    return Histogram(tuple(slots), sum(values_ns), max(values_ns, default=0))


def test_the_kernel_side_puts_every_value_where_the_rule_says(bpf_slot: Callable[[int], int]) -> None:
    chance = random.Random(1)
    values = EDGES_NS + [chance.getrandbits(chance.randrange(1, 64)) for _ in range(20_000)]
    assert [(ns, bpf_slot(ns)) for ns in values] == [(ns, _slot(ns)) for ns in values]


def test_bounds_are_the_powers_of_two_from_1_us_to_8_s() -> None:
    assert BOUNDS_SECONDS[:3] == (1e-06, 2e-06, 4e-06)
    assert BOUNDS_SECONDS[-2:] == (8.388608, math.inf)
    assert len(BOUNDS_SECONDS) == 25


def test_buckets_are_those_of_prometheus_client() -> None:
    chance = random.Random(2)
    values = EDGES_NS[:-3] + [chance.randrange(10**10) for _ in range(5_000)]
    theirs = PrometheusHistogram("h", "h", buckets=BOUNDS_SECONDS, registry=None)
    registry = CollectorRegistry()
    registry.register(theirs)
    for ns in values:
        theirs.observe(ns / 1e9)
    expected = [
        (float(sample.labels["le"]), int(sample.value))
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "h_bucket"
    ]
    assert _of(values).buckets() == expected


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_lie_in_the_slot_of_the_true_one(q: float) -> None:
    chance = random.Random(3)
    values = [int(chance.lognormvariate(11, 2)) for _ in range(10_001)]
    true_ns = int(np.quantile(values, q, method="inverted_cdf"))
    estimate = _of(values).quantile_seconds(q)
    assert estimate is not None
    slot = _slot(true_ns)
    assert (
        (BOUNDS_SECONDS[slot - 1] if slot else 0) <= estimate <= min(BOUNDS_SECONDS[slot], max(values) / 1e9)
    )


def test_quantiles_of_few_values() -> None:
    assert Histogram().quantile_seconds(0.5) is None
    assert _of([3_000]).quantile_seconds(1.0) == 3e-06
    assert _of([10**11]).quantile_seconds(0.5) == pytest.approx(
        54.19, abs=0.01
    )  # between 8.39 s and the maximum


def test_difference_of_two_snapshots() -> None:
    first, later = _of([1_500, 9_000]), _of([1_500, 9_000, 3_000, 3_500])
    assert later.since(first) == Histogram(_of([3_000, 3_500]).slots, 6_500, 4_000)
    assert later.since(later) == Histogram()
    assert _of([1_500, 70_000]).since(_of([1_500])).max_ns == 70_000
    with pytest.raises(ValueError, match="more than the later"):
        first.since(later)


def test_sums() -> None:
    assert total([_of([1_000]), _of([2_500, 2_500])]) == _of([1_000, 2_500, 2_500])
    assert total([]) == Histogram()
