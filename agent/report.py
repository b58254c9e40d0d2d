"""What a session saw, for people: the summary at its end, and one line per interval for pipes. Pure.

The first lines are what somebody needs who was woken up: is it throttled, how long do goroutines wait to
run and why. What limits the answer (probes, what can't be seen, losses, cost) comes last.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from schedtrace.formatting import (
    WIDTH,
    amount,
    bound,
    columns,
    count,
    duration,
    heading,
    keep_end,
    lines,
    paragraph,
    plural,
    printable,
    share,
    short_function,
)
from schedtrace.histogram import BOUNDS_SECONDS, Histogram
from schedtrace.report_samples import (
    QUANTILES,
    maximum,
    parts_of_waits,
    quantile,
    quantiles,
    sampled_latency,
    stops_by_name,
    stops_of_the_world,
)
from schedtrace.window import Samples, StateTime, Throttling, Window

_TOP_STATES = 12
_TOP_FUNCTIONS = 5
_TOP_PROBES = 12
_BAR = 40
_CONTAINER_ID = re.compile(r"([0-9a-f]{12})[0-9a-f]{52}")
STATE_TITLES = ("state", "wait reason", "time", "goroutines", "times")
FUNCTION_TITLES = ("function", "runs", "mean", "longest", "total")
"""Of :func:`function_rows`."""
QUANTILE_TITLES = ("count", *QUANTILES, "total")
"""Of :func:`quantile_row`."""
_SAMPLED = "the sample's goroutines"
_OFF_CPU = {
    "preempted": "preempted by the kernel",
    "blocked": "blocked in the kernel",
    "woken": "woken from that",
}


def summary(window: Window) -> Text:
    """Everything that was seen, as printed at the end of a session."""
    if window.samples:
        return _sampled_summary(window, window.samples)
    latency = window.sched_latency_total
    return lines(
        [
            *_header(window),
            *_throttling(window),
            *_sched_latency(window),
            *([Text(), _bars(latency)] if latency.count else []),
            *parts_of_waits(window.wait_parts, "goroutines"),
            *_stops(window),
            *_run_queue(window),
            *_off_cpu(window),
            *_functions_off_cpu(window, _TOP_FUNCTIONS),
            *_states(window, _TOP_STATES),
            *_functions_by_latency(window, _TOP_FUNCTIONS),
            *_functions_by_wait(window, _TOP_FUNCTIONS),
            *_probes(window),
            *_unseen(window),
            *_lost(window),
            *_overhead(window),
        ]
    )


def _sampled_summary(window: Window, samples: Samples) -> Text:
    latency = samples.sched_latency_total
    return lines(
        [
            *_header(window),
            *_throttling(window),
            *sampled_latency(samples),
            *([Text(), _bars(latency)] if latency.count else []),
            *what_samples_waited_for(samples),
            *_run_queue(window),
            *_probes(window),
            *_unseen(window),
            *_lost(window),
            *_overhead(window),
        ]
    )


def what_samples_waited_for(samples: Samples) -> list[Text]:
    """At the sampled level."""
    return [*parts_of_waits(samples.parts, _SAMPLED), *stops_of_the_world(samples)]


def _stops(window: Window) -> list[Text]:
    """As a recording has them."""
    if not window.stops:
        return []
    in_order = sorted(window.stops.items(), key=lambda item: -item[1].sum_ns)
    return stops_by_name("until it is to be started again", {printable(reason): h for reason, h in in_order})


@dataclass
class IntervalLines:
    """One line per interval, of what was new in it, for pipes and logs."""

    _before: Window | None = field(default=None, init=False)

    def next_line(self, window: Window) -> str:
        """The line about the time since the window given before (or since attach), with titles the first
        time."""
        before, self._before = self._before, window
        latency, run_queue = window.sched_latency_total, window.run_queue or Histogram()
        duration_ns, throttled_ns, lost = window.duration_ns, _throttled_ns(window), sum(window.lost.values())
        if before is not None:
            latency = latency.since(before.sched_latency_total)
            run_queue = run_queue.since(before.run_queue or Histogram())
            duration_ns -= before.duration_ns
            throttled_ns -= _throttled_ns(before)
            lost -= sum(before.lost.values())
        rate = latency.count / (duration_ns / 1e9) if duration_ns > 0 else 0.0
        line = (
            f"{window.duration_ns / 1e9:>7.1f} s {rate:>9,.0f} "
            f"{quantile(latency, 0.5):>8} {quantile(latency, 0.99):>8} {maximum(latency):>8} "
            f"{quantile(run_queue, 0.99):>11} {duration(throttled_ns):>9} {lost:>6,}"
        )
        runs = "samples/s" if window.samples else "runs/s"
        titles = (
            f"{'time':>9} {runs:>9} {'wait p50':>8} {'p99':>8} {'max':>8} {'threads p99':>11}"
            f" {'throttled':>9} {'lost':>6}"
        )
        return line if before is not None else f"{titles}\n{line}"


def _header(window: Window) -> list[Text]:
    parts = [title_line(window), *place_lines(window, WIDTH)]
    parts.append(Text(f"watched for {duration(window.duration_ns)}; {size_and_limit(window)}"))
    if window.ended:
        parts.append(Text(f"ended: {printable(window.ended)}"))
    return parts


def title_line(window: Window) -> Text:
    """What is watched, and how."""
    target = window.target
    how = f"{target.level} level ({target.mode}, {target.symbols})"
    return Text.assemble(
        (printable(target.name), "bold"), f"  PID {target.pid}  {printable(target.go_version)}  {how}"
    )


def place_lines(window: Window, width: int) -> list[Text]:
    """The executable and, if there is one, the cgroup."""
    target = window.target
    parts = [Text(keep_end(printable(target.exe), width), "dim")]
    if target.cgroup_path:
        cgroup = f"cgroup ({target.cgroup_hierarchy}) "
        path = _CONTAINER_ID.sub(r"\1…", printable(target.cgroup_path))
        parts.append(Text(cgroup + keep_end(path, width - len(cgroup)), "dim"))
    return parts


def size_and_limit(window: Window) -> str:
    """How many goroutines and threads there are, and what CPU they may use."""
    quota = window.target.quota_cores
    limit = "no CPU limit" if quota is None else f"CPU limit {amount(quota)} cores"
    counts = plural(window.threads, "thread")
    if not window.samples:
        counts = f"{plural(window.goroutines, 'goroutine')} on {counts}"
    return f"{counts}; {limit}"


def _throttling(window: Window) -> list[Text]:
    if window.throttling is None or not window.throttling.throttled_periods:
        return []
    return [Text(), Text(throttled(window.throttling), "bold red")]


def throttled(t: Throttling) -> str:
    """What the CPU limit did, in a line."""
    return (
        f"THROTTLED by the CPU limit for {duration(t.throttled_ns)} (summed over CPUs),"
        f" in {count(t.throttled_periods)} of {plural(t.periods, 'period')}"
    )


def _sched_latency(window: Window) -> list[Text]:
    title = heading("Goroutines waiting to run", "runnable until running, by what made them runnable")
    if not window.sched_latency_total.count:
        return [Text(), title, paragraph("none ran in this time")]
    rows = cause_rows(window)
    if len(rows) > 1:
        rows.append(("all", *quantile_row(window.sched_latency_total)))
    return [Text(), title, columns(("cause", *QUANTILE_TITLES), rows, "<>>>>>>")]


def cause_rows(window: Window) -> list[tuple[str, ...]]:
    """Each cause with the :func:`quantiles` of the waits to run after it, most time first."""
    causes = sorted(window.sched_latency.items(), key=lambda item: -item[1].sum_ns)
    return [(cause, *quantile_row(h)) for cause, h in causes]


def _bars(histogram: Histogram) -> Text:
    used = [k for k, n in enumerate(histogram.slots) if n]
    most = max(histogram.slots)
    rows = []
    for k in range(used[0], used[-1] + 1):
        longest = k == len(BOUNDS_SECONDS) - 1
        upper = f"over {bound(BOUNDS_SECONDS[k - 1])}" if longest else bound(BOUNDS_SECONDS[k])
        n = histogram.slots[k]
        rows.append((upper, count(n), "█" * -(-n * _BAR // most)))  # rounded up: what there is can be seen
    return columns(("up to", "times", ""), rows, ">><")


def _run_queue(window: Window) -> list[Text]:
    if window.run_queue is None:
        return []
    title = heading("Threads waiting for a CPU", "runnable for the kernel, not running")
    if not window.run_queue.count:
        return [Text(), title, paragraph("none waited")]
    return [Text(), title, columns(QUANTILE_TITLES, [quantile_row(window.run_queue)], ">>>>>>")]


def _off_cpu(window: Window) -> list[Text]:
    if window.off_cpu is None:
        return []
    title = heading("Goroutines running, but not on a CPU", "running for Go, their thread off the CPU")
    rows = [(_OFF_CPU[reason], *quantile_row(h)) for reason, h in window.off_cpu.items() if h.count]
    if not rows:
        return [Text(), title, paragraph("none was")]
    return [Text(), title, columns(("why", *QUANTILE_TITLES), rows, "<>>>>>>")]


def _functions_off_cpu(window: Window, top: int) -> list[Text]:
    rows = [
        (
            short_function(f.function),
            count(f.times),
            duration(f.max_ns),
            duration(f.run_queue_ns),
            duration(f.blocked_ns),
        )
        for f in window.off_cpu_functions[:top]
    ]
    titles = ("times", "longest", "for a CPU", "blocked")
    return _functions("Who ran, but not on a CPU, most", titles, rows, len(window.off_cpu_functions))


def _states(window: Window, top: int) -> list[Text]:
    rows = state_rows(window, top)
    title = heading("Where goroutines spend their time", "goroutines: how many at a time, on average")
    body = columns(STATE_TITLES, rows, "<<>>>", flexible=1) if rows else paragraph("no goroutine was seen")
    return [Text(), title, body]


def state_rows(window: Window, top: int) -> list[tuple[str, ...]]:
    """The cells under :data:`STATE_TITLES` of at most ``top`` states and wait reasons, and one row of the others."""
    order = {"running": 0, "runnable": 1, "syscall": 2}
    states = sorted(window.states, key=lambda s: (order.get(s.state, 3), -s.time_ns))
    rows = [_state_row(s.state, s.reason, [s], window) for s in states[:top]]
    if len(states) > top:
        rows.append(_state_row("(others)", "", states[top:], window))
    return rows


def _state_row(state: str, reason: str, times: list[StateTime], window: Window) -> tuple[str, ...]:
    time_ns, entered = sum(s.time_ns for s in times), sum(s.count for s in times)
    average = time_ns / window.duration_ns if window.duration_ns > 0 else 0.0
    return state, reason, duration(time_ns), amount(average), count(entered)


def _functions_by_latency(window: Window, top: int) -> list[Text]:
    rows = function_rows(window)
    return _functions("Who waited to run most", FUNCTION_TITLES[1:], rows[:top], len(rows))


def function_rows(window: Window) -> list[tuple[str, ...]]:
    """Start functions by how long their goroutines waited to run, under :data:`FUNCTION_TITLES`."""
    functions = sorted((f for f in window.functions if f.runnable_ns), key=lambda f: -f.runnable_ns)
    return [
        (
            short_function(f.function),
            count(f.runs),
            duration(f.runnable_ns / f.runs) if f.runs else "-",
            duration(f.max_runnable_ns),
            duration(f.runnable_ns),
        )
        for f in functions
    ]


def _functions_by_wait(window: Window, top: int) -> list[Text]:
    functions = sorted((f for f in window.functions if f.waiting_ns), key=lambda f: -f.waiting_ns)
    rows = [
        (
            short_function(f.function),
            count(f.goroutines),
            count(f.parks),
            duration(f.max_waiting_ns),
            duration(f.waiting_ns),
        )
        for f in functions[:top]
    ]
    titles = ("goroutines", "waits", "longest", "total")
    return _functions("Who waited for something most", titles, rows, len(functions))


def _functions(title: str, titles: tuple[str, ...], rows: Sequence[Sequence[str]], of: int) -> list[Text]:
    if not rows:
        return []
    remark = "by the function the goroutine began with"
    if of > len(rows):
        remark += f"; {count(of - len(rows))} more"
    return [Text(), heading(title, remark), columns(("function", *titles), rows, "<>>>>")]


def _probes(window: Window) -> list[Text]:
    hit = sorted((p for p in window.probes if p.hits), key=lambda p: -p.hits)[:_TOP_PROBES]
    rows = [(p.function, p.site, "" if p.emulated else "dear", count(p.hits)) for p in hit]
    dear = "" if all(p.emulated for p in hit) else "dear: the kernel single-steps this instruction"
    parts = [Text(), heading("Probes", dear)]
    if rows:
        parts.append(columns(("function", "instruction", "", "hits"), rows, "<<<>"))
    silent = len(window.probes) - len(rows)
    if silent:
        parts.append(paragraph(f"{silent} more, hit seldom or never" if rows else "none was hit"))
    return parts


def _unseen(window: Window) -> list[Text]:
    if not window.unseen:
        return []
    return [Text(), heading("Can't be seen here"), *(paragraph(text, bullet="- ") for text in window.unseen)]


def _lost(window: Window) -> list[Text]:
    rows = [(count(n), reason) for n, reason in losses(window)]
    if not rows:
        return [Text(), heading("Lost"), paragraph("nothing")]
    return [Text(), heading("Lost", "not counted, and why"), columns(("times", "reason"), rows, "><", 1)]


def losses(window: Window) -> list[tuple[int, str]]:
    """What was not counted, and why: the most first."""
    lost = sorted(window.lost.items(), key=lambda item: -item[1])
    return [(n, reason.replace("_", " ")) for reason, n in lost if n]


def _overhead(window: Window) -> list[Text]:
    cost = "unknown: what a hit costs could not be measured here"
    if window.overhead_ns is not None:
        cost = f"about {duration(window.overhead_ns)} of CPU time, {cost_share(window)} of one CPU (an estimate)"
    parts = [Text(), heading("Cost to the target"), paragraph(cost)]
    if window.foreign_hits:
        others = plural(window.foreign_hits, "hit")
        parts.append(paragraph(f"and {others} by other processes of the same executable"))
    return parts


def cost_share(window: Window) -> str:
    """The cost to the target, as a percentage of one CPU; a dash if it isn't known."""
    if window.overhead_ns is None or window.duration_ns <= 0:
        return "-"
    return share(window.overhead_ns / window.duration_ns)


def _throttled_ns(window: Window) -> int:
    return window.throttling.throttled_ns if window.throttling else 0


def quantile_row(histogram: Histogram | None) -> tuple[str, ...]:
    """The cells under :data:`QUANTILE_TITLES`; dashes for what is not known."""
    if histogram is None:
        return ("-",) * len(QUANTILE_TITLES)
    return (*quantiles(histogram), duration(histogram.sum_ns))
