"""The agent while processes come and go: `python -m bench.agent_churn [MINUTES]`, 10 if not given.

A thousand processes are started a minute, every other one a Go program that is selected, in pods that stay. Each of
those waits a moment, makes a known number of round trips between two goroutines, and ends. Most run one of a few
executables; now and then one is new, as with a new image. In the end every wait of every process must be in the
series of its pod, but for those that the agent itself says it hasn't timed.
"""

import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.agents import MeasuredAgent, agent, anonymous_mb, open_files
from bench.measurement import BenchError, print_conditions, print_limit, print_table, process_cpu_ns
from bench.pods import Pods, enter, pods
from tests.workload import Workload, binary

MINUTES = 10.0
STARTS_PER_MINUTE = 1000
PODS = 20
EXECUTABLES = 10
NEW_EXECUTABLE_EVERY = 50
"""Go processes."""
ROUND_TRIPS = 500
WAITS = 2 * ROUND_TRIPS
IDLE_SECONDS = 1.5
"""From a process's start to its work: on a shared machine nothing may run for half a second."""
SAMPLE_SECONDS = 5.0
SETTLE_SECONDS = 13.0
"""Before and after, until probes are out and the children that read executables have ended."""
READERS_FILES = 4
"""Of the agent for those children: one may be there again, since others execute programs on this machine, too."""
LOG_LINES_PER_MINUTE = 60.0
_SAMPLE = re.compile(r"(\w+)\{(.*)\} ([-+.e0-9]+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class _Sample:
    agent_files: int
    keeper_files: int
    memory_mb: float


@dataclass
class _Churn:
    """What has been started, and what runs. ``started``: Go processes by pod and process name."""

    folder: Path
    made: Pods
    started: Counter[tuple[str, str]] = field(default_factory=Counter)
    others: int = 0
    late_seconds: float = 0.0
    running: deque[tuple[float, ExitStack, Workload]] = field(default_factory=deque)
    shells: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._program = binary("duet")
        self._copies = [self._copy(f"{self.folder.name}-{i}", "first") for i in range(EXECUTABLES)]

    def _copy(self, name: str, place: str) -> Path:
        (self.folder / place).mkdir(exist_ok=True)
        return Path(shutil.copy(self._program, self.folder / place / name))

    def start_go(self) -> None:
        """One more, which begins its work :data:`IDLE_SECONDS` from now."""
        number = self.started.total()
        program = self._copies[number % EXECUTABLES]
        if number % NEW_EXECUTABLE_EVERY == NEW_EXECUTABLE_EVERY - 1:  # another file of the same name
            program = self._copies[number % EXECUTABLES] = self._copy(program.name, f"new-{number}")
        pod = number % PODS
        shell, *arguments = enter(self.made.cgroups[pod], [program, "-n", str(ROUND_TRIPS)])
        stack = ExitStack()
        workload = stack.enter_context(Workload(Path(shell), *arguments))
        self.started[self.made.names[pod], program.name] += 1
        self.running.append((time.monotonic() + IDLE_SECONDS, stack, workload))

    def start_other(self) -> None:
        """One more that isn't Go."""
        self.shells = [shell for shell in self.shells if shell.poll() is None]
        self.shells.append(subprocess.Popen(["/bin/true"]))
        self.others += 1

    def work(self, now: float) -> None:
        """Have those work, and end, whose time has come."""
        while self.running and self.running[0][0] <= now:
            _, stack, workload = self.running.popleft()
            with stack:
                if workload.run()["parks"] != WAITS:
                    raise BenchError("a process did another number of waits than it should have done")
                workload.exit()

    def close(self) -> None:
        """End what still runs."""
        while self.running:
            self.running.popleft()[1].close()

    def run(self, one: MeasuredAgent, minutes: float) -> list[_Sample]:
        """Start processes for so long and watch the agent meanwhile."""
        samples = []
        keeper = one.keeper()
        begin = time.monotonic()
        next_start, next_sample = begin, begin + SAMPLE_SECONDS
        while (now := time.monotonic()) < begin + minutes * 60:
            if now >= next_start:
                self.late_seconds = max(self.late_seconds, now - next_start)
                self.start_other() if (self.started.total() + self.others) % 2 else self.start_go()
                next_start += 60 / STARTS_PER_MINUTE
            self.work(now)
            if now >= next_sample:
                samples.append(_Sample(open_files(one.pid), open_files(keeper), anonymous_mb(one.pid)))
                next_sample += SAMPLE_SECONDS
            time.sleep(max(min(next_start, next_sample) - time.monotonic(), 0))
        while self.running:
            self.work(time.monotonic())
            time.sleep(0.01)
        for shell in self.shells:
            shell.wait()
        return samples


def _series(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    found = (_SAMPLE.fullmatch(line) for line in text.splitlines() if line.startswith(name + "{"))
    return [(dict(_LABEL.findall(match[2])), float(match[3])) for match in found if match]


def _by_series(text: str, name: str, label: str, values: set[str]) -> Counter[tuple[str, str]]:
    """Sums by pod and process name, of samples with one of these values of a label."""
    sums = Counter[tuple[str, str]]()
    for labels, value in _series(text, name):
        if labels[label] in values:
            sums[labels["pod"], labels["process"]] += int(value)
    return sums


def _account(started: Counter[tuple[str, str]], text: str) -> tuple[int, int, int]:
    """Waits that were neither counted nor said to be left out, waits left out, and series that hold too many or lack
    more than one wait a process: its first may begin before the agent looks."""
    counted = _by_series(
        text, "schedtrace_goroutine_wait_seconds_count", "reason", {"chan send", "chan receive"}
    )
    left_out = _by_series(text, "schedtrace_lost_total", "reason", {"interval_began_before_window"})
    missing = unexplained = wrong = 0
    for key, processes in started.items():
        lacking = processes * WAITS - counted[key]
        missing += max(lacking, 0)
        unexplained += max(lacking - left_out[key], 0)
        wrong += not 0 <= lacking <= processes
    return unexplained, missing, wrong


def _flat(samples: list[float]) -> float:
    """How much more there is in the last third than in the second, by their medians: the first is for warming up."""
    third = len(samples) // 3
    return statistics.median(samples[-third:]) - statistics.median(samples[third : 2 * third])


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES
    print(f"{STARTS_PER_MINUTE} process starts a minute, for {minutes:g} min\n")
    print_conditions()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="schedtrace-bench-")))
        made = stack.enter_context(pods(PODS))
        churn = _Churn(folder, made)
        stack.callback(churn.close)
        selected: list[str | Path] = ["--log-root", made.log_root, "--select", f"bench/*/*/{folder.name}-*"]
        one = stack.enter_context(agent(folder, selected))
        time.sleep(SETTLE_SECONDS)
        files, cpu_ns, began = open_files(one.pid), process_cpu_ns(one.pid), time.monotonic_ns()
        keeper_files = open_files(one.keeper())
        samples = churn.run(one, minutes)
        cpu = (process_cpu_ns(one.pid) - cpu_ns) / (time.monotonic_ns() - began)
        time.sleep(SETTLE_SECONDS)
        text = one.get("/metrics")
        left_files, left_keeper_files = open_files(one.pid), open_files(one.keeper())
        lines = one.log.read_text(errors="replace").splitlines()
        one.stop()
    starts = churn.started.total()
    unexplained, missing, wrong = _account(churn.started, text)
    lost = {
        labels["reason"]: int(value)
        for labels, value in _series(text, "schedtrace_lost_total")
        if not labels["process"]
    }
    failures = {labels["reason"]: int(value) for labels, value in _series(text, "schedtrace_attach_failures_total")}
    print_table(
        ["at", "files", "keeper's files", "MB"],
        [
            [f"{i * SAMPLE_SECONDS:.0f} s", str(each.agent_files), str(each.keeper_files), f"{each.memory_mb:.1f}"]
            for i, each in enumerate(samples, 1)
            if i % max(len(samples) // 10, 1) == 0
        ],
    )
    print(
        f"{starts} Go processes with {WAITS} waits each, {churn.others} others; the latest start was "
        f"{churn.late_seconds:.2f} s late\n{missing} waits not timed; attach failures {failures}; "
        f"lost {lost}; {cpu * 100:.1f} % of a CPU; {len(lines)} lines of log"
    )
    print_limit("starts a minute", (starts + churn.others) / minutes, STARTS_PER_MINUTE * 0.98, at_least=True)
    print_limit("waits missed that no counter tells of", unexplained, 0)
    print_limit("series with a wrong number of waits", wrong, 0)
    print_limit("file descriptors: growth", _flat([each.agent_files for each in samples]), 8)
    print_limit("file descriptors: left over", left_files - files, READERS_FILES)
    print_limit("file descriptors of the child that holds probes: left over", left_keeper_files - keeper_files, 0)
    print_limit("anonymous memory: growth", _flat([each.memory_mb for each in samples]), 1.0, unit=" MB")
    print_limit("lines of log a minute", len(lines) / minutes, LOG_LINES_PER_MINUTE)


if __name__ == "__main__":
    main()
