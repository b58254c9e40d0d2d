"""Windows end by themselves, and at once when a target hits its probes too often; what they counted fits together."""

import ctypes
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedtrace import join, target, uprobe_multi
from schedtrace.calibrate import CodePage
from schedtrace.compilation import Compilation, Sizes
from schedtrace.join import Counts
from schedtrace.plan import ProbePlan, make_plan
from schedtrace.probe_keeper import Way
from schedtrace.procfs import open_process
from schedtrace.session import Session, Snapshot, Window
from schedtrace.symbols.binary import Binary
from tests.target_text import BREAKPOINTS, TargetText
from tests.workload import Workload, binary

SECOND = 1_000_000_000
ENDLESS = 10**9  # round trips
LIMIT = 2_000  # hits
AFTER_SECONDS = 5.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of its own inode, which nobody else puts probes on."""
    return Path(shutil.copy(binary("pingpong"), tmp_path_factory.mktemp("program")))


@pytest.fixture(scope="module")
def plan(program: Path) -> ProbePlan:
    return make_plan(str(program))


@pytest.fixture(scope="module")
def session(plan: ProbePlan) -> Iterator[Session]:
    with Session(Compilation(Sizes(targets=4)), target.programs_of(plan)) as session:
        yield session


def open_window(
    session: Session, plan: ProbePlan, duration_ns: int, workloads: dict[Workload, int], confined: bool = False
) -> Window:
    """A window in which workloads are counted, each up to so many hits."""
    first = next(iter(workloads))
    with open_process(first.pid) as process:
        executable_fd = process.open_executable()
    pid = (first.pid,) if confined else ()
    try:
        window = session.open_window(executable_fd, target.sites_of(plan), duration_ns, *pid)
    finally:
        os.close(executable_fd)
    for workload, limit in workloads.items():
        with open_process(workload.pid) as process:
            session.watch(workload.pid, target.record_of(plan, process.load_bias()), window, limit)
    return window


def closed(session: Session, window: Window) -> None:
    """Wait until its probes are out."""
    deadline = time.monotonic() + AFTER_SECONDS
    while window.number in session.probed_windows():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def counts(plan: ProbePlan, snapshot: Snapshot) -> Counts:
    return join.counts(snapshot, target.reasons_of(plan), None)


def check(counted: Counts, goroutines: int) -> None:
    """What goes into a state comes out of it, but for what was under way at the window's ends."""
    moves = counted.transitions
    entered = {state: sum(n for (_, to), n in moves.items() if to == state) for state in ("runnable", "waiting")}
    left = {state: sum(n for (since, _), n in moves.items() if since == state) for state in ("runnable", "waiting")}
    for state in entered:
        assert abs(entered[state] - left[state]) <= goroutines, (state, moves)
    runs = moves["runnable", "running"]
    began_before = counted.lost.get("interval_began_before_window", 0)
    assert 0 <= runs - sum(histogram.count for histogram in counted.sched_latency.values()) <= began_before
    assert counted.lost.get("inconsistent_state", 0) == 0


def test_ends_by_itself(session: Session, plan: ProbePlan, program: Path) -> None:
    with Workload(program, "-n", ENDLESS) as load:
        text = TargetText.of(load.pid, program)
        load.go()
        for confined in (False, True):
            window = open_window(session, plan, SECOND // 5, {load: 10**9}, confined=confined)
            assert text.breakpoints()
            closed(session, window)
            assert text.differences() == {}
            assert session.end_of(window) == window.until_ns
            counted = session.retire([load.pid])[load.pid]
            assert 0.1 * SECOND < counted.seen_ns <= 0.2 * SECOND
            assert counted.time_ns == window.until_ns
            check(counts(plan, counted), len(counted.goroutines))
            time.sleep(0.2)
            assert session._foreign_hits() == session._foreign_before  # nobody hits anything any more
            session.free_window(window)
            assert session.room == 4


@pytest.mark.parametrize("way", ["link", "perf", "line"])
def test_the_anchor_is_in_before_all_others_and_out_after_them(
    way: Way, session: Session, plan: ProbePlan, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a breakpoint that a thread has just come to when it is taken out could kill its process."""
    monkeypatch.setattr(Session, "_way", lambda *_: way)
    with Workload(program, "-n", ENDLESS) as load, program.open("rb") as file, Binary.open(program) as elf:
        text, anchor = TargetText.of(load.pid, program), elf.vaddr_at(plan.anchor)
        others = [probe.vaddr for probe in plan.probes]
        for _ in range(3):
            looks: list[tuple[bool, bool]] = []
            done = threading.Event()
            looker = threading.Thread(target=_look, args=(load.pid, anchor, others, looks, done))
            looker.start()
            attachment = session.attach(file.fileno(), target.sites_of(plan))
            assert text.breakpoints() == {anchor, *others}
            session.detach([attachment])
            done.set()
            looker.join()
            assert text.differences() == {}
            assert (False, True) not in looks
            assert (True, False) in looks[last_index(looks, (True, True)) :]


def _look(pid: int, anchor: int, others: list[int], looks: list[tuple[bool, bool]], done: threading.Event) -> None:
    """Add to ``looks`` whether there is the anchor, and whether there is any other."""
    breakpoint_bytes = BREAKPOINTS[os.uname().machine]

    def is_in(address: int) -> bool:
        return os.pread(memory.fileno(), len(breakpoint_bytes), address) == breakpoint_bytes

    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        while not done.is_set():
            before, other = is_in(anchor), any(map(is_in, others))
            looks.append((before or is_in(anchor), other))


def last_index(values: list[tuple[bool, bool]], value: tuple[bool, bool]) -> int:
    return len(values) - 1 - values[::-1].index(value)


def test_nothing_is_left_of_a_window_in_the_next(session: Session, plan: ProbePlan, program: Path) -> None:
    """An interval from one into the other would be one of a second."""
    with Workload(program, "-n", ENDLESS) as load:
        load.go()
        for _ in range(2):
            window = open_window(session, plan, SECOND // 5, {load: 10**9})
            closed(session, window)
            snapshot = session.retire([load.pid])[load.pid]
            session.free_window(window)
            counted = counts(plan, snapshot)
            assert all(histogram.max_ns <= snapshot.seen_ns for histogram in counted.wait.values())
            running = [time.time_ns for time in counted.states if time.state == "running"]
            assert 0 < sum(running) <= 2 * snapshot.seen_ns
            assert not len(session._goroutines()[0])
            time.sleep(0.5)


def test_storm(session: Session, plan: ProbePlan, program: Path) -> None:
    """From idle to as many transitions as there can be, on all CPUs."""
    with Workload(program, "-n", ENDLESS, "-procs", os.cpu_count()) as load:
        text = TargetText.of(load.pid, program)
        window = open_window(session, plan, 20 * SECOND, {load: LIMIT})
        time.sleep(0.3)
        load.go()
        closed(session, window)
        assert text.differences() == {}
        snapshot = session.retire([load.pid])[load.pid]
        assert session.end_of(window) < window.until_ns
        assert snapshot.time_ns == session.end_of(window)
        session.free_window(window)
    counted = counts(plan, snapshot)
    check(counted, len(snapshot.goroutines))
    overshoot = 15 * (os.cpu_count() or 1) * sum(n > 0 for n in counted.hits)
    assert LIMIT - overshoot <= sum(counted.transitions.values()) <= LIMIT + overshoot


def test_storm_while_nobody_looks(session: Session, plan: ProbePlan, program: Path) -> None:
    """This process stands still meanwhile, as one whose interpreter is busy: the child takes the probes out."""
    with Workload(program, "-n", ENDLESS) as load:
        text = TargetText.of(load.pid, program)
        window = open_window(session, plan, 20 * SECOND, {load: LIMIT})
        load.go()
        time.sleep(1)
        assert text.differences() == {}
        closed(session, window)
        session.retire([load.pid])
        session.free_window(window)


def test_one_storm_ends_the_window_for_all(session: Session, plan: ProbePlan, program: Path) -> None:
    with Workload(program, "-n", ENDLESS) as calm, Workload(program, "-n", ENDLESS) as wild:
        window = open_window(session, plan, 20 * SECOND, {calm: 10**9, wild: LIMIT})
        time.sleep(0.2)
        wild.go()
        closed(session, window)
        snapshots = session.retire([calm.pid, wild.pid])
        assert snapshots[calm.pid].time_ns == snapshots[wild.pid].time_ns < window.until_ns
        for load in (calm, wild):
            assert TargetText.of(load.pid, program).differences() == {}
        session.free_window(window)


def test_window_is_ended_by_us(session: Session, plan: ProbePlan, program: Path) -> None:
    with Workload(program, "-n", ENDLESS) as load:
        load.go()
        window = open_window(session, plan, 20 * SECOND, {load: 10**9})
        time.sleep(0.1)
        session.end_windows([window])
        closed(session, window)
        snapshot = session.retire([load.pid])[load.pid]
        session.free_window(window)
        assert 0.05 * SECOND < snapshot.seen_ns < 2 * SECOND
        assert TargetText.of(load.pid, program).differences() == {}


def test_window_ends_with_its_session(plan: ProbePlan, program: Path) -> None:
    with Workload(program, "-n", ENDLESS) as load:
        with Session(Compilation(Sizes(targets=4)), target.programs_of(plan)) as session:
            open_window(session, plan, 20 * SECOND, {load: 10**9})
            assert TargetText.of(load.pid, program).breakpoints()
        assert TargetText.of(load.pid, program).differences() == {}


def test_what_a_program_returns_takes_no_breakpoint_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a storm needs the child: on kernels before 6.13 a link's program could return 1 (UPROBE_HANDLER_REMOVE)."""
    monkeypatch.setattr(uprobe_multi, "_RETURN_ZERO", struct.pack("<QQ", 0x1_0000_00B7, 0x95))
    size = len(BREAKPOINTS[os.uname().machine])
    with CodePage() as page:
        program = uprobe_multi.load_empty_program(uprobe_multi.ATTACH_TYPE)
        link = uprobe_multi.attach(program, f"/proc/self/fd/{page.fd}", page.emulated[:1])
        page.pass_sites(10)
        text = ctypes.string_at(page._address + page.emulated[0], size)
        os.close(link)
        os.close(program)
    assert text == BREAKPOINTS[os.uname().machine]
