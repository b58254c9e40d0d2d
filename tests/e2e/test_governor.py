"""The agent keeps to what it may cost, and says what it does."""

import json
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from schedtrace.procfs import cpu_clock
from tests.command import run
from tests.e2e.agent_process import Agent, Labels, Scrape, agent, confined
from tests.e2e.kubelet import TOKEN_VARIABLE, new_token, wait_for
from tests.target_text import TargetText
from tests.workload import Workload, binary

PROGRAM = "governed"
OWNER: Labels = ("", "", "", PROGRAM)
ENDLESS = 10**9
SECONDS = 25.0
LIMIT = 0.03


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "containers").mkdir()
    return Path(shutil.copy(binary("pingpong"), tmp_path / PROGRAM))


def await_seen(watching: Agent, windows: int) -> Scrape:
    """The first scrape after so many windows."""

    def look() -> Scrape | None:
        scrape = watching.scrape()
        return scrape if scrape.total("schedtrace_governor_windows_total") >= windows else None

    return wait_for(look, f"{windows} windows", 60)


def unprobed(text: TargetText) -> bool:
    return not text.differences()


def test_budget_holds_where_there_is_most_to_see(tmp_path: Path, program: Path) -> None:
    """In CPU time of the target, as the kernel accounts it. Where this machine stood still when a window was to end,
    the next one waits until that is paid."""
    token = new_token()
    with (
        Workload(program, "-n", ENDLESS, env={TOKEN_VARIABLE: token}) as load,
        Workload(program, "-n", ENDLESS, env={TOKEN_VARIABLE: token}) as idle,
        agent(tmp_path, "--log-root", tmp_path, command=confined(token), max_overhead="3") as watching,
    ):
        load.go()
        watching.await_process(OWNER)
        time.sleep(SECONDS)
        await_seen(watching, 3)

        def within_budget() -> Scrape | None:
            scrape = watching.scrape()
            overhead = scrape.total("schedtrace_overhead_seconds_total", OWNER)  # the agent's part is in it
            return scrape if 0 < overhead <= LIMIT * time.clock_gettime(cpu_clock(load.pid)) else None

        scrape = wait_for(within_budget, "the overhead to be in the budget", 20)
        info = dict(next(iter(scrape.values("schedtrace_target_info", OWNER))))
        assert info["level"] == "windows"
        hits = scrape.value("schedtrace_probe_hits_total", OWNER, level="full")
        transitions = scrape.total("schedtrace_goroutine_transitions_total", OWNER)
        assert 0 < transitions <= hits
        assert scrape.total("schedtrace_sampled_sched_latency_seconds_count", OWNER) > 0
        assert scrape.total("schedtrace_probe_hits_total", OWNER, level="sampled") > 0
        assert scrape.total("schedtrace_sched_delay_seconds_total", OWNER, level="sampled") > 0
        seen = scrape.value("schedtrace_seen_seconds_total", OWNER, level="full")
        assert 0 < seen < SECONDS / 2
        running = scrape.total("schedtrace_goroutine_state_seconds_total", OWNER, state="running")
        assert 0 < running <= seen
        assert scrape.total("schedtrace_lost_total", OWNER, reason="inconsistent_state") == 0
        seen_by_list = {
            one["pid"]: one["agent"]
            for one in json.loads(run("list", "--agent", watching.address, "--json").stdout)["processes"]
        }
        assert seen_by_list[load.pid]["hits"]["full"] >= hits
        assert seen_by_list[load.pid]["seen_seconds"]["full"] >= 0.9 * seen / 2  # of both together
        assert seen_by_list[load.pid]["level"] in ("passive", "sampled", "full")
        assert seen_by_list[idle.pid] is not None
        for process in (load, idle):
            text = TargetText.of(process.pid, program)
            wait_for(partial(unprobed, text), "a time between windows", 20)
            assert process.alive


def test_passive_has_no_probes(tmp_path: Path, program: Path) -> None:
    token = new_token()
    with (
        Workload(program, "-n", ENDLESS, env={TOKEN_VARIABLE: token}) as load,
        agent(tmp_path, "--log-root", tmp_path, "--level", "passive", command=confined(token), max_overhead="1") as one,
    ):
        load.go()
        text = TargetText.of(load.pid, program)
        one.await_process(OWNER)
        until = time.monotonic() + 8
        while time.monotonic() < until:
            assert text.differences() == {}
            time.sleep(0.1)
        scrape = one.scrape()
    assert dict(next(iter(scrape.values("schedtrace_target_info", OWNER))))["level"] == "passive"
    assert scrape.value("schedtrace_threads", OWNER) > 0
    assert scrape.total("schedtrace_probe_hits_total", OWNER) == 0
    assert scrape.total("schedtrace_seen_seconds_total", OWNER) == 0


def test_sampled_is_all_that_is_done(tmp_path: Path, program: Path) -> None:
    """Also without windows."""
    token = new_token()
    for overhead in ("1", "none"):
        with (
            Workload(program, "-n", ENDLESS, env={TOKEN_VARIABLE: token}) as load,
            agent(
                tmp_path, "--log-root", tmp_path, "--level", "sampled", command=confined(token), max_overhead=overhead
            ) as one,
        ):
            load.go()
            one.await_process(OWNER)

            def sampled() -> Scrape | None:
                scrape = one.scrape()
                return scrape if scrape.total("schedtrace_sampled_sched_latency_seconds_count", OWNER) else None

            scrape = wait_for(sampled, "samples", 60)
            (labels,) = scrape.values("schedtrace_probe_hits_total", OWNER)
            assert dict(labels)["level"] == "sampled"
            assert scrape.total("schedtrace_goroutine_transitions_total", OWNER) == 0
            level = dict(next(iter(scrape.values("schedtrace_target_info", OWNER))))["level"]
            assert level == ("sampled" if overhead == "none" else "windows")


def test_who_hits_probes_seldom_is_seen_all_the_time_it_can_be(tmp_path: Path, program: Path) -> None:
    """One window is open, counts are live in it, and one that starts in the middle is counted, too."""
    token = new_token()
    with (
        Workload(program, "-n", 200_000, env={TOKEN_VARIABLE: token}) as earner,
        agent(tmp_path, "--log-root", tmp_path, command=confined(token), max_overhead="99") as watching,
    ):
        earner.run()
        watching.await_process(OWNER)
        await_seen(watching, 1)

        def long_window() -> bool:
            return watching.scrape().total("schedtrace_seen_seconds_total", OWNER, level="full") > 1

        wait_for(long_window, "a long window", 60)
        before = watching.scrape().total("schedtrace_goroutine_transitions_total", OWNER, to="waiting")
        with Workload(program, "-n", 200, env={TOKEN_VARIABLE: token}) as another:
            wait_for(lambda: watching.log().count("watching a Go process") == 2, "another process", 20)
            another.run()
            scrape = watching.scrape()
            # a round trip parks twice
            assert scrape.total("schedtrace_goroutine_transitions_total", OWNER, to="waiting") >= before + 400
            assert another.exit() == 0
        assert watching.terminate() == 0
