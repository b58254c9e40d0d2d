"""The metrics that there are. Pure."""

from schedtrace.exposition import Family, Kind

_LABELS = ("namespace", "pod", "container", "process")
_OF_SERIES: tuple[tuple[str, Kind, tuple[str, ...], str], ...] = (
    (
        "schedtrace_goroutine_sched_latency_seconds",
        "histogram",
        ("cause",),
        "Time goroutines were runnable before they ran, by what made them runnable.",
    ),
    (
        "schedtrace_goroutine_wait_seconds",
        "histogram",
        ("reason",),
        "Time goroutines waited, by wait reason of the Go runtime.",
    ),
    (
        "schedtrace_goroutine_transitions_total",
        "counter",
        ("from", "to"),
        "Changes of goroutine state.",
    ),
    (
        "schedtrace_goroutine_state_seconds_total",
        "counter",
        ("state",),
        "Time goroutines spent in a state, added up over goroutines.",
    ),
    (
        "schedtrace_sampled_sched_latency_seconds",
        "histogram",
        ("cause",),
        (
            "Time goroutines were runnable before they ran, of those that the Go runtime takes into its own sample of "
            "about one in eight, while watched at the sampled level; not multiplied."
        ),
    ),
    (
        "schedtrace_sched_delay_seconds_total",
        "counter",
        ("level", "source"),
        "What goroutines waited for in that time: a queue of Go's, a CPU for their thread, the world to be started.",
    ),
    (
        "schedtrace_thread_run_queue_seconds",
        "histogram",
        (),
        "Time threads were runnable for the kernel before they ran. All the time, not only in windows.",
    ),
    (
        "schedtrace_goroutine_off_cpu_seconds",
        "histogram",
        ("reason",),
        (
            "Time goroutines ran for Go while their thread was off the CPU: preempted, it waited for a CPU; blocked, "
            "it slept in the kernel; woken, it waited for a CPU behind that. All the time, not only in windows."
        ),
    ),
    (
        "schedtrace_runtime_sched_latency_seconds",
        "histogram",
        (),
        (
            "Time goroutines were runnable before they ran, as the Go runtime itself samples it since its start: one "
            "in eight, not multiplied; up to Go 1.25 with system calls as waits of 0. The sum is an estimate from "
            "buckets."
        ),
    ),
    (
        "schedtrace_runtime_stop_the_world_seconds",
        "histogram",
        ("reason",),
        (
            "Time from the wish to stop the world until all ran again, as the Go runtime counts it since its start. "
            "The sum is an estimate from buckets."
        ),
    ),
    (
        "schedtrace_runtime_stopping_seconds",
        "histogram",
        ("reason",),
        "Of that, the time until all had stopped (Go 1.22 and newer).",
    ),
    ("schedtrace_runtime_gc_cycles_total", "counter", (), "Collections that the Go runtime has completed."),
    (
        "schedtrace_runtime_heap_goal_bytes",
        "gauge",
        (),
        "Size of the heap at which the collection under way, or the next one, is to end, added up.",
    ),
    ("schedtrace_runtime_processors", "gauge", ("state",), "Ps of the processes, by state."),
    (
        "schedtrace_runtime_run_queue",
        "gauge",
        ("queue",),
        "Runnable goroutines in the global queue, and in those of the Ps.",
    ),
    (
        "schedtrace_runtime_threads",
        "gauge",
        ("state",),
        "Threads (Ms) of the Go runtimes: idle, without anything to run, and others.",
    ),
    ("schedtrace_gomaxprocs", "gauge", (), "GOMAXPROCS of the processes, added up."),
    ("schedtrace_goroutines", "gauge", (), "Goroutines of the processes, without the runtime's own."),
    (
        "schedtrace_cfs_throttled_seconds_total",
        "counter",
        (),
        "Time a CPU limit held CPUs back: of the container, the same for each of its processes.",
    ),
    (
        "schedtrace_cpu_quota_cores",
        "gauge",
        (),
        "CPU limit, in cores: of the container, the same for each of its processes.",
    ),
    ("schedtrace_threads", "gauge", (), "Threads of the processes."),
    ("schedtrace_open_fds", "gauge", (), "Open file descriptors of the processes."),
    (
        "schedtrace_target_info",
        "info",
        ("go_version", "level", "symbols"),
        "How processes are watched: their Go version, the level of seeing, and where function names came from.",
    ),
    (
        "schedtrace_overhead_seconds_total",
        "counter",
        ("whose",),
        (
            "Estimated CPU time that watching cost the processes: their own, in probes and switches of threads "
            "(target), and what the agent spent to put probes in and take them out (agent)."
        ),
    ),
    (
        "schedtrace_seen_seconds_total",
        "counter",
        ("level",),
        (
            "Time that processes were watched, added up over them. Transitions, states, latencies and waits count in "
            "that time only: their rate divided by this one's is the rate of one process."
        ),
    ),
    ("schedtrace_probe_hits_total", "counter", ("level",), "Times that processes hit a probe."),
    (
        "schedtrace_lost_total",
        "counter",
        ("reason",),
        "What could not be counted, by reason; without namespace, pod, container and process if nobody knows whose.",
    ),
)
"""Name, kind, labels besides those of the series, help."""

OF_SERIES = tuple(Family(name, kind, text, _LABELS + own) for name, kind, own, text in _OF_SERIES)
"""Of each set of labels."""

OF_NODE = (
    Family(
        "schedtrace_attach_failures_total",
        "counter",
        "Processes that could not be watched, by reason.",
        ("reason",),
    ),
    Family(
        "schedtrace_governor_windows_total",
        "counter",
        "Windows in which processes were watched, by how they ended; no_budget: none for minutes, too dear.",
        ("level", "end"),
    ),
    Family(
        "schedtrace_series_left_out_total",
        "counter",
        "Series left out because there were more than --max-series, added up over scrapes.",
        (),
    ),
)
