"""``attach`` on a real terminal: what it shows at two sizes, keys, and that the terminal is given back in every end."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.command import COMMAND, attaching
from tests.pseudo_terminal import ALTERNATE_OFF, ALTERNATE_ON, PseudoTerminal
from tests.workload import Workload, binary

N = 20_011  # round trips of pingpong
WAKES = r"40,02[234]"  # by a channel: 2 * N, and as its main goroutine waits for the two others' ends
SIZES = [(80, 24), (200, 50)]
FOOT = r"^q: end   p: pause   s: sort goroutines by all waits to run$"


def command(target: Workload, *arguments: object) -> list[str]:
    return [*COMMAND, "attach", str(target.pid), "--interval", "0.2", *map(str, arguments)]


@contextmanager
def screen(target: Workload, *arguments: object, size: tuple[int, int] = (80, 24)) -> Iterator[PseudoTerminal]:
    """``attach`` on a terminal, when its screen is there."""
    with PseudoTerminal(command(target, *arguments), *size) as terminal:
        terminal.await_text(FOOT)
        assert terminal.written.count(ALTERNATE_ON) == 1
        assert ALTERNATE_OFF not in terminal.written
        assert terminal.screen.cursor.hidden
        assert terminal.modes() != terminal.modes_before
        yield terminal


def summary_of(terminal: PseudoTerminal) -> str:
    """What stands behind the screen, which must have been left for good; and the terminal is as it was."""
    assert terminal.written.count(ALTERNATE_ON) == terminal.written.count(ALTERNATE_OFF)
    assert not terminal.screen.cursor.hidden
    assert terminal.modes() == terminal.modes_before
    text = terminal.written.rpartition(ALTERNATE_OFF)[2].decode()
    assert "Traceback" not in text
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")


@pytest.mark.parametrize("size", SIZES)
def test_what_stands_on_the_screen(size: tuple[int, int]) -> None:
    with Workload(binary("pingpong"), "-n", N) as target, screen(target, size=size) as terminal:
        target.run()
        rows = terminal.await_text(rf"^channel +{WAKES} ")
        assert rows[0].startswith(f"pingpong  PID {target.pid}  go1.27")
        assert re.search(r" for [0-9.]+ (ms|s)$", rows[0])
        assert re.search(FOOT, rows[-1])
        text = "\n".join(rows)
        for pattern in (
            r"^Waits to run, up to  times +Where goroutines are",
            r"^ *[0-9.]+ (µs|ms)  +[0-9,]+  █+",
            r"^Sources of delay +count +p50",
            r"^all goroutines +[0-9,]+ ",
            r"^threads, for a CPU +[0-9,]+ ",
            r"^(not throttled|THROTTLED|no CPU controller)",
            r"^Worst goroutines seen alive, by longest wait to run",
            r" running +[0-9.]+ (µs|ms|s) ",
            r"^lost: ",
        ):
            assert re.search(pattern, text, re.MULTILINE), (pattern, text)
        assert (" runtime.g" in text, "Who waited to run most" in text) == (size[0] == 200,) * 2
        bars = re.findall(r"^ *[0-9.]+ (?:µs|ms|s)  +([0-9,]+)  ", text, re.MULTILINE)
        (everything,) = re.findall(r"^all goroutines +([0-9,]+) ", text, re.MULTILINE)
        assert sum(int(n.replace(",", "")) for n in bars) == int(everything.replace(",", ""))
        terminal.press("q")
        assert terminal.exit_code() == 0
        summary = summary_of(terminal)
    assert "\nended: interrupted\n" in summary
    assert re.search(rf"^  channel +{WAKES} ", summary, re.MULTILINE)
    assert "\nCost to the target\n" in summary


def test_the_longest_waits_are_those_of_the_goroutines_that_wait() -> None:
    """The main goroutine waits for its two others: for longer than any of them, and it is called so."""
    with Workload(binary("pingpong"), "-n", 10**9) as target, screen(target, size=(200, 50)) as terminal:
        target.go()
        terminal.await_text(r"^main.(ping|pong) ")
        terminal.press("ss")
        terminal.await_text(r"^Worst goroutines seen alive, by time in this state")
        rows = terminal.await_text(r"^runtime.main +chan receive +[0-9.]+ s ")
    start = next(i for i, row in enumerate(rows) if row.startswith("began with"))
    order = [row.split()[0] for row in rows[start + 1 : -1] if row]
    assert order.index("runtime.main") < min(order.index("main.ping"), order.index("main.pong"))


def test_keys_sort_and_pause() -> None:
    with Workload(binary("pingpong"), "-n", N) as target, screen(target) as terminal:
        terminal.press("s")
        terminal.await_text(r"^Worst goroutines seen alive, by all waits to run")
        terminal.press("\x1b[A\x1bOQ")  # an arrow and F2 are no keys of ours
        terminal.press("p")
        paused = terminal.await_text(r"  PAUSED at [0-9.]+ (ms|s)$")
        assert paused[-1].startswith("q: end   p: go on")
        target.run()
        time.sleep(0.6)  # three intervals
        assert terminal.await_text("PAUSED") == paused
        terminal.press("p")
        terminal.await_text(rf"^channel +{WAKES} ")
        assert "PAUSED" not in terminal.rows()[0]
        terminal.press("q")
        assert terminal.exit_code() == 0
        summary_of(terminal)


def test_resize() -> None:
    with Workload(binary("pingpong"), "-n", N) as target, screen(target, "--interval", 60) as terminal:
        for width, height in ((200, 50), (120, 30), (79, 24), (40, 10), (1, 1), (80, 24)):
            terminal.resize(width, height)
            if width < 40:
                time.sleep(0.3)
                continue
            foot = r"^q: end   p: pause   s: sort"
            rows = terminal.await_text(foot)
            title, last = rows[0], max(i for i, row in enumerate(rows) if row)
            if width < 80:
                assert title == f"{width}×{height}: all is shown from 80×24 on"
            else:
                assert title.startswith(f"pingpong  PID {target.pid}  go1.27")
                assert last == height - 1
            assert sum(bool(re.match(foot, row)) for row in rows) == 1  # nothing is folded, or left of the frame before
        terminal.press("q")
        assert terminal.exit_code() == 0
        summary_of(terminal)


def interrupt(terminal: PseudoTerminal, _target: Workload) -> None:
    terminal.press("\x03")


def interrupt_twice(terminal: PseudoTerminal, _target: Workload) -> None:
    terminal.press("\x03\x03")


def terminate(terminal: PseudoTerminal, _target: Workload) -> None:
    terminal.process.terminate()


def hang_up_signal(terminal: PseudoTerminal, _target: Workload) -> None:
    terminal.process.send_signal(signal.SIGHUP)


def end_target(_terminal: PseudoTerminal, target: Workload) -> None:
    target.kill()


ENDS: dict[str, tuple[Callable[[PseudoTerminal, Workload], None], str]] = {
    "Ctrl-C": (interrupt, "interrupted"),
    "Ctrl-C twice": (interrupt_twice, "interrupted"),
    "SIGTERM": (terminate, "interrupted"),
    "SIGHUP": (hang_up_signal, "interrupted"),
    "the target exits": (end_target, "the target (PID {pid}) exited"),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_gives_the_terminal_back(end: str) -> None:
    act, why = ENDS[end]
    with Workload(binary("pingpong"), "-n", N) as target, screen(target) as terminal:
        act(terminal, target)
        assert terminal.exit_code() == 0
        assert f"\nended: {why.format(pid=target.pid)}\n" in summary_of(terminal)


def test_the_duration_ends() -> None:
    with Workload(binary("hello")) as target, PseudoTerminal(command(target, "--duration", 1), 80, 24) as terminal:
        assert terminal.exit_code() == 0
        assert ALTERNATE_ON in terminal.written
        assert "\nended: the duration is over\n" in summary_of(terminal)


def test_quit_signal_kills_and_gives_the_terminal_back() -> None:
    with Workload(binary("hello")) as target, screen(target) as terminal:
        terminal.press("\x1c")  # Ctrl-\
        assert terminal.exit_code() == -signal.SIGQUIT
        assert summary_of(terminal) == ""


def test_stopped_and_gone_on() -> None:
    with Workload(binary("hello")) as target, screen(target) as terminal:
        terminal.process.send_signal(signal.SIGSTOP)  # as a shell finds it after Ctrl-Z, but with nobody to see it
        terminal.process.send_signal(signal.SIGCONT)
        terminal.await_text(FOOT)
        deadline = time.monotonic() + 30
        while terminal.written.count(ALTERNATE_ON) < 2:
            terminal.read(0.05)
            assert time.monotonic() < deadline
        terminal.press("q")
        assert terminal.exit_code() == 0
        assert terminal.modes() == terminal.modes_before


def test_the_terminal_is_gone(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with Workload(binary("pingpong"), "-n", N) as target, errors.open("wb") as file:
        with PseudoTerminal(command(target), 80, 24, errors=file.fileno()) as terminal:
            terminal.await_text(FOOT)
            terminal.hang_up()
            assert terminal.process.wait(60) == 1
        assert target.alive
    assert errors.read_text() == "schedtrace: the output can't be written: Input/output error\n"


def test_a_terminal_that_nobody_reads_holds_nobody_up() -> None:
    """Who asks several times is heard although a frame is half written, and nothing more can be."""
    with Workload(binary("hello")) as target, screen(target, size=(200, 50)) as terminal:
        time.sleep(3)  # fifteen frames, more than a terminal keeps
        for _ in range(6):
            terminal.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                terminal.process.wait(4)
                break
        assert terminal.process.returncode in (130, -signal.SIGTERM)
        assert terminal.modes() == terminal.modes_before
        assert target.alive


def test_ctrl_s_stops_nothing() -> None:
    with Workload(binary("hello")) as target, screen(target) as terminal:
        terminal.press("\x13")
        time.sleep(0.5)
        terminal.read(1)
        terminal.process.terminate()
        assert terminal.exit_code() == 0
        assert "\nended: interrupted\n" in summary_of(terminal)


FAIL = """
import sys
from schedtrace import attach, cli
from schedtrace.errors import AttachFailed
class Failing(attach.Watch):
    shown = 0
    def window(self, ended=""):
        self.shown += 1
        if self.shown == 3:
            raise AttachFailed("a map is gone")
        return super().window(ended)
attach.Watch = Failing
sys.exit(cli.main())
"""


def test_an_error_is_told_on_the_normal_screen() -> None:
    with Workload(binary("hello")) as target:
        failing = [sys.executable, "-c", FAIL, *command(target)[len(COMMAND) :]]
        with PseudoTerminal(failing, 80, 24) as terminal:
            assert terminal.exit_code() == 5
            assert ALTERNATE_ON in terminal.written
            assert summary_of(terminal) == "schedtrace: a map is gone\n"


@pytest.mark.parametrize("term", ["dumb", "unknown", None])
def test_a_dumb_terminal_gets_plain_lines(term: str | None) -> None:
    with Workload(binary("hello")) as target:
        with PseudoTerminal(command(target, "--duration", 1), 80, 24, env={"TERM": term}) as terminal:
            assert terminal.exit_code() == 0
        assert b"\x1b" not in terminal.written
        assert terminal.written.startswith(b"     time    runs/s wait p50 ")


@pytest.mark.parametrize(("no_color", "coloured"), [("1", False), (None, True)])
def test_no_color(no_color: str | None, coloured: bool) -> None:
    with (
        Workload(binary("pingpong"), "-n", N) as target,
        PseudoTerminal(command(target), 80, 24, env={"NO_COLOR": no_color}) as terminal,
    ):
        terminal.await_text(FOOT)
        target.run()
        terminal.await_text(rf"^channel +{WAKES} ")
        terminal.press("q")
        assert terminal.exit_code() == 0
        assert bool(re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.written)) == coloured


def test_a_pipe_gets_no_screen() -> None:
    """Also where colours are asked for."""
    with Workload(binary("hello")) as target:
        for env, escapes in (({}, 0), ({"FORCE_COLOR": "1"}, 1)):
            with attaching(target.pid, "--interval", 0.2, "--duration", 1, env=env) as attach:
                done = attach.end()
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.startswith("     time    runs/s wait p50 ")
            assert ("\x1b[1m" in done.stdout) == escapes
            assert "\x1b[?" not in done.stdout


def test_the_reader_of_the_lines_is_gone() -> None:
    with Workload(binary("hello")) as target, attaching(target.pid, "--interval", 0.1) as attach:
        attach.await_line()
        assert attach.process.stdout
        attach.process.stdout.close()
        assert attach.process.wait(60) == 141
        assert attach.process.stderr
        assert attach.process.stderr.read() == ""
        assert target.alive


SLOW = """
import sys, time
from schedtrace import attach, cli
open_image = attach.open_image
def slow(*arguments, **options):
    time.sleep(2.5)
    return open_image(*arguments, **options)
attach.open_image = slow
sys.exit(cli.main())
"""


def test_what_takes_long_says_so_on_a_terminal(tmp_path: Path) -> None:
    """To standard error, also while BCC has its descriptor, and the line is gone before anything else is said."""
    output = tmp_path / "output"
    with Workload(binary("hello")) as target:
        slow = [sys.executable, "-c", SLOW, "attach", str(target.pid), "--json", "--duration", "2.5"]
        shell = ["sh", "-c", 'exec "$@" >"$0"', str(output), *slow]
        with PseudoTerminal(shell, 80, 24) as terminal:
            assert terminal.exit_code() == 0
        assert json.loads(output.read_text())["target"]["pid"] == target.pid
        said = terminal.written.decode()
        assert re.search(rf"\r\x1b\[Kschedtrace: attaching to process {target.pid} … [12] s", said)
        assert re.search(rf"\r\x1b\[Kschedtrace: watching process {target.pid} … [12] s", said)
        assert terminal.rows() == [""] * 24
        piped = subprocess.run(slow, capture_output=True, check=False)
        assert (piped.returncode, piped.stderr) == (0, b"")
