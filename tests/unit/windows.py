"""A made-up window for tests of what is printed of one."""

from schedtrace.histogram import SLOTS, Histogram
from schedtrace.window import FunctionTotals, OffCpuTotals, ProbeHits, StateTime, Target, Throttling, Window

POD = "/kubepods/burstable/pod0f6a3c7e-5f0d-4c1e-9b3a-2d8e7f6a5b4c/" + "4ab7" * 16


def slots(**counts: int) -> tuple[int, ...]:
    return tuple(counts.get(f"s{k}", 0) for k in range(SLOTS))


NETWORK = Histogram(slots(s0=1, s3=2000, s12=3), sum_ns=19_000_000, max_ns=3_690_000)
CHANNEL = Histogram(slots(s1=40, s5=2), sum_ns=150_000, max_ns=28_800)
RUN_QUEUE = Histogram(slots(s2=400, s10=5), sum_ns=5_040_000, max_ns=922_000)


def function(name: str, scale: int) -> FunctionTotals:
    return FunctionTotals(
        function=name,
        goroutines=12 * scale,
        created=scale,
        exits=scale,
        parks=1000 * scale,
        readies=1000 * scale,
        runs=2000 * scale,
        preempted=3,
        yielded=4,
        switches=5,
        syscalls=6,
        runnable_ns=20_000_000 * scale,
        running_ns=7,
        waiting_ns=3_000_000_000 * scale,
        syscall_ns=8,
        max_runnable_ns=1_500_000 * scale,
        max_waiting_ns=500_000_000 * scale,
    )


def example() -> Window:
    """Ten seconds of a throttled server."""
    return Window(
        target=Target(
            pid=1234,
            exe="/opt/nats/nats-server",
            name="nats-server",
            go_version="go1.27.2",
            level="full",
            mode="casgstatus",
            symbols="symtab",
            cgroup_path=POD,
            cgroup_hierarchy="cpu,cpuacct",
            cgroup_id=59,
            quota_cores=0.5,
        ),
        duration_ns=10_000_000_000,
        transitions={("waiting", "runnable"): 2046, ("running", "waiting"): 2050},
        sched_latency={"channel": CHANNEL, "network": NETWORK},
        wait={"IO wait": RUN_QUEUE},
        states=(
            StateTime("waiting", "IO wait", 410_000_000_000, 99),
            StateTime("runnable", "", 700_000_000, 123_460),
            StateTime("running", "", 3_200_000_000, 123_456),
        ),
        functions=(
            function("main.main", 1),
            function("github.com/nats-io/nats-server/v2/server.(*client).readLoop", 5),
        ),
        run_queue=RUN_QUEUE,
        off_cpu={"preempted": RUN_QUEUE, "blocked": CHANNEL, "woken": Histogram()},
        off_cpu_functions=(OffCpuTotals("main.main", 447, 5_040_000, 150_000, 922_000),),
        threads=12,
        goroutines=41,
        probes=(
            ProbeHits("runtime.preemptPark", "+10 push rbp", True, 0),
            ProbeHits("runtime.casgstatus", "+0 push rbp", True, 4096),
            ProbeHits("runtime.coroswitch_m", "+0 cmp rsp", False, 3),
        ),
        foreign_hits=17,
        unseen=("system calls: a goroutine in one counts as running",),
        lost={"interval_began_before_window": 23, "inconsistent_state": 0},
        throttling=Throttling(periods=100, throttled_periods=62, throttled_ns=1_400_000_000),
        overhead_ns=21_000_000,
        ended="the duration is over",
    )
