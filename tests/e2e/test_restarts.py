"""The agent is killed and started again under load: targets go on unharmed, nothing of it stays, its counts resume."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.bpf_objects import Objects, held_by, left
from tests.command import without
from tests.e2e.agent_process import Labels, agent, confined
from tests.e2e.kubelet import TOKEN_VARIABLE, new_token, wait_for
from tests.target_text import TargetText
from tests.workload import Workload, binary

RESTARTS = 4  # in five ways: twenty in all
PROGRAM = "restarted"
OWNER: Labels = ("", "", "", PROGRAM)
TRANSITIONS = "schedtrace_goroutine_transitions_total"
LINES = Path("/sys/kernel/tracing/uprobe_events")
# All that root has but the three capabilities that the agent needs.
THREE = ["setpriv", "--inh-caps=-all", "--bounding-set=-all,+bpf,+perfmon,+sys_ptrace"]


def gone(objects: Objects) -> bool:
    return not left(objects)


@contextmanager
def line_of_another(program: Path) -> Iterator[str]:
    """A probe that somebody else has in uprobe_events; its line there."""
    name = f"uprobes/p_other_{program.stat().st_ino:x}"
    descriptor = os.open(LINES, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, f"p:{name} {program}:0x10\n".encode())
    try:
        yield next(line for line in LINES.read_text().splitlines() if name in line)
    finally:
        os.write(descriptor, f"-:{name}\n".encode())
        os.close(descriptor)


def lines() -> set[str]:
    return set(LINES.read_text().splitlines())


WAYS = {"root": ([], True), "without-SYS_ADMIN": (without("sys_admin"), True), "three": (THREE, True)}
# Before there were links: perf's PMU, and with the capabilities only, tracefs.
WAYS |= {"perf": ([], False), "tracefs": (without("sys_admin"), False)}


@pytest.mark.parametrize(("prefix", "links"), WAYS.values(), ids=WAYS)
def test_killed_and_started_again(tmp_path: Path, prefix: Sequence[str], links: bool) -> None:
    program = tmp_path / PROGRAM
    shutil.copy(binary("pingpong"), program)
    token = new_token()
    command = confined(token, links=links)
    uses_lines = not links and bool(prefix)
    (tmp_path / "containers").mkdir()
    with line_of_another(program) as other, Workload(program, "-n", 10**9, env={TOKEN_VARIABLE: token}) as target:
        lines_before = lines()
        target.go()
        text = TargetText.of(target.pid, program)
        for _ in range(RESTARTS):
            with agent(tmp_path, "--log-root", tmp_path, command=command, prefix=prefix) as watching:
                watching.await_process(OWNER)
                first = watching.scrape().total(TRANSITIONS, OWNER)
                time.sleep(0.1)
                assert watching.scrape().total(TRANSITIONS, OWNER) > first
                assert text.breakpoints()
                assert (lines() > lines_before) == uses_lines
                objects = held_by(watching.process.pid)
                assert objects
                watching.process.kill()
                watching.process.wait()
                wait_for(lambda: text.breakpoints() == set(), "the end of the breakpoints", 20)
                wait_for(partial(gone, objects), "the end of its BPF objects", 20)
            assert target.alive
        with agent(tmp_path, "--log-root", tmp_path, command=command, prefix=prefix) as watching:
            watching.await_process(OWNER)
            begun = time.monotonic()
            assert watching.terminate() == 0
            assert time.monotonic() - begun < 5
        assert text.breakpoints() == set()
        assert lines() == lines_before
        assert other in lines()
        assert target.alive
