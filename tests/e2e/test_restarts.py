"""The agent is killed and started again under load: targets go on unharmed, nothing of it stays, its counts resume."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.bpf_objects import Objects, held_by, left
from tests.command import without
from tests.e2e.agent_process import Labels, agent, confined
from tests.e2e.kubelet import TOKEN_VARIABLE, new_token, wait_for
from tests.target_text import TargetText
from tests.workload import Workload, binary

RESTARTS = 7  # three times, so more than twenty in all
PROGRAM = "restarted"
OWNER: Labels = ("", "", "", PROGRAM)
TRANSITIONS = "schedtrace_goroutine_transitions_total"
LINES = Path("/sys/kernel/tracing/uprobe_events")
# All that root has but the three capabilities that the agent needs.
THREE = ["setpriv", "--inh-caps=-all", "--bounding-set=-all,+bpf,+perfmon,+sys_ptrace"]


def gone(objects: Objects) -> bool:
    return not left(objects)


@pytest.mark.parametrize("prefix", [[], without("sys_admin"), THREE], ids=["root", "without-SYS_ADMIN", "three"])
def test_killed_and_started_again(tmp_path: Path, prefix: Sequence[str]) -> None:
    program = tmp_path / PROGRAM
    shutil.copy(binary("pingpong"), program)
    token = new_token()
    lines_before = LINES.read_text()
    (tmp_path / "containers").mkdir()
    with Workload(program, "-n", 10**9, env={TOKEN_VARIABLE: token}) as target:
        target.go()
        text = TargetText.of(target.pid, program)
        for _ in range(RESTARTS):
            with agent(tmp_path, "--log-root", tmp_path, command=confined(token), prefix=prefix) as watching:
                watching.await_process(OWNER)
                first = watching.scrape().total(TRANSITIONS, OWNER)
                time.sleep(0.1)
                assert watching.scrape().total(TRANSITIONS, OWNER) > first
                assert text.breakpoints()
                objects = held_by(watching.process.pid)
                assert objects
                watching.process.kill()
                watching.process.wait()
                wait_for(lambda: text.breakpoints() == set(), "the end of the breakpoints", 20)
                wait_for(partial(gone, objects), "the end of its BPF objects", 20)
            assert target.alive
        with agent(tmp_path, "--log-root", tmp_path, command=confined(token), prefix=prefix) as watching:
            watching.await_process(OWNER)
            begun = time.monotonic()
            assert watching.terminate() == 0
            assert time.monotonic() - begun < 5
        assert text.breakpoints() == set()
        assert LINES.read_text() == lines_before
        assert target.alive
