"""What a hit means depends on the target's own list of probes: on a page of code in this process."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import pytest

from schedtrace import abi
from schedtrace.abi import GoroutineState, LostReason, ProbeKind
from schedtrace.bpf_text import all_programs, program_of
from schedtrace.calibrate import CASGSTATUS, FUNCTIONS, CodePage, Kinds
from schedtrace.compilation import Compilation
from schedtrace.errors import AttachFailed
from schedtrace.session import ProbeSite, Session, Snapshot

LOOPS = 101
INJECT_LIMIT = 256  # bpf/types.h
G_BYTES = 64
RUNNABLE, RUNNING, WAITING = GoroutineState.RUNNABLE, GoroutineState.RUNNING, GoroutineState.WAITING
CYCLE = {(RUNNING, WAITING): LOOPS, (WAITING, RUNNABLE): LOOPS, (RUNNABLE, RUNNING): LOOPS}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """With all programs, though the compilation has begun without."""
    with Compilation() as compilation, Session(compilation, all_programs()) as session:
        yield session


@contextmanager
def probed_page(session: Session, kinds: Sequence[ProbeKind | None]) -> Iterator[CodePage]:
    """A page with probes of these kinds on its sites. If the kernel refuses, another: it remembers files that are gone,
    whose probes it could not take out when their owner was killed, and takes a new one for such a file."""
    with ExitStack() as stack:
        for attempt in range(5):
            page = stack.enter_context(CodePage())
            sites = zip(kinds, page.emulated, strict=True)
            with suppress(AttachFailed) if attempt < 4 else nullcontext():
                session.attach(page.fd, [ProbeSite(program_of(kind), site) for kind, site in sites if kind])
                break
        yield page


def run(session: Session, page: CodePage, record: abi.Target) -> Snapshot:
    """What is seen of this process while it passes the sites :data:`LOOPS` times."""
    session.watch(os.getpid(), record)
    page.pass_sites(LOOPS)
    return end(session, os.getpid())


def end(session: Session, pid: int) -> Snapshot:
    session.unwatch(pid)
    snapshot = session.snapshot(pid)
    session.retire([pid])
    return snapshot


def transitions(snapshot: Snapshot) -> dict[tuple[int, int], int]:
    counts = snapshot.stats["transitions"].reshape(GoroutineState.COUNT, GoroutineState.COUNT)
    return {(int(old), int(new)): int(counts[old, new]) for old, new in zip(*counts.nonzero(), strict=True)}


def lost(snapshot: Snapshot) -> dict[LostReason, int]:
    counts = snapshot.stats["lost"]
    not_of_probes = (LostReason.COUNT, LostReason.BEGAN_BEFORE, LostReason.SWITCH_UNSEEN)
    return {reason: int(counts[reason]) for reason in LostReason if reason not in not_of_probes and counts[reason]}


@pytest.mark.parametrize("kinds", [CASGSTATUS, FUNCTIONS], ids=["casgstatus", "functions"])
def test_three_moves(session: Session, kinds: Kinds) -> None:
    with probed_page(session, kinds) as page:
        snapshot = run(session, page, page.target(page.emulated, kinds))
        assert list(snapshot.stats["hits"][:4]) == [LOOPS, LOOPS, LOOPS, 0]
        assert (transitions(snapshot), lost(snapshot)) == (CYCLE, {})


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_a_hit_at_an_address_that_is_not_known_is_counted_as_lost(session: Session, unknown: int) -> None:
    with probed_page(session, CASGSTATUS) as page:
        record = page.target(page.emulated, CASGSTATUS)
        record.sites[unknown] += 1
        snapshot = run(session, page, record)
        missing = [(RUNNING, WAITING), (WAITING, RUNNABLE), (RUNNABLE, RUNNING)][unknown]
        assert transitions(snapshot) == {move: count for move, count in CYCLE.items() if move != missing}
        assert lost(snapshot)[LostReason.PROBE_UNKNOWN] == LOOPS
        assert snapshot.stats["hits"][abi.SITE_LIMIT - 1] == LOOPS


def test_as_many_probes_as_there_can_be(session: Session) -> None:
    """The last of them is found, and an address that is none of them is not taken for it."""
    with probed_page(session, CASGSTATUS) as page:
        record = page.target(page.emulated, CASGSTATUS)
        first = record.sites[0]
        last = abi.SITE_LIMIT - 2
        for i in range(last):
            record.sites[i], record.kinds[i] = 1 + i, ProbeKind.EXIT
        record.sites[last], record.kinds[last] = first, ProbeKind.CASGSTATUS
        snapshot = run(session, page, record)
        assert transitions(snapshot) == {(RUNNING, WAITING): LOOPS}
        assert snapshot.stats["hits"][last] == LOOPS
        assert lost(snapshot)[LostReason.PROBE_UNKNOWN] == 2 * LOOPS


def test_two_processes_of_one_file_may_have_different_plans(session: Session) -> None:
    with probed_page(session, CASGSTATUS) as page:
        go, wait = os.pipe2(os.O_CLOEXEC)[::-1]
        child = os.fork()
        if child == 0:
            os.read(wait, 1)
            page.pass_sites(LOOPS)
            os._exit(0)
        stopping = (ProbeKind.STOP, ProbeKind.READY, ProbeKind.RUN)
        session.watch(child, page.target(page.emulated, stopping))
        ours = run(session, page, page.target(page.emulated, FUNCTIONS))
        os.write(go, b"!")
        os.close(go)
        os.waitpid(child, 0)
        os.close(wait)
        theirs = end(session, child)
        assert (transitions(ours), lost(ours)) == (CYCLE, {})
        preempted = GoroutineState.PREEMPTED
        assert transitions(theirs) == {
            (RUNNING, preempted): LOOPS,
            (preempted, RUNNABLE): LOOPS,
            (RUNNABLE, RUNNING): LOOPS,
        }
        assert lost(theirs) == {}


def test_run_makes_up_for_a_wake_that_was_not_seen(session: Session) -> None:
    """As where the scheduler takes a goroutine that waited and runs it at once."""
    with probed_page(session, (ProbeKind.PARK, None, ProbeKind.RUN)) as page:
        snapshot = run(session, page, page.target(page.emulated, FUNCTIONS))
        assert list(snapshot.stats["hits"][:3]) == [LOOPS, 0, LOOPS]
        assert (transitions(snapshot), lost(snapshot)) == (CYCLE, {})


@pytest.mark.parametrize("length", [0, 1, INJECT_LIMIT, INJECT_LIMIT + 44])
def test_all_of_a_list_become_runnable(session: Session, length: int) -> None:
    """Up to the limit; what doesn't fit is counted."""
    memory = (ctypes.c_uint64 * ((1 + length) * G_BYTES // 8))()
    goroutines = [ctypes.addressof(memory) + (1 + i) * G_BYTES for i in range(length)]
    memory[0] = goroutines[0] if goroutines else 0
    for i, following in enumerate(goroutines[1:]):
        memory[(1 + i) * G_BYTES // 8 + 1] = following  # g.schedlink, at byte 8 in the record below
    with probed_page(session, (ProbeKind.READY_LIST, None, None)) as page:
        record = page.target(page.emulated, (ProbeKind.READY_LIST, *FUNCTIONS[1:]))
        session.watch(os.getpid(), record)
        page.pass_sites(1, (ctypes.c_char * ctypes.sizeof(memory)).from_buffer(memory))
        snapshot = end(session, os.getpid())
        readied = min(length, INJECT_LIMIT)
        assert transitions(snapshot) == ({(WAITING, RUNNABLE): readied} if readied else {})
        assert len(snapshot.goroutines) == readied
        assert lost(snapshot) == ({LostReason.LIST_TOO_LONG: 1} if length > INJECT_LIMIT else {})
