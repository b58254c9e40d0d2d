"""The target is unharmed: what it computes is the same with probes and without, and its code is its own again.

SCHEDTRACE_TORTURE_HITS is how many hits the torture test makes in all; 10^8 take some ten minutes. SCHEDTRACE_KILLS is
how often a session is killed; each takes as long as a session does to start.
"""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from schedtrace import tracefs
from schedtrace.attach import Watch
from tests import bpf_objects
from tests.command import COMMAND, WITHOUT_LINKS, Attach, attaching, run, without
from tests.target_text import TargetText
from tests.workload import GOLANG, Facts, Workload, binary
from tools import pgo, toolchains
from tools.cgroup import CpuLimit

TORTURE_HITS = int(os.environ.get("SCHEDTRACE_TORTURE_HITS", "2_000_000"))
HITS_A_ROUND = 10_000  # at least: a little more in the functions mode, a third more where casgstatus sees all
SECONDS_A_HIT = 50e-6  # far more than it takes
BUILDS = ("1.19", "1.21", "1.24", "1.27", "1.27 with a profile")
CASES = len(BUILDS) * 2


@cache
def torture(build: str) -> Path:
    version, _, with_profile = build.partition(" ")
    if with_profile:
        profile = pgo.scheduler_profile(version)
        return toolchains.build(version, GOLANG / "torture", out_name="torture-pgo", pgo=profile)
    return binary("torture", version)


@cache
def undisturbed(build: str, rounds: int) -> Facts:
    """What the workload says when nobody watches."""
    with Workload(torture(build), "-rounds", rounds) as target:
        return target.run(rounds * HITS_A_ROUND * SECONDS_A_HIT + 60)


@pytest.mark.parametrize("syscalls", [False, True], ids=["", "syscalls"])
@pytest.mark.parametrize("build", BUILDS)
def test_same_result_under_torture(build: str, syscalls: bool) -> None:
    share = TORTURE_HITS // CASES
    rounds = -(-share // HITS_A_ROUND)
    with (
        Workload(torture(build), "-rounds", rounds) as target,
        Watch(target.pid, syscalls=syscalls) as watch,
    ):
        text = TargetText.of(target.pid, torture(build))
        assert text.breakpoints() >= {probe.vaddr for probe in watch.plan.probes}
        facts = target.run(rounds * HITS_A_ROUND * SECONDS_A_HIT + 60)
        watch.stop()
        window = watch.window()
        watch.close()
        assert text.differences() == {}
        assert target.exit() == 0
    assert sum(probe.hits for probe in window.probes) >= share
    assert window.lost.get("inconsistent_state", 0) == 0
    if build.endswith("profile"):
        assert window.target.mode == "functions"
    expected = undisturbed(build, rounds)
    assert facts["collections"] > 0
    assert (facts["rounds"], facts["checksum"]) == (expected["rounds"], expected["checksum"])


KILLS = int(os.environ.get("SCHEDTRACE_KILLS", "8"))
ROUNDS_UNDER_KILLS = 800
SLOW_CORES = 0.05  # so that it is at work for as long as there are kills
CLEAN_SECONDS = 5.0


@dataclass
class Kills:
    """kill -9 of ``schedtrace attach`` over one target, and what was seen of each."""

    pid: int
    text: TargetText
    command: Sequence[str]
    prefix: Sequence[str] = ()
    session_seconds: float = 0.0
    killed: list[int] = field(default_factory=list)
    breakpoints_before: list[int] = field(default_factory=list)
    objects_before: list[int] = field(default_factory=list)

    def measure(self) -> None:
        """How long a session lasts of which 0.3 s are spent watching."""
        start = time.monotonic()
        done = run("attach", self.pid, "--duration", 0.3, command=self.command, prefix=self.prefix)
        assert done.returncode == 0, done
        self.session_seconds = time.monotonic() - start

    def once(self, moment: str) -> None:
        """Start, kill at that moment, and look whether all is as it was."""
        seconds = 0.3 if moment == "any time" else 20
        with attaching(self.pid, "--duration", seconds, command=self.command, prefix=self.prefix) as attach:
            self._await(moment, attach)
            breakpoints, objects = self.text.breakpoints(), bpf_objects.held_by(attach.pid)
            attach.process.kill()
            if attach.process.wait() != -signal.SIGKILL:
                return  # it had ended
        self.killed.append(attach.pid)
        self.breakpoints_before.append(len(breakpoints))
        self.objects_before.append(len(objects))
        await_true(lambda: not self.text.differences() and not bpf_objects.left(objects))

    def kill_with_children(self, attach: Attach) -> None:
        """Kill it and the child that holds the probes, the child first: it would clean up."""
        for pid in (*children(attach.pid), attach.pid):
            os.kill(pid, signal.SIGKILL)
        attach.process.wait()

    def _await(self, moment: str, attach: Attach) -> None:
        if moment == "any time":
            time.sleep(random.uniform(0, self.session_seconds))
            return
        deadline = time.monotonic() + 60
        while not self.text.differences() and attach.process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if moment == "while attaching":
            time.sleep(random.uniform(0, 0.03))
        elif moment == "while watching":
            time.sleep(random.uniform(0.03, 0.3))
        else:
            attach.process.send_signal(signal.SIGTERM)
            time.sleep(random.uniform(0, 0.3))


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CLEAN_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def killing(tmp_path: Path, command: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[Kills]:
    """A target at work under kills. At the end, what it has computed must be right."""
    program = tmp_path / "torture"  # an inode of its own: nobody else puts probes on it
    shutil.copy(torture("1.27"), program)
    expected = undisturbed("1.27", ROUNDS_UNDER_KILLS)
    with CpuLimit(SLOW_CORES) as limit, Workload(program, "-rounds", ROUNDS_UNDER_KILLS, limit=limit) as target:
        target.go()
        kills = Kills(target.pid, TargetText.of(target.pid, program), command, prefix)
        kills.measure()
        yield kills
        assert kills.text.differences() == {}
        without_limit = ("cpu.cfs_quota_us", "-1") if limit.version == 1 else ("cpu.max", "max")
        (limit.path / without_limit[0]).write_text(without_limit[1])
        facts = target.done()
        assert (facts["rounds"], facts["checksum"]) == (expected["rounds"], expected["checksum"])
        assert target.exit() == 0


def test_killed_at_random_moments(tmp_path: Path) -> None:
    moments = ("any time", "while attaching", "while watching", "while detaching")
    with killing(tmp_path, COMMAND) as kills:
        for i in range(KILLS * 2):
            kills.once(moments[i % len(moments)])
            if len(kills.killed) == KILLS:
                break
        assert len(kills.killed) == KILLS
        assert kills.objects_before.count(0) <= KILLS // 2
        assert sum(count > 0 for count in kills.breakpoints_before) >= KILLS // 3


def test_child_that_holds_the_probes_is_killed(tmp_path: Path) -> None:
    """The session holds them too: it goes on counting, and takes them out itself."""
    program = Path(shutil.copy(binary("pingpong"), tmp_path / "pingpong"))
    with Workload(program, "-n", 1009) as target, attaching(target.pid, "--json") as attach:
        text = TargetText.of(target.pid, program)
        attach.await_probes(text, 1)
        (child,) = children(attach.pid)
        os.kill(child, signal.SIGKILL)
        target.run()
        report = attach.end_json()
        assert text.differences() == {}
    rows = [row for row in report["top"] if row["function"] in ("main.ping", "main.pong")]
    assert sum(row["parks"] for row in rows) == 2 * 1009


def test_killed_when_probes_go_through_the_perf_pmu(tmp_path: Path) -> None:
    with killing(tmp_path, WITHOUT_LINKS) as kills:
        for moment in ("while attaching", "while detaching"):
            kills.once(moment)
        assert kills.breakpoints_before[0] > 0
        assert not [line for line in uprobe_events() if line_owner(line) in kills.killed]


def test_killed_when_probes_go_through_tracefs(tmp_path: Path) -> None:
    with killing(tmp_path, WITHOUT_LINKS, without("sys_admin")) as kills:
        ctypes.CDLL("libbcc.so.0")  # as a session has it in memory
        alive, dead, nobody = os.getpid(), ended_process(), 2**22
        with event_lines(
            f"p:uprobes/p_stranger_bcc_{nobody} {tmp_path}/torture:0x1000",
            f"p:uprobes/p_schedtrace_1_1_bcc_{alive} {tmp_path}/torture:0x1001",
        ):
            kills.once("while attaching")
            assert kills.breakpoints_before[0] > 0
            # The child that holds the probes has removed the lines too. Where it is killed as well, they stay ...
            with attaching(kills.pid, command=WITHOUT_LINKS, prefix=without("sys_admin")) as attach:
                attach.await_line()
                kills.kill_with_children(attach)
            await_true(lambda: not kills.text.differences())
            assert not {line_owner(line) for line in uprobe_events()} & {*kills.killed}
            # ... until somebody starts a session, who removes the lines of dead ones and nobody else's.
            with event_lines(f"p:uprobes/p_schedtrace_1_2_bcc_{dead} {tmp_path}/torture:0x1002"):
                done = run("attach", kills.pid, "--duration", 0.2, prefix=without("sys_admin"))
                assert (done.returncode, done.stderr) == (0, "")
                owners = {line_owner(line) for line in uprobe_events()}
            assert not owners & {dead, attach.pid, *kills.killed}
            assert owners >= {alive, nobody}


def ended_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def uprobe_events() -> list[str]:
    return (Path(tracefs.ensure_mounted()) / tracefs.UPROBE_EVENTS).read_text().splitlines()


def line_owner(line: str) -> int:
    """Who BCC made that line of uprobe_events for: a PID, 0 if it isn't BCC's."""
    number = line.split(" ")[0].rpartition("_bcc_")[2]
    return int(number) if number.isdigit() else 0


@contextmanager
def event_lines(*lines: str) -> Iterator[None]:
    """Lines in uprobe_events that are there for as long as the block lasts."""
    path = Path(tracefs.ensure_mounted()) / tracefs.UPROBE_EVENTS

    def write(line: str) -> None:
        # Never truncate, that removes everybody's; nor seek, as Python's own files do, which is refused.
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)

    for line in lines:
        write(line)
    try:
        yield
    finally:
        for line in lines:
            with suppress(FileNotFoundError):
                write("-:" + line.split(" ")[0].removeprefix("p:"))
