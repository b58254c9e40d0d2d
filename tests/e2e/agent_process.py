"""``schedtrace agent`` as a process, and what it serves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.command import COMMAND
from tests.e2e.kubelet import TOKEN_VARIABLE, wait_for

READY_SECONDS = 90.0
Labels = tuple[str, str, str, str]
"""Namespace, pod, container, process."""
BASE_LABELS = ("namespace", "pod", "container", "process")

# The machine's other Go programs are not these tests' to slow down: the agent doesn't get to know of them.
_CONFINED = """
import errno, os, sys
from pathlib import Path
from schedtrace import cli, uprobe_multi
from schedtrace.fleet import Fleet
if not {links}:
    uprobe_multi.refusal = lambda: errno.EINVAL
mark = f"{token}".encode()
consider = Fleet._consider
def consider_ours(fleet, pid, **more):
    try:
        ours = pid in fleet._watched or mark in Path(f"/proc/{{pid}}/environ").read_bytes()
    except OSError:
        ours = False
    if ours:
        consider(fleet, pid, **more)
Fleet._consider = consider_ours
sys.exit(cli.main())
"""


def confined(token: str, *, links: bool = True) -> tuple[str, ...]:
    """The agent's command, made to see no process but those of one run of the tests; without ``links`` as on a kernel
    that has no BPF links for uprobes (before 6.6)."""
    return (sys.executable, "-c", _CONFINED.format(token=f"{TOKEN_VARIABLE}={token}", links=links))


@dataclass(frozen=True)
class Scrape:
    """The samples of one scrape: (name, labels) -> value."""

    text: str
    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in samples, f"twice in one scrape: {key}"
                samples[key] = float(sample.value)
        return cls(text, samples)

    def values(self, name: str, of: Labels | None = None, **labels: str) -> dict[frozenset[tuple[str, str]], float]:
        """Samples of that name that have those labels, by all their labels."""
        wanted = {*labels.items(), *(zip(BASE_LABELS, of, strict=True) if of else ())}
        return {own: value for (each, own), value in self.samples.items() if each == name and wanted <= own}

    def with_labels(self, **labels: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All samples that have those labels."""
        return {key: value for key, value in self.samples.items() if labels.items() <= key[1]}

    def total(self, name: str, of: Labels | None = None, **labels: str) -> float:
        """Their sum; 0 without any."""
        return sum(self.values(name, of, **labels).values())

    def value(self, name: str, of: Labels | None = None, **labels: str) -> float:
        """The one that there must be."""
        found = self.values(name, of, **labels)
        assert len(found) == 1, f"{name} {of} {labels}: {found}"
        return next(iter(found.values()))

    def of(self, owner: Labels) -> str:
        """Counts of that owner, to show."""
        labels = set(zip(BASE_LABELS, owner, strict=True))
        return "\n".join(
            f"{name} {sorted(own - labels)} {value}"
            for (name, own), value in self.samples.items()
            if labels <= own and name.endswith(("_total", "_count"))
        )

    def owners(self) -> set[Labels]:
        """Whose series there are, of whatever name."""
        found = set()
        for _, labels in self.samples:
            own = dict(labels)
            if all(name in own for name in BASE_LABELS):
                found.add((own["namespace"], own["pod"], own["container"], own["process"]))
        return found - {("", "", "", "")}


class Agent:
    """A running agent."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.address, self.process, self._errors = address, process, errors

    def log(self) -> str:
        """What it has written so far."""
        return self._errors.read_text(errors="replace")

    def fetch(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and body; status 0 if nobody answers."""
        return fetch(f"http://{self.address}{path}", headers)

    def scrape(self) -> Scrape:
        status, text = self.fetch("/metrics")
        assert status == 200, f"{status}: {text}\n{self.log()}"
        return Scrape.parse(text)

    def await_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the agent ended with {self.process.returncode}: {self.log()}"
            return self.fetch("/readyz")[0] == 200

        wait_for(ready, "readiness of the agent", READY_SECONDS)

    def await_owner(self, owner: Labels, seconds: float = 30.0) -> Scrape:
        """The first scrape with series of that owner."""
        return self._await(lambda scrape: owner in scrape.owners(), f"series of {owner}", seconds)

    def await_process(self, owner: Labels, seconds: float = 30.0) -> Scrape:
        """The first scrape in which a living process counts into that owner's series."""
        return self._await(
            lambda scrape: scrape.total("schedtrace_threads", owner) > 0, f"a process of {owner}", seconds
        )

    def _await(self, good: Callable[[Scrape], bool], what: str, seconds: float) -> Scrape:
        def look() -> Scrape | None:
            scrape = self.scrape()
            return scrape if good(scrape) else None

        try:
            return wait_for(look, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\nthere are {sorted(self.scrape().owners())}\n{self.log()}") from error

    def terminate(self, seconds: float = 20.0) -> int:
        """SIGTERM, and wait for the end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def fetch(url: str, headers: Mapping[str, str] | None = None, seconds: float = 30.0) -> tuple[int, str]:
    """Status and body of an answer; status 0 if there is none."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def agent(
    folder: Path,
    *arguments: object,
    command: Sequence[str] = COMMAND,
    prefix: Sequence[str] = (),
    await_ready: bool = True,
    max_overhead: str = "none",
) -> Iterator[Agent]:
    """An agent for as long as the block. It sees everything unless ``max_overhead`` says otherwise."""
    address = f"127.0.0.1:{free_port()}"
    errors = folder / f"agent-{time.monotonic_ns()}.log"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [
                *(*prefix, *command, "agent", "--listen", address),
                *("--max-overhead", max_overhead, *map(str, arguments)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        one = Agent(address, process, errors)
        if await_ready:
            one.await_ready()
        yield one
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
