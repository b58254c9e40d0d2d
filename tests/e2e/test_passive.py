"""What the agent exports of the runtime's own counts, against what the programs print of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.e2e.agent_process import Labels, Scrape, agent, confined
from tests.e2e.kubelet import TOKEN_VARIABLE, new_token, wait_for
from tests.workload import Facts, Workload, binary

PROGRAM = "introspected"
OWNER: Labels = ("", "", "", PROGRAM)
LATENCIES = "schedtrace_runtime_sched_latency_seconds"
STOPS = {
    "schedtrace_runtime_stop_the_world_seconds": {
        "gc": "/sched/pauses/total/gc:seconds",
        "other": "/sched/pauses/total/other:seconds",
    },
    "schedtrace_runtime_stopping_seconds": {
        "gc": "/sched/pauses/stopping/gc:seconds",
        "other": "/sched/pauses/stopping/other:seconds",
    },
}
UNSEEN = ("thread_switch_unseen", "goroutine_of_thread_unknown")
STRIPPED = {"1.21": False, "1.27": True}


def samples(facts: Facts) -> int:
    """How many latencies the runtime has counted, without those of no length: up to 1.25 these are system calls."""
    counts = facts["/sched/latencies:seconds"]["counts"]
    return int(sum(counts[2:]))


def exported(scrape: Scrape) -> int:
    return int(scrape.value(f"{LATENCIES}_count", OWNER))


@pytest.mark.parametrize("version", STRIPPED)
def test_counts_of_the_runtime(version: str, tmp_path: Path) -> None:
    """Two processes of one executable, of which one ends: gauges are of the living, counters of all."""
    program = tmp_path / PROGRAM
    shutil.copy(binary("introspect", version, strip=STRIPPED[version]), program)
    (tmp_path / "containers").mkdir()
    token = new_token()
    env = {TOKEN_VARIABLE: token}
    with agent(tmp_path, "--log-root", tmp_path, command=confined(token)) as watching:
        with Workload(program, "-procs", 2, env=env) as stays:
            with Workload(program, "-procs", 1, env=env) as ends:
                watching.await_process(OWNER)
                both = [target.run() for target in (stays, ends)]

                def has_all() -> Scrape | None:
                    both[:] = [target.run() for target in (stays, ends)]  # the first time, some are still about to end
                    scrape = watching.scrape()
                    goroutines = scrape.value("schedtrace_goroutines", OWNER)
                    return scrape if goroutines == sum(facts["goroutines"] for facts in both) else None

                scrape = wait_for(has_all, "the goroutines of both", 20)
                assert scrape.value("schedtrace_gomaxprocs", OWNER) == 4 + 3
                assert scrape.total("schedtrace_runtime_processors", OWNER) == 4 + 3
                assert scrape.total("schedtrace_runtime_threads", OWNER) == sum(facts["threads"] for facts in both)
                cycles = sum(facts["/gc/cycles/total:gc-cycles"] for facts in both)
                assert scrape.value("schedtrace_runtime_gc_cycles_total", OWNER) == cycles > 0
                goals = sum(facts["/gc/heap/goal:bytes"] for facts in both)
                assert scrape.value("schedtrace_runtime_heap_goal_bytes", OWNER) == goals
                for metric, names in STOPS.items():
                    for reason, name in names.items():
                        if name in both[0]:
                            printed = sum(sum(facts[name]["counts"]) for facts in both)
                            assert scrape.total(f"{metric}_count", OWNER, reason=reason) == printed
                at_least = sum(samples(facts) for facts in both)
                assert at_least <= exported(scrape)
                assert exported(scrape) <= sum(sum(f["/sched/latencies:seconds"]["counts"]) for f in both) + 20
                before = exported(scrape)
                os.kill(ends.pid, 9)
                ends.wait()

            def one_left() -> Scrape | None:
                scrape = watching.scrape()
                return scrape if scrape.value("schedtrace_goroutines", OWNER) == both[0]["goroutines"] else None

            scrape = wait_for(one_left, "the goroutines of one", 20)
            assert scrape.value("schedtrace_gomaxprocs", OWNER) == 4
            assert exported(scrape) >= before
        assert "passive" not in watching.log()


@pytest.mark.parametrize("strip", [False, True], ids=["symbols", "stripped"])
def test_time_off_the_cpu_without_probes(strip: bool, tmp_path: Path) -> None:
    """Sleeps that the runtime doesn't know of: each is one time off the CPU, blocked and then woken."""
    program = tmp_path / PROGRAM
    shutil.copy(binary("offcpu", strip=strip), program)
    (tmp_path / "containers").mkdir()
    token = new_token()
    arguments = ("--level", "passive", "--log-root", tmp_path)
    with agent(tmp_path, *arguments, command=confined(token)) as watching:
        with Workload(program, "-raw", 2, "-procs", 3, "-duration", "1s", env={TOKEN_VARIABLE: token}) as target:
            watching.await_process(OWNER)
            facts = target.run()
            alive = watching.scrape()
        after = watching.scrape()
        for scrape in (alive, after):
            blocked, woken = (
                scrape.value("schedtrace_goroutine_off_cpu_seconds_count", OWNER, reason=reason)
                for reason in ("blocked", "woken")
            )
            unseen = sum(scrape.total("schedtrace_lost_total", OWNER, reason=reason) for reason in UNSEEN)
            assert blocked == woken
            # Where the machine stands still at the wrong moment, a sleep is over before the thread leaves its CPU.
            assert 0.99 * facts["raws"] - unseen <= blocked <= 1.05 * facts["raws"] + 50
            slept = scrape.value("schedtrace_goroutine_off_cpu_seconds_sum", OWNER, reason="blocked")
            assert slept >= 0.002 * (0.99 * facts["raws"] - unseen)
            assert scrape.value("schedtrace_thread_run_queue_seconds_count", OWNER) >= woken
            assert scrape.total("schedtrace_probe_hits_total", OWNER) == 0
        assert "passive" not in watching.log()
