"""The exporter against prometheus_client's own text and parsers, and promtool."""

import math
import random
import subprocess
from collections.abc import Callable, Iterable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from schedtrace.exporter import DEFAULT_MAX_SERIES, Exporter
from schedtrace.histogram import SLOTS, Histogram
from schedtrace.runtime_histogram import RuntimeHistogram
from schedtrace.runtime_state import Processor, RuntimeState, RuntimeTotals
from schedtrace.series import Labels, NodeView, Series, SeriesTotals, TargetInfo
from schedtrace.window import CAUSES

LABELS = Labels("shop", "cart-5d9f-x2x", "server", "cart")
RUNTIMES = (
    RuntimeState(
        sched_latency=RuntimeHistogram((), 0, 0),
        stop_the_world={},
        gomaxprocs=3,
        goroutines=1_200,
        threads=9,
        idle_threads=4,
        processors=(Processor(0, "running", 5), Processor(1, "idle", 0), Processor(2, "running", 2)),
        idle_processors=1,
        run_queue=11,
        gc_cycles=17,
        heap_goal_bytes=1 << 22,
    ),
    RuntimeState(
        sched_latency=RuntimeHistogram((), 0, 0),
        stop_the_world={},
        gomaxprocs=1,
        goroutines=34,
        threads=2,
        idle_threads=1,
        processors=(Processor(0, "gcstop", 1),),
        idle_processors=0,
        run_queue=0,
        gc_cycles=None,
        heap_goal_bytes=None,
    ),
)
EMPTY = NodeView((), {}, {})
parse_openmetrics: Callable[[str], Iterable[Metric]] = openmetrics_parser.text_string_to_metric_families
generate_openmetrics, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
ODD_NAMES = [
    'a"b',
    "a\nb",
    "a\\nb",
    "a\\b",
    "a\\\\b",
    "a\udc80b",
    "a\\udc80b",
    "a\x1b[31mb",
    "a\x00b",
    "a\u2028b",
    "a\U000e0001b",
    "naïve",
    "{}",
    "a,b=c",
    " ",
    "",
    "# EOF",
]


def text_of(one: Exporter, *, openmetrics: bool) -> bytes:
    return b"".join(one.text(openmetrics=openmetrics))


def histogram(seed: int = 0) -> Histogram:
    generator = random.Random(seed)
    slots = tuple(generator.randrange(1000) for _ in range(SLOTS))
    return Histogram(slots, generator.randrange(10**13), 10**10)


def series(
    labels: Labels = LABELS,
    seed: int = 0,
    totals: SeriesTotals | None = None,
    infos: tuple[TargetInfo, ...] = (TargetInfo("go1.27.3", "full", "symtab"),),
) -> Series:
    totals = totals or SeriesTotals(
        transitions={("runnable", "running"): 10**15 + seed, ("running", "waiting"): 7},
        sched_latency={"channel": histogram(seed), "mutex/semaphore": Histogram()},
        wait={"chan receive": histogram(seed + 1)},
        state_ns={"running": 1_500_000_000, "waiting": 1},
        run_queue=histogram(seed + 2),
        off_cpu={"preempted": histogram(seed + 4)},
        lost={"goroutines full": 3},
        overhead_ns={"target": 2_000_000, "agent": 1_000},
        hits={"full": 19, "sampled": 3},
        seen_ns={"full": 4_000_000_000},
        sampled_latency={"network": histogram(seed + 6)},
        delay_ns={("full", "go_queue"): 5_000_000_000},
        runtime=RuntimeTotals(
            histogram(seed + 3),
            {"stopped_gc": histogram(seed + 4), "stopping_gc": histogram(seed + 5), "stopped_other": Histogram()},
            gc_cycles=17,
        ),
    )
    return Series(labels, totals, infos, 11, 13, 0.25, 17_000_000_000, RUNTIMES)


def exporter(*view: Series, max_series: int = DEFAULT_MAX_SERIES) -> Exporter:
    return Exporter(lambda: NodeView(view, {"stripped": 5}, {"samples": 19}), max_series)


def registry(collector: Exporter) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(collector)
    return made


Sample = tuple[str, str, tuple[tuple[str, str], ...], float]


def samples(families: Iterable[Metric]) -> list[Sample]:
    """Family, name, labels and value of every sample, in no order."""
    return sorted(
        (family.name, sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in families
        for sample in family.samples
    )


def values(collector: Exporter, name: str) -> dict[tuple[str, ...], float]:
    """Values by the labels besides those of every series."""
    found = [s for family in collector.collect() for s in family.samples if s.name == name]
    base = {"namespace", "pod", "container", "process"}
    return {tuple(v for key, v in s.labels.items() if key not in base): s.value for s in found}


VIEWS = {
    "nothing": (),
    "one": (series(),),
    "bare": (Series(LABELS, SeriesTotals(), (), 0, 0, None, None),),
    "many": tuple(series(Labels("n", f"p{i}", "c", "x"), i) for i in range(5)),
    "odd names": tuple(series(Labels(name, name, name, name)) for name in ODD_NAMES),
    "odd reasons": (
        series(
            infos=(TargetInfo('go"1\n', "\udcff", "\\"),),
            totals=SeriesTotals(wait={name: histogram() for name in ODD_NAMES}, lost=dict.fromkeys(ODD_NAMES, 1)),
        ),
    ),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_text_says_what_prometheus_client_says(view: tuple[Series, ...]) -> None:
    collector = exporter(*view)
    ours = text_of(collector, openmetrics=False).decode()
    assert samples(parse_text(ours)) == samples(parse_text(generate_latest(registry(collector)).decode()))
    comments = [line for line in generate_latest(registry(collector)).decode().split("\n") if line[:1] == "#"]
    assert [line for line in ours.split("\n") if line[:1] == "#"] == comments


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_openmetrics_says_what_prometheus_client_says(view: tuple[Series, ...]) -> None:
    """Its parser is strict: order of samples, suffixes, bounds, and the end."""
    collector = exporter(*view)
    ours = text_of(collector, openmetrics=True).decode()
    library = generate_openmetrics(registry(collector)).decode()
    assert samples(parse_openmetrics(ours)) == samples(parse_openmetrics(library)) == samples(collector.collect())
    assert [line for line in ours.split("\n") if line[:1] == "#"] == [
        line for line in library.split("\n") if line[:1] == "#"
    ]
    assert ours.endswith("\n# EOF\n")


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_promtool_finds_nothing_to_say(view: tuple[Series, ...]) -> None:
    text = text_of(exporter(*view), openmetrics=False)
    assert text.count(b"\n") > 20
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_every_name_kind_and_label() -> None:
    text = text_of(exporter(series()), openmetrics=False).decode().split("\n")
    base = 'namespace="shop",pod="cart-5d9f-x2x",container="server",process="cart"'
    types = {line.split()[2]: line.split()[3] for line in text if line.startswith("# TYPE")}
    assert types == {
        "schedtrace_goroutine_sched_latency_seconds": "histogram",
        "schedtrace_goroutine_wait_seconds": "histogram",
        "schedtrace_goroutine_transitions_total": "counter",
        "schedtrace_goroutine_state_seconds_total": "counter",
        "schedtrace_sampled_sched_latency_seconds": "histogram",
        "schedtrace_sched_delay_seconds_total": "counter",
        "schedtrace_thread_run_queue_seconds": "histogram",
        "schedtrace_goroutine_off_cpu_seconds": "histogram",
        "schedtrace_runtime_sched_latency_seconds": "histogram",
        "schedtrace_runtime_stop_the_world_seconds": "histogram",
        "schedtrace_runtime_stopping_seconds": "histogram",
        "schedtrace_runtime_gc_cycles_total": "counter",
        "schedtrace_runtime_heap_goal_bytes": "gauge",
        "schedtrace_runtime_processors": "gauge",
        "schedtrace_runtime_run_queue": "gauge",
        "schedtrace_runtime_threads": "gauge",
        "schedtrace_gomaxprocs": "gauge",
        "schedtrace_goroutines": "gauge",
        "schedtrace_cfs_throttled_seconds_total": "counter",
        "schedtrace_cpu_quota_cores": "gauge",
        "schedtrace_threads": "gauge",
        "schedtrace_open_fds": "gauge",
        "schedtrace_target_info": "gauge",
        "schedtrace_overhead_seconds_total": "counter",
        "schedtrace_seen_seconds_total": "counter",
        "schedtrace_probe_hits_total": "counter",
        "schedtrace_governor_windows_total": "counter",
        "schedtrace_lost_total": "counter",
        "schedtrace_attach_failures_total": "counter",
        "schedtrace_series_left_out_total": "counter",
        "schedtrace_build_info": "gauge",
    }
    expected = [
        f'schedtrace_goroutine_transitions_total{{{base},from="runnable",to="running"}} {10**15}',
        f'schedtrace_goroutine_transitions_total{{{base},from="running",to="waiting"}} 7',
        f'schedtrace_goroutine_state_seconds_total{{{base},state="running"}} 1.5',
        f'schedtrace_goroutine_state_seconds_total{{{base},state="waiting"}} 1e-09',
        f'schedtrace_sched_delay_seconds_total{{{base},level="full",source="go_queue"}} 5.0',
        f"schedtrace_runtime_gc_cycles_total{{{base}}} 17",
        f"schedtrace_runtime_heap_goal_bytes{{{base}}} 4194304",
        f'schedtrace_runtime_processors{{{base},state="idle"}} 1',
        f'schedtrace_runtime_processors{{{base},state="running"}} 2',
        f'schedtrace_runtime_processors{{{base},state="gcstop"}} 1',
        f'schedtrace_runtime_run_queue{{{base},queue="global"}} 11',
        f'schedtrace_runtime_run_queue{{{base},queue="local"}} 8',
        f'schedtrace_runtime_threads{{{base},state="idle"}} 5',
        f'schedtrace_runtime_threads{{{base},state="other"}} 6',
        f"schedtrace_gomaxprocs{{{base}}} 4",
        f"schedtrace_goroutines{{{base}}} 1234",
        f"schedtrace_cfs_throttled_seconds_total{{{base}}} 17.0",
        f"schedtrace_cpu_quota_cores{{{base}}} 0.25",
        f"schedtrace_threads{{{base}}} 11",
        f"schedtrace_open_fds{{{base}}} 13",
        f'schedtrace_target_info{{{base},go_version="go1.27.3",level="full",symbols="symtab"}} 1',
        f'schedtrace_overhead_seconds_total{{{base},whose="agent"}} 1e-06',
        f'schedtrace_overhead_seconds_total{{{base},whose="target"}} 0.002',
        f'schedtrace_seen_seconds_total{{{base},level="full"}} 4.0',
        f'schedtrace_probe_hits_total{{{base},level="full"}} 19',
        f'schedtrace_probe_hits_total{{{base},level="sampled"}} 3',
        f'schedtrace_lost_total{{{base},reason="goroutines full"}} 3',
        'schedtrace_lost_total{namespace="",pod="",container="",process="",reason="samples"} 19',
        'schedtrace_attach_failures_total{reason="stripped"} 5',
        "schedtrace_series_left_out_total 0",
    ]
    assert [line for line in text if line.startswith(tuple(expected))] == expected
    assert any(line.startswith('schedtrace_build_info{version="') for line in text)


def test_histograms_are_those_of_prometheus_client() -> None:
    """Bounds, buckets, sum and count of values recorded by the library's own histogram with our bounds."""
    ns = [1, 999, 1000, 1001, 2000, 5_000, 1_000_000, 1_024_000, 8_388_608_000, 8_388_608_001, 10**12]
    theirs = PrometheusHistogram("h", "h", buckets=[2**k / 1e6 for k in range(24)], registry=None)
    slots = [0] * SLOTS
    for value in ns:
        theirs.observe(value / 1e9)
        slots[next((k for k in range(24) if value <= 1000 << k), 24)] += 1
    ours = exporter(series(totals=SeriesTotals(wait={"select": Histogram(tuple(slots), sum(ns), max(ns))})))
    for suffix in ("_bucket", "_sum", "_count"):
        expected = {
            s.labels.get("le", ""): s.value for m in theirs.collect() for s in m.samples if s.name == "h" + suffix
        }
        found = values(ours, f"schedtrace_goroutine_wait_seconds{suffix}")
        assert {labels[1] if suffix == "_bucket" else "": value for labels, value in found.items()} == pytest.approx(
            expected, rel=1e-12
        )
    bounds = [float(le) for _, le in values(ours, "schedtrace_goroutine_wait_seconds_bucket")]
    assert (bounds[0], bounds[-2], bounds[-1], len(bounds)) == (1e-6, 8.388608, math.inf, 25)


def test_odd_names_stay_apart_and_printable() -> None:
    families = list(parse_text(text_of(exporter(*VIEWS["odd names"]), openmetrics=False).decode()))
    names = [s.labels["process"] for family in families for s in family.samples if s.name == "schedtrace_threads"]
    assert len(names) == len(set(names)) == len(ODD_NAMES)
    assert all(name.isprintable() for name in names)
    assert {r"a\nb", r"a\\nb", r"a\udc80b", r"a\\udc80b", r"a\x1b[31mb", "naïve", 'a"b'} <= set(names)


def test_what_is_unknown_is_absent() -> None:
    bare = exporter(VIEWS["bare"][0])
    assert values(bare, "schedtrace_cpu_quota_cores") == values(bare, "schedtrace_cfs_throttled_seconds_total") == {}
    assert values(bare, "schedtrace_threads") == {(): 0}
    assert values(bare, "schedtrace_thread_run_queue_seconds_count") == {(): 0}
    assert values(bare, "schedtrace_goroutine_off_cpu_seconds_count") == {}


def test_the_registry_knows_the_names_without_a_look() -> None:
    def never() -> NodeView:
        raise AssertionError("looked")

    names = [family.name for family in Exporter(never).describe()]
    assert names == [family.name for family in exporter(series()).collect()]
    one = registry(exporter(series())).restricted_registry(["schedtrace_threads"])
    assert [s.value for family in one.collect() for s in family.samples] == [11]


def test_a_pod_with_everything_fits_many_times_by_default() -> None:
    totals = SeriesTotals(
        sched_latency={cause: histogram() for cause in CAUSES}, wait={f"reason {n}": histogram() for n in range(20)}
    )
    exporter_of_55 = exporter(*(series(Labels("n", f"p{i}", "c", "x"), totals=totals) for i in range(55)))
    list(exporter_of_55.collect())
    assert exporter_of_55.left_out == 0
    assert DEFAULT_MAX_SERIES == 60_000


def per_series() -> int:
    """How many samples one of these series has, from the library's text."""
    lines = generate_latest(registry(exporter(series()))).decode().split("\n")
    return sum('pod="cart-5d9f-x2x"' in line for line in lines)


def pods_of(collector: Exporter) -> list[str]:
    return sorted({s.labels["pod"] for f in collector.collect() for s in f.samples if s.labels.get("pod")})


def test_whole_sets_of_labels_are_left_out_and_counted() -> None:
    each = per_series()
    assert each == 27 * 9 + 28  # histograms, and others
    pods = tuple(series(Labels("n", f"p{i}", "c", "x")) for i in (4, 2, 0, 3, 1))
    limited = exporter(*pods, max_series=3 * each + each - 1)
    assert pods_of(limited) == ["p0", "p1", "p2"]
    assert limited.left_out == 2
    assert values(limited, "schedtrace_series_left_out_total") == {(): 4 * each}
    assert b"schedtrace_series_left_out_total %d\n" % (6 * each) in text_of(limited, openmetrics=False)
    exact = exporter(*pods, max_series=5 * each)
    assert len(pods_of(exact)) == 5
    assert values(exact, "schedtrace_series_left_out_total") == {(): 0}


def test_newcomers_push_nothing_out() -> None:
    view = [series(Labels("n", "p5", "c", "x")), series(Labels("n", "p6", "c", "x"))]
    limited = Exporter(lambda: NodeView(tuple(view), {}, {}), max_series=2 * per_series())
    assert pods_of(limited) == ["p5", "p6"]
    view.insert(0, series(Labels("a", "p1", "c", "x")))
    assert pods_of(limited) == ["p5", "p6"]
    del view[1]
    assert pods_of(limited) == ["p1", "p6"]
    view.clear()
    assert pods_of(limited) == []
    assert limited.left_out == 0


def test_a_large_set_does_not_keep_smaller_ones_out() -> None:
    small = Series(Labels("z", "small", "c", "x"), SeriesTotals(), (), 0, 0, None, None)
    assert pods_of(exporter(series(), small, max_series=40)) == ["small"]
    assert pods_of(exporter(series(), small, max_series=0)) == []


def test_a_look_that_fails_is_the_scrapers_to_handle() -> None:
    def fails() -> NodeView:
        raise OSError("no map")

    with pytest.raises(OSError, match="no map"):
        text_of(Exporter(fails), openmetrics=True)
    with pytest.raises(OSError, match="no map"):
        list(Exporter(fails).collect())


def test_build_info_takes_more_labels() -> None:
    made = Exporter(lambda: EMPTY, build={"bcc": "0.26.0"})
    (sample,) = [s for f in made.collect() for s in f.samples if s.name == "schedtrace_build_info"]
    assert sample.labels["bcc"] == "0.26.0"
    assert sample.labels["python"].startswith("3.")
    assert sample.value == 1


def test_what_has_changed_is_written_again() -> None:
    """The text of what hasn't is used again: what comes out is the same as of an exporter that has kept nothing."""
    others = [series(Labels("shop", f"pod-{n}", "server", "cart"), seed=n) for n in range(3)]
    views = [
        (series(seed=1), *others),
        (series(seed=1), *others),
        (series(seed=2), *others),
        (series(seed=2, infos=()), *others[1:]),
        (series(seed=1), others[0]),
    ]
    coming = iter(views)
    kept = Exporter(lambda: NodeView(next(coming), {}, {}))
    for view in views:
        fresh = Exporter(partial(NodeView, view, {}, {}))
        assert text_of(kept, openmetrics=False) == text_of(fresh, openmetrics=False)
