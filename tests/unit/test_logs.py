"""The log: lines to the letter, and how few of them there are."""

import io
import json
import subprocess
import sys
import threading

import pytest

from schedtrace.logs import LINES_PER_KIND, PERIOD_SECONDS, EventLog

# 2026-11-30 08:09:10.250 UTC
NOW = 1796026150.25


class Log:
    """An event log over a clock that stands still."""

    def __init__(self, **options: bool) -> None:
        self.stream = io.StringIO()
        self.seconds = 50.0
        self.events = EventLog(self.stream, clock=lambda: self.seconds, now=lambda: NOW, **options)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_a_line_of_text() -> None:
    made = Log()
    made.events.info("started", "watching", listen="127.0.0.1:9755", pods=3, share=0.5, tls=False, pod=None)
    made.events.warning("attach_failed", "not a Go program", exe="/a b", name='q"\n', empty="")
    made.events.error("scrape_failed", "no map")
    assert made.lines == [
        "2026-11-30T08:09:10.250Z info    started: watching listen=127.0.0.1:9755 pods=3 share=0.5 tls=no pod=none",
        '2026-11-30T08:09:10.250Z warning attach_failed: not a Go program exe="/a b" name="q\\"\\n" empty=""',
        "2026-11-30T08:09:10.250Z error   scrape_failed: no map",
    ]


def test_a_line_of_json() -> None:
    made = Log(as_json=True)
    made.events.warning("attach_failed", "process 7 (é\n) has exited", pid=7, exe="a\udc80", pod=None)
    (line,) = made.lines
    assert json.loads(line) == {
        "time": "2026-11-30T08:09:10.250Z",
        "level": "warning",
        "event": "attach_failed",
        "message": "process 7 (é\n) has exited",
        "pid": 7,
        "exe": "a\udc80",
        "pod": None,
    }
    assert line.isascii()


@pytest.mark.parametrize("as_json", [True, False])
def test_hostile_text_stays_on_one_printable_line(as_json: bool) -> None:
    made = Log(as_json=as_json)
    hostile = "a\nb\r\x1b[2J\x00\u2028\x85\udc80\U000e0001 2026-11-30T00:00:00.000Z error   forged: x"
    made.events.info("started", hostile, exe=hostile)
    text = made.stream.getvalue()
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    text.encode()


def test_one_kind_fills_few_lines_and_the_rest_is_counted() -> None:
    made = Log()
    for number in range(5000):
        made.events.warning("attach_failed", f"process {number}")
    made.events.info("started", "another kind is not held back")
    assert len(made.lines) == LINES_PER_KIND + 1
    made.seconds += PERIOD_SECONDS - 0.1
    made.events.tick()
    assert len(made.lines) == LINES_PER_KIND + 1
    made.seconds += 0.1
    made.events.tick()
    assert made.lines[-1].endswith(
        "Z warning attach_failed: 4990 more like the last 10 were not written suppressed=4990"
    )
    made.events.warning("attach_failed", "process 5000")
    assert made.lines[-1].endswith("attach_failed: process 5000")
    made.events.close()
    assert len(made.lines) == LINES_PER_KIND + 3


def test_counts_are_said_before_the_next_event_and_at_the_end() -> None:
    made = Log(as_json=True)
    for _ in range(12):
        made.events.info("pod_named", "x")
    made.seconds += 2 * PERIOD_SECONDS
    made.events.info("other", "y")
    for _ in range(11):
        made.events.error("scrape_failed", "z")
    made.events.close()
    told = [json.loads(line) for line in made.lines]
    assert [(e["event"], e["level"], e["suppressed"]) for e in told if "suppressed" in e] == [
        ("pod_named", "info", 2),
        ("scrape_failed", "error", 1),
    ]
    assert [e["event"] for e in told].index("other") == 11
    made.events.close()
    assert len(made.lines) == len(told)


def test_an_hour_of_a_full_node_is_bounded() -> None:
    made = Log()
    for _ in range(3600):
        made.seconds += 1
        for _ in range(20):
            made.events.warning("attach_failed", "stripped")
    assert len(made.lines) <= (LINES_PER_KIND + 1) * 60 + LINES_PER_KIND
    said = sum(int(line.rpartition("=")[2]) for line in made.lines if "suppressed=" in line)
    made.events.close()
    (last,) = made.lines[-1:]
    told = sum("suppressed=" not in line for line in made.lines)
    assert said + int(last.rpartition("=")[2]) + told == 3600 * 20


def test_threads_do_not_mix_their_lines() -> None:
    stream = io.StringIO()
    events = EventLog(stream, lines_per_kind=10**6)

    def write(kind: str) -> None:
        for number in range(200):
            events.info(kind, "x" * 200, number=number)

    threads = [threading.Thread(target=write, args=(f"kind_{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1600
    assert all(line.count("xxx ") == line.count(" kind_") == 1 for line in lines)


def test_a_stream_that_fails_is_survived() -> None:
    program = (
        "import os, sys; from schedtrace.logs import EventLog; os.close(2); log = EventLog(sys.stderr);"
        "log.info('started', 'x'); sys.stdout.close(); log = EventLog(sys.stdout); log.info('started', 'x');"
        "log = EventLog(open('/dev/full', 'w')); log.error('started', 'x'); log.close(); os._exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")
