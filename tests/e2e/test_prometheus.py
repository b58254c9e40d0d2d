"""A real Prometheus scrapes the agent: what it stores is what the agent wrote, nothing decreases, nothing stays."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.agent_process import BASE_LABELS, Agent, agent, confined, fetch, free_port
from tests.e2e.kubelet import ContainerSpec, Kubelet, Pod, wait_for
from tools import toolchains

N = 5003
NAMESPACE = "e2e-prom"
DEPLOY = Path(__file__).parents[2] / "deploy"
INTERVAL_SECONDS = 1
# The labels that a scrape job in a cluster gives its target: those of the agent's own pod.
TARGET_LABELS = {"namespace": "monitoring", "pod": "schedtrace-x2x7q", "container": "schedtrace"}
Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        status, text = fetch(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        assert status == 200, text
        return list(json.loads(text)["data"]["result"])

    def samples(self, selector: str) -> dict[Key, float]:
        """Name and labels, without those of the job -> value."""
        found = {}
        for one in self.query(selector):
            labels = {key: value for key, value in one["metric"].items() if key not in ("__name__", "job", "instance")}
            found[one["metric"]["__name__"], normal(labels)] = float(one["value"][1])
        return found

    def await_scrape(self, job: str = "honored") -> None:
        """Wait for a scrape that begins from now on."""
        begun = time.time()

        def look() -> bool:
            found = self.query(f'timestamp(up{{job="{job}"}})')
            return bool(found) and float(found[0]["value"][1]) > begun

        wait_for(look, f"a scrape of {job}")


def normal(labels: dict[str, str]) -> frozenset[tuple[str, str]]:
    """Labels without empty ones, which to Prometheus are none, and with bounds of buckets that compare."""
    return frozenset((key, str(float(value)) if key == "le" else value) for key, value in labels.items() if value != "")


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the agent in three jobs: as deploy/ says, without honor_labels, and with no labels of
    the target's."""
    (job,) = yaml.safe_load((DEPLOY / "prometheus-scrape.yml").read_text())["scrape_configs"]
    static = {"targets": [target]}
    jobs = [
        {
            "job_name": "honored",
            "honor_labels": job["honor_labels"],
            "static_configs": [static | {"labels": TARGET_LABELS}],
        },
        {"job_name": "overruled", "static_configs": [static | {"labels": TARGET_LABELS}]},
        {"job_name": "plain", "static_configs": [static]},
    ]
    config = {"global": {"scrape_interval": f"{INTERVAL_SECONDS}s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                toolchains.program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        server = Prometheus(f"http://{address}")

        def ready() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            return fetch(f"{server.url}/-/ready")[0] == 200

        wait_for(ready, "readiness of Prometheus")
        yield server
    finally:
        process.terminate()
        process.wait(20)


@dataclass(frozen=True)
class Scraped:
    """An agent, the Prometheus that scrapes it, and two pods: one that only waits, and one that restarts on and on."""

    agent: Agent
    prometheus: Prometheus
    kubelet: Kubelet
    image: str
    pod: Pod
    crashing: Pod


@pytest.fixture(scope="module")
def scraped(kubelet: Kubelet, duet_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    waiting = ContainerSpec("app", duet_image, ("-n", str(N)), cpu_cores=0.5)
    crashing = ContainerSpec("app", duet_image, ("-n", str(N), "-exit", "1", "-before", "300ms"), cpu_cores=0.2)
    with (
        agent(folder, "--log-root", kubelet.log_root, command=confined(kubelet.token)) as watching,
        prometheus(folder, watching.address) as server,
        kubelet.pod(NAMESPACE, "waits", [waiting]) as pod,
        kubelet.pod(NAMESPACE, "crashes", [crashing]) as other,
    ):
        pod["app"].talk.expect("ready")
        watching.await_process((NAMESPACE, "waits", "app", "duet"))
        pod["app"].talk.say("go")
        pod["app"].talk.expect("done")
        yield Scraped(watching, server, kubelet, duet_image, pod, other)


def test_promtool_finds_nothing_to_say(scraped: Scraped) -> None:
    status, text = scraped.agent.fetch("/metrics")
    assert status == 200
    assert len(text.splitlines()) > 100
    done = subprocess.run(
        [toolchains.program("prometheus").with_name("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_stored_is_what_was_written(scraped: Scraped) -> None:
    """Of everything that stands still while the pod does, which is nearly all."""
    selector = f'{{job="honored", namespace="{NAMESPACE}", pod="waits"}}'

    def written() -> dict[Key, float]:
        found = scraped.agent.scrape().with_labels(namespace=NAMESPACE, pod="waits")
        return {(name, normal(dict(labels))): value for (name, labels), value in found.items()}

    with scraped.pod["app"].frozen():
        first = written()
        scraped.prometheus.await_scrape()
        stored = scraped.prometheus.samples(selector)
        last = written()
    still = {key: value for key, value in last.items() if first.get(key) == value}
    assert len(still) > 80
    moved = [(name, sorted(labels), value) for (name, labels), value in last.items() if (name, labels) not in still]
    assert len(still) > 0.9 * len(last), moved
    assert {key: stored.get(key) for key in still} == still
    assert stored.keys() == last.keys()


def test_labels_of_the_watched_pod_win_only_where_they_are_honored(scraped: Scraped) -> None:
    name = "schedtrace_goroutine_transitions_total"
    ours = {"namespace": NAMESPACE, "pod": "waits", "container": "app", "process": "duet"}
    theirs = {key: ours[key] for key in TARGET_LABELS}
    for job in ("honored", "overruled", "plain"):
        scraped.prometheus.await_scrape(job)
    for job, selector, expected in (
        ("honored", ours, ours),
        ("plain", ours, ours),
        (
            "overruled",
            {f"exported_{key}": value for key, value in theirs.items()},
            TARGET_LABELS | {f"exported_{key}": value for key, value in theirs.items()} | {"process": "duet"},
        ),
    ):
        text = ", ".join(
            f'{key}="{value}"' for key, value in {"job": job, "from": "running", "to": "waiting", **selector}.items()
        )
        (found,) = scraped.prometheus.query(f"{name}{{{text}}}")
        labels = {key: value for key, value in found["metric"].items() if key.endswith(BASE_LABELS)}
        assert labels == expected, job
        assert int(found["value"][1]) >= 2 * N
    # A series that has no pod's labels takes those of the target.
    (up,) = scraped.prometheus.query('schedtrace_build_info{job="honored"}')
    assert up["metric"]["pod"] == TARGET_LABELS["pod"]


def test_no_counter_decreases_while_containers_restart(scraped: Scraped) -> None:
    for _ in range(4):
        assert scraped.crashing.wait_for_exit("app") == 1
        scraped.prometheus.await_scrape()
        scraped.crashing.restart("app")
    assert scraped.crashing.wait_for_exit("app") == 1
    scraped.prometheus.await_scrape()
    # So that every other counter of the agent is in it too, whoever's they are.
    counters = '{__name__=~"schedtrace_.*_(total|count|sum|bucket)", job="honored"}'
    found = scraped.prometheus.query(counters)
    assert len(found) > 200
    for name in {one["metric"]["__name__"] for one in found}:
        assert scraped.prometheus.query(f'resets({name}{{job="honored"}}[1h]) > 0') == []
    owner = f'namespace="{NAMESPACE}", pod="crashes", container="app", process="duet"'
    name = "schedtrace_goroutine_transitions_total"
    (made,) = scraped.prometheus.query(f'{name}{{job="honored", {owner}, from="running", to="waiting"}}')
    assert 0 < float(made["value"][1]) <= 5 * (2 * N + 12)
    (values,) = scraped.prometheus.query(f'changes({name}{{job="honored", {owner}, from="running", to="waiting"}}[1h])')
    assert float(values["value"][1]) >= 3


def test_series_are_gone_one_scrape_after_their_pod(scraped: Scraped) -> None:
    spec = ContainerSpec("app", scraped.image, ("-n", str(N)))
    selector = f'{{job="honored", namespace="{NAMESPACE}", pod="ends"}}'
    with scraped.kubelet.pod(NAMESPACE, "ends", [spec]) as pod:
        scraped.agent.await_process((NAMESPACE, "ends", "app", "duet"))
        for job in ("honored", "overruled", "plain"):
            scraped.prometheus.await_scrape(job)
        found = scraped.prometheus.query(selector)
        assert len(found) > 10, f"{sorted(scraped.agent.scrape().owners())}\n{scraped.agent.log()}"
        pod["app"].talk.expect("ready")
    # Three jobs scrape the same agent here, and the one after the pod's end shows the series for the last time.
    scraped.prometheus.await_scrape()
    scraped.prometheus.await_scrape()
    # Not in five minutes, when Prometheus gives up of itself: the series have ended for it.
    assert scraped.prometheus.query(selector) == []
    assert scraped.prometheus.query(f"count_over_time(schedtrace_threads{selector}[10m])") != []
