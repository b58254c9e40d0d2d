"""What is read from a program's memory against what the program itself says of its runtime, in every form of binary."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedtrace.errors import NotTraceable, PermissionDenied
from schedtrace.image import open_image
from schedtrace.passive import PassiveReader
from schedtrace.patience import Patience
from schedtrace.process_memory import Places
from schedtrace.procfs import Process, open_process
from schedtrace.runtime_histogram import RuntimeHistogram
from schedtrace.runtime_plan import RuntimePlan
from schedtrace.runtime_state import RuntimeState
from tests.runtime_plans import make_runtime_plan
from tests.unit.forms import old_extension, without_sections
from tests.workload import GOLANG, Facts, Workload, binary
from tools import pgo, toolchains

EXTERNAL = ("-linkmode", "external")
PROCS = 3  # what the workload starts with; it then changes it to two more
GOROUTINES = 131
NO_GOAL = (1 << 64) - 1
# What the runtime calls the histograms; up to Go 1.21 only one of stops, under its old name.
NAMES = {
    "stopped_gc": "/sched/pauses/total/gc:seconds",
    "stopped_other": "/sched/pauses/total/other:seconds",
    "stopping_gc": "/sched/pauses/stopping/gc:seconds",
    "stopping_other": "/sched/pauses/stopping/other:seconds",
}
OLD_NAMES = {"stopped_gc": "/gc/pauses:seconds"}

# Form -> flags as for toolchains.build.
FORMS: Mapping[str, Mapping[str, Any]] = {
    "stripped": {"strip": True},
    "pie": {"buildmode": "pie"},
    "stripped pie": {"buildmode": "pie", "strip": True},
    "cgo": {"cgo": True},
    "stripped cgo pie": {"buildmode": "pie", "cgo": True, "ldflags": EXTERNAL, "strip": True},
    "static pie": {"buildmode": "pie", "cgo": True, "ldflags": (*EXTERNAL, "-extldflags", "-static-pie")},
}


@contextmanager
def reading(
    program: Path, *arguments: object, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Workload, PassiveReader, RuntimePlan]]:
    """The introspect workload, or a copy of it, and a reader of it."""
    with Workload(program, *arguments, env=env) as target, open_process(target.pid) as process:
        plan = make_runtime_plan(process.exe_path)
        yield target, PassiveReader(process, plan, process.load_bias()), plan


def as_printed(histogram: RuntimeHistogram) -> list[int]:
    """The counts as runtime/metrics prints them: the first is of what lies below 0."""
    overflow = [histogram.overflow] if len(histogram.counts) == 160 else []
    return [histogram.underflow, *histogram.counts, *overflow]


def same_counts(ours: RuntimeHistogram, theirs: Mapping[str, Any], *, zero_may_differ: bool) -> bool:
    counts, expected = as_printed(ours), list(theirs["counts"])
    assert len(counts) == len(expected)
    if zero_may_differ:
        counts[1] = expected[1]
    return counts == expected


def check_between(ours: RuntimeHistogram, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Whatever the program did meanwhile, each bucket is one that it had at some time between the two."""
    for count, least, most in zip(as_printed(ours), before["counts"], after["counts"], strict=True):
        assert least <= count <= most
    bounds = [bound * 1e9 for bound in before["bounds_seconds"][1:-1]]
    assert bounds == pytest.approx(ours.bounds_ns[: len(bounds)], rel=1e-12)
    assert len(ours.bounds_ns) - len(bounds) == (1 if len(ours.counts) == 720 else 0)


def numbers(state: RuntimeState) -> Facts:
    return {"gomaxprocs": state.gomaxprocs, "goroutines": state.goroutines, "threads": state.threads}


def check(target: Workload, reader: PassiveReader, plan: RuntimePlan) -> RuntimeState:
    """The target's work, what is read of it then, and what it says right before and after."""
    names = NAMES if plan.minor >= 22 else OLD_NAMES
    first = reader.read()
    assert first is not None
    assert (first.gomaxprocs, first.gc_cycles) == (PROCS, 0)
    target.run()
    for _ in range(20):  # until nothing happens between the two: the runtime has work of its own
        before = target.run()
        state = reader.read()
        after = target.run()
        assert state is not None
        check_between(state.sched_latency, before["/sched/latencies:seconds"], after["/sched/latencies:seconds"])
        assert set(state.stop_the_world) == set(names)
        for ours, theirs in names.items():
            assert same_counts(state.stop_the_world[ours], before[theirs], zero_may_differ=False), ours
        settled = numbers(state) == {name: before[name] for name in numbers(state)}
        latencies = before["/sched/latencies:seconds"]
        if settled and same_counts(state.sched_latency, latencies, zero_may_differ=plan.minor <= 25):
            break
    else:
        pytest.fail(f"never the same: {state}, {before}")
    assert state.gomaxprocs == PROCS + 2
    assert state.goroutines == GOROUTINES + 1  # and main
    assert state.sched_latency.count > 500
    assert state.gc_cycles == before["/gc/cycles/total:gc-cycles"] >= 3
    assert (state.heap_goal_bytes or NO_GOAL) == before["/gc/heap/goal:bytes"]
    if plan.minor >= 26:
        # This one, unlike the thread profile, leaves out the M that waits for a thread of C's to call Go.
        assert state.threads == before["/sched/threads/total:threads"] + before["extra_ms"]
    assert state.stop_the_world["stopped_gc"].count >= 6  # two in each cycle
    if plan.minor >= 22:
        assert state.stop_the_world["stopped_other"].count >= 4
    # At rest but for main, which waits for a word, and perhaps goroutines of the runtime.
    assert [p.id for p in state.processors] == list(range(PROCS + 2))
    assert {p.state for p in state.processors} <= {"idle", "syscall" if plan.minor <= 25 else "running"}
    assert state.idle_processors >= PROCS - 1
    assert sum(p.run_queue for p in state.processors) + state.run_queue <= 2
    assert 0 < state.idle_threads < state.threads
    return state


@pytest.mark.parametrize("version", toolchains.RELEASES)
def test_every_version(version: str) -> None:
    with reading(binary("introspect", version)) as (target, reader, plan):
        assert (plan.source, plan.go_version) == ("symtab", f"go{toolchains.release(version)}")
        state = check(target, reader, plan)
        tasks = len(os.listdir(f"/proc/{target.pid}/task"))  # noqa: PTH208 (counts, makes no paths)
    assert state.threads == tasks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", ["1.19", "1.21", "1.24", "1.27"])
def test_every_form(version: str, form: str) -> None:
    with reading(binary("introspect", version, **FORMS[form])) as (target, reader, plan):
        assert plan.source == ("code" if "stripped" in form else "symtab")
        check(target, reader, plan)


@pytest.mark.parametrize("version", ["1.22", "1.23", "1.25", "1.26"])
def test_stripped(version: str) -> None:
    with reading(binary("introspect", version, strip=True)) as (target, reader, plan):
        assert (plan.source, plan.layout_source) == ("code", "table")
        check(target, reader, plan)


@pytest.mark.parametrize("version", ["1.22", "1.27"])
def test_compiled_with_a_profile(version: str) -> None:
    program = binary("introspect", version, pgo=pgo.scheduler_profile(version), strip=True)
    with reading(program) as (target, reader, plan):
        assert plan.source == "code"
        check(target, reader, plan)


def test_no_section_headers(tmp_path: Path) -> None:
    program = own_copy(tmp_path, without_sections(binary("introspect", "1.27", strip=True).read_bytes()))
    with reading(program) as (target, reader, plan):
        check(target, reader, plan)


@pytest.mark.parametrize("version", ["1.19", "1.21", "1.27"])
def test_memory_limit_and_no_collector(version: str) -> None:
    """The heap's goal that a limit sets, and that there is none."""
    for arguments, limit in ((("-gogc", -1), "16MiB"), (("-gogc", 100), "9MiB"), (("-gogc", -1), "off")):
        with reading(binary("introspect", version), *arguments, env={"GOMEMLIMIT": limit}) as (target, reader, _):
            target.run()
            goals = []
            for _ in range(5):
                printed, state = target.run()["/gc/heap/goal:bytes"], reader.read()
                assert state is not None
                goals.append((state.heap_goal_bytes, printed))
            if limit == "off":
                assert all(read is None and printed > 1 << 62 for read, printed in goals)
            else:
                # It depends on what else takes memory, and printing does.
                assert any(read == pytest.approx(printed, abs=1 << 17) for read, printed in goals), goals


@pytest.mark.parametrize("strip", [False, True], ids=["plain", "stripped"])
@pytest.mark.parametrize("version", ["1.21", "1.24", "1.27"])
def test_library_of_a_c_program(version: str, strip: bool) -> None:
    host = toolchains.compile_c(GOLANG / "cshared/host/host.c", flags=["-ldl"])
    library = binary("cshared", version, cgo=True, buildmode="c-shared", strip=strip)
    with Workload(host, library, 2003) as target, open_process(target.pid) as process:
        image = open_image(process)
        try:
            plan = make_runtime_plan(image.path)
            reader = PassiveReader(process, plan, image.load_bias)
            target.run()
            state = reader.read()
        finally:
            os.close(image.descriptor)
        assert state is not None
        assert state.gomaxprocs == target.ready["gomaxprocs"] == len(state.processors)
        # One goroutine is the C thread's that called Serve.
        assert 1 <= state.goroutines <= 3
        assert state.sched_latency.count > 100


@pytest.mark.parametrize("version", ["1.19", "1.24", "1.27"])
def test_queues_while_it_works(version: str) -> None:
    """Forty goroutines on two Ps: most wait in queues, some sleep."""
    arguments = ("-goroutines", 40, "-procs", 2, "-duration", "2s")
    states: list[RuntimeState] = []
    with reading(binary("latencies", version), *arguments) as (target, reader, _):
        target.go()
        while len(states) < 40:
            state = reader.read()
            assert state is not None
            if state.goroutines == 41:
                states.append(state)
            elif states:
                break  # the first of them end
            time.sleep(0.005)
        target.done()
    queues = sorted(sum(p.run_queue for p in state.processors) + state.run_queue for state in states)
    assert queues[len(queues) // 2] in range(10, 40 + 3)  # with goroutines of the runtime, perhaps
    assert queues[-1] <= 2 * 40  # what moves from one queue to another just then is counted in both
    assert {p.state for state in states for p in state.processors} <= {"running", "idle", "syscall", "gcstop"}
    assert states[-1].sched_latency.count > states[0].sched_latency.count


def test_go_1_17_in_python() -> None:
    """A real extension module of that version, whose layout nothing here can confirm but what is read by it."""
    program = "import ctypes, os, sys\nctypes.CDLL(sys.argv[1])\nprint(flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", program, str(old_extension("3.2.0"))]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host,
        open_process(host.pid) as process,
    ):
        assert host.stdout
        host.stdout.readline()
        image = open_image(process)
        try:
            plan = make_runtime_plan(image.path)
        finally:
            os.close(image.descriptor)
        assert (plan.go_version, plan.layout_source, plan.source) == ("go1.17.1", "table (unverified)", "code")
        reader = PassiveReader(process, plan, image.load_bias)
        states = [reader.read() for _ in range(3)]
        tasks = len(process.thread_ids())
        host.kill()
    for state in states:
        assert state is not None
        assert state.gomaxprocs == len(os.sched_getaffinity(0)) == len(state.processors)
        # Python's thread, which loaded it, is none of Go's, and an M waits for it without a thread.
        assert abs(state.threads - tasks) <= 1
        assert 1 <= state.goroutines <= 2
        assert len(state.sched_latency.counts) == 720


# --- targets that go away or become another ---


def test_target_ends_while_it_is_read() -> None:
    for delay_seconds in (0.0, 0.003, 0.02):
        with reading(binary("introspect")) as (target, reader, _):
            assert reader.read() is not None
            target.go()
            timer = threading.Timer(delay_seconds, target.kill)
            timer.start()
            while reader.read() is not None:
                pass
            timer.join()
            assert target.wait() == -signal.SIGKILL
            assert reader.read() is None


def test_target_executes_another_program() -> None:
    with Workload(binary("successor"), "-n", 1) as target, open_process(target.pid) as process:
        reader = PassiveReader(process, make_runtime_plan(process.exe_path), process.load_bias())
        assert reader.read() is not None
        target.go()
        assert target._expect("ready", 20)
        with pytest.raises(NotTraceable, match=r"has executed another program|not that of a go1\.27\.3 runtime"):
            reader.read()


def test_target_that_may_not_be_read() -> None:
    program = """
import os, sys
from schedtrace.errors import PermissionDenied
from schedtrace.passive import PassiveReader
from schedtrace.runtime_state import RuntimeState
from schedtrace.procfs import open_process
from tests.runtime_plans import make_runtime_plan
with open_process(int(sys.argv[1])) as process:
    reader = PassiveReader(process, make_runtime_plan(process.exe_path), process.load_bias())
    os.setgid(65534), os.setuid(65534)
    try:
        reader.read()
    except PermissionDenied as error:
        print(error)
"""
    with Workload(binary("introspect")) as target:
        command = [sys.executable, "-c", program, str(target.pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"process {target.pid} (introspect)" in done.stdout
    assert "CAP_SYS_PTRACE" in done.stdout
    assert PermissionDenied.exit_code == 77


# --- what is not what it seems ---

# Memory that lets whoever reads it wait: nobody answers this userfaultfd.
TRAP = """
import ctypes, fcntl, mmap, os, struct, time
descriptor = ctypes.CDLL(None).syscall(323, os.O_CLOEXEC)
fcntl.ioctl(descriptor, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))
memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(descriptor, 0xC020AA00, struct.pack("QQQQ", address, 4096, 1, 0))
print(address, flush=True)
time.sleep(60)
"""


def test_memory_that_lets_the_reader_wait() -> None:
    patience = Patience[int, list[bytes]](patience_seconds=0.3)
    before = threading.active_count()
    with subprocess.Popen([sys.executable, "-c", TRAP], stdout=subprocess.PIPE) as trap:
        try:
            assert trap.stdout
            places = Places([(int(trap.stdout.readline()), 8)])
            reads = {trap.pid: lambda: places.read(trap.pid), os.getpid(): lambda: [b""]}
            for _ in range(2):
                results = patience.call(reads)
                assert isinstance(results[trap.pid], NotTraceable)
                assert results[os.getpid()] == [b""]
                assert threading.active_count() == before + 1
        finally:
            trap.kill()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:  # the end of the process is the end of the wait
        assert time.monotonic() < deadline


def own_copy(folder: Path, image: bytes) -> Path:
    path = folder / "introspect"
    path.write_bytes(image)
    path.chmod(0o755)
    return path


def refused(process: Process, plan: RuntimePlan, load_bias: int) -> str:
    """Why there are no numbers."""
    with pytest.raises(NotTraceable) as raised:
        PassiveReader(process, plan, load_bias).read()
    return str(raised.value)


def test_addresses_that_are_wrong_give_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PAUSE_SECONDS", "_ENDING_SECONDS"):  # it is at rest
        monkeypatch.setattr(f"schedtrace.passive.{name}", 0.0)
    chance = random.Random(4)
    distances = [*range(-256, 257, 8), *(8 * chance.randrange(-8192, 8192) for _ in range(200))]
    with Workload(binary("introspect")) as target, open_process(target.pid) as process:
        plan, bias = make_runtime_plan(process.exe_path), process.load_bias()
        target.run()
        assert PassiveReader(process, plan, bias).read() is not None
        for distance in (d for d in distances if d):
            refused(process, plan, bias + distance)
        for name in ("sched_vaddr", "allp_vaddr", "gomaxprocs_vaddr", "allgs_vaddr"):
            for distance in (-64, -8, 8, 16, 24):
                refused(process, replace(plan, **{name: getattr(plan, name) + distance}), bias)
        assert "is no data of its own" in refused(process, replace(plan, sched_vaddr=plan.code_vaddr), bias)
        assert "lead nowhere" in refused(process, plan, 1 << 60) or "no data" in refused(process, plan, 1 << 60)


def test_process_that_is_no_go_program() -> None:
    plan = make_runtime_plan(str(binary("introspect")))
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        try:
            with open_process(sleeper.pid) as process:
                assert "not that of a go1.27.3 runtime" in refused(process, plan, 0)
        finally:
            sleeper.kill()


def test_counters_that_go_back() -> None:
    with reading(binary("introspect")) as (target, reader, _):
        target.run()
        state = reader.read()
        assert state is not None
        more = tuple(n + 1_000 for n in state.sched_latency.counts)
        reader._pieces = []  # else a program that has done nothing since is not looked at
        reader._last = replace(state, sched_latency=replace(state.sched_latency, counts=more))
        with pytest.raises(NotTraceable, match="its count of latencies went back"):
            reader.read()
        reader._last = replace(state, gc_cycles=(state.gc_cycles or 0) + 1_000)
        with pytest.raises(NotTraceable, match="its count of collections went back"):
            reader.read()


def test_version_that_is_a_lie(tmp_path: Path) -> None:
    """A binary that claims another version has the layout of that one, and its own code and memory contradict."""
    image = binary("introspect", "1.27", strip=True).read_bytes()
    for claimed in (b"go1.17.3", b"go1.21.3", b"go1.24.3"):
        program = own_copy(tmp_path, image.replace(b"go1.27.3", claimed))
        with Workload(program) as target, open_process(target.pid) as process, pytest.raises(NotTraceable):
            PassiveReader(process, make_runtime_plan(process.exe_path), process.load_bias()).read()
        program.unlink()
