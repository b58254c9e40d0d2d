"""What one hit of a probe costs the target: an empty program, each part of the real ones alone, the real ones.

All sit on pages of code like the one that :mod:`schedtrace.calibrate` measures with, and take turns.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import thread_time_ns

from bench.hit_parts import G_BYTES, Parts
from bench.measurement import BenchError, Rounds, Spread, alternate, compare, print_conditions, print_limit, print_table
from schedtrace import abi
from schedtrace.bpf_text import program_of
from schedtrace.calibrate import CASGSTATUS, FUNCTIONS, HITS_PER_LOOP, RECORDS, CodePage, Kinds
from schedtrace.compilation import Compilation
from schedtrace.errors import AttachFailed
from schedtrace.session import ProbeSite, Session
from schedtrace.target import COLD_TRAP

ROUNDS = 60
LOOPS = 500  # a sample of a millisecond or two: short enough that most are not interrupted
STEPPED_LOOPS = 50  # a hit costs ten times as much there
MANY_ROUNDS = 5
COLD_ROUNDS, COLD_LOOPS = 30, 60
SWEPT_BYTES = 1 << 22
"""Written between two hits of each site, so that caches of that size hold nothing else."""
GOROUTINES = (1, 1_000, 100_000)  # leave one when divided by three, see CodePage.pass_sites
LIMIT = 1.35

PARTS = {
    "targets_lookup": "look up the process in targets",
    "goroutine_lookup": "look up the goroutine, 16-byte key",
    "goroutine_update": "the same, and write its record",
    "stats_lookup": "look up the CPU's counters",
    "atomic_adds": "the same, and 4 atomic adds",
    "ktime": "the time",
    "cgroup_id": "the cgroup's id",
    "user_read": "one byte of the target's memory",
}
NOTHING, EMPTY = "nothing", "an empty program"
EMPTY_STEPPED = "an empty program, single-stepped"
EMPTY_PERF = "an empty program, by perf's uprobe"
REAL = {
    "casgstatus: park, ready, run": CASGSTATUS,
    "park_m, ready, execute": FUNCTIONS,
}
SAMPLED = "sampled level: record"
ALL_REAL = {**REAL, SAMPLED: RECORDS}
NAMES = (NOTHING, EMPTY, EMPTY_STEPPED, EMPTY_PERF, *PARTS.values(), *ALL_REAL)

Measure = Callable[[], float]
Sites = tuple[int, int, int]
_ATTEMPTS = 5
_NOT_OF_PROGRAMS = (abi.LostReason.BEGAN_BEFORE, abi.LostReason.SWITCH_UNSEEN, abi.LostReason.COUNT)


class Pages:
    """A code page for each variant, with its program attached; all goroutines lie in the same memory."""

    def __init__(self, names: Sequence[str], stack: ExitStack) -> None:
        self._memory = ctypes.create_string_buffer(max(GOROUTINES) * G_BYTES)
        self._pages: dict[str, CodePage] = {}
        self._sessions: dict[str, Session] = {}
        parts = stack.enter_context(Parts())
        parts.follow(ctypes.addressof(self._memory), max(GOROUTINES))
        by_text = {text: name for name, text in PARTS.items()}
        for name in names:
            if kinds := ALL_REAL.get(name):
                program = program_of(kinds[0])
                session = stack.enter_context(Session(Compilation(programs=(program,)), (program,)))
                self._sessions[name] = session
                attach = partial(_attach_session, session, kinds)
            elif name != NOTHING:
                attach = partial(_attach_part, parts, by_text.get(name, "empty"), name == EMPTY_PERF)
            else:
                attach = partial(_attach_nothing)
            self._pages[name] = _page(stack, attach, stepped=name == EMPTY_STEPPED)

    def measures(self, names: Sequence[str], goroutines: int) -> dict[str, Measure]:
        """What each of those variants takes a hit, with so many goroutines in turn: nanoseconds of CPU time."""
        memory = (ctypes.c_char * (goroutines * G_BYTES)).from_buffer(self._memory)
        loops = max(LOOPS // goroutines, 1) * goroutines  # every goroutine comes back to where it began
        found = {}
        for name in names:
            page_loops = STEPPED_LOOPS if name == EMPTY_STEPPED else loops
            # What a sampler knows is the page's own.
            found[name] = _timed(self._pages[name], page_loops, None if name == SAMPLED else memory)
            found[name]()  # makes the records, fills the caches
        return found

    def swept(self, names: Sequence[str]) -> dict[str, Measure]:
        """As :meth:`measures`, with the caches swept between two hits: the sweep is part of the time."""
        return {name: partial(self._swept, self._pages[name]) for name in names}

    def _swept(self, page: CodePage) -> float:
        start = thread_time_ns()
        for _ in range(COLD_LOOPS):
            ctypes.memset(self._memory, 0, SWEPT_BYTES)
            page.pass_sites(1)
        return (thread_time_ns() - start) / (COLD_LOOPS * HITS_PER_LOOP)

    def programs_ns(self, names: Sequence[str]) -> dict[str, Callable[[], float]]:
        """How long each of these real programs took alone, as they measure it themselves, since this call: to be called
        later."""
        before = {name: self._sessions[name].timed(os.getpid()) for name in names}

        def since(name: str) -> float:
            (ns, count), (ns_before, count_before) = self._sessions[name].timed(os.getpid()), before[name]
            return (ns - ns_before) / (count - count_before)

        return {name: partial(since, name) for name in names}

    def check(self) -> None:
        """Raises BenchError if the real programs did not do what they do in a target."""
        for session in self._sessions.values():
            _check(session)


def _page(stack: ExitStack, attach: Callable[[CodePage, Sites], None], *, stepped: bool) -> CodePage:
    """A page with something attached. If the kernel refuses, another page: it remembers files that are gone, whose
    probes it could not take out when their owner was killed, and takes a new one for such a file."""
    attempts = _ATTEMPTS
    while True:
        page = stack.enter_context(CodePage())
        try:
            attach(page, page.stepped if stepped else page.emulated)
        except (OSError, AttachFailed):
            attempts -= 1
            if not attempts:
                raise
        else:
            return page


def _attach_nothing(_page: CodePage, _sites: Sites) -> None:
    pass


def _attach_part(parts: Parts, name: str, perf: bool, page: CodePage, sites: Sites) -> None:
    parts.attach(name, page.fd, sites, perf=perf)


def _attach_session(session: Session, kinds: Kinds, page: CodePage, sites: Sites) -> None:
    session.attach(page.fd, [ProbeSite(program_of(kind), site) for kind, site in zip(kinds, sites, strict=True)])
    sampler = page.sampler() if kinds == RECORDS else None
    session.threads.watch(os.getpid(), abi.Process())  # as a target's are
    session.watch(os.getpid(), page.target(sites, kinds), sampler=sampler)


def _timed(page: CodePage, loops: int, memory: ctypes.Array[ctypes.c_char] | None) -> Measure:
    """``memory``: goroutines to pass by turns; the page's own without."""
    stride = G_BYTES if memory is not None and len(memory) > G_BYTES else 0

    def measure() -> float:
        start = thread_time_ns()
        page.pass_sites(loops, memory, stride)
        return (thread_time_ns() - start) / (loops * HITS_PER_LOOP)

    return measure


def _check(session: Session) -> None:
    """The programs did what they do in a target, on every hit: they saw goroutines in the states they expected,
    or samples."""
    snapshot = session.snapshot(os.getpid())
    stats = snapshot.stats
    reasons = [reason for reason in abi.LostReason if reason not in _NOT_OF_PROGRAMS]
    lost = {reason.name: int(stats["lost"][reason]) for reason in reasons if stats["lost"][reason]}
    samples = snapshot.samples
    seen = stats["transitions"].sum() if samples is None else samples["sched_latency"]["slots"].sum()
    if lost or not stats["hits"].sum() == seen > 0:
        raise BenchError(f"{stats['hits'].sum()} hits, {seen} seen, lost: {lost}")


def _hit(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: one[name] - one[NOTHING])


def _added(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: one[name] - one[EMPTY])


def _ratio(rounds: Rounds, name: str) -> Spread:
    return compare(rounds, lambda one: (one[name] - one[NOTHING]) / (one[EMPTY] - one[NOTHING]))


def one_goroutine(pages: Pages) -> None:
    """Everything, with hot caches."""
    rounds = alternate(pages.measures(NAMES, 1), ROUNDS)
    rows = [
        [name, f"{_hit(rounds, name).median:.0f}", f"{_added(rounds, name).median:+.0f}", _ratio(rounds, name).text()]
        for name in NAMES
        if name != NOTHING
    ]
    print_table(["a hit runs", "ns", "ns added", "times an empty program"], rows)
    for name in REAL:
        print_limit(name, _ratio(rounds, name).median, LIMIT)


def many_goroutines(pages: Pages) -> None:
    """The real programs when each hit is another goroutine's."""
    names = [NOTHING, EMPTY, PARTS["goroutine_lookup"], PARTS["goroutine_update"], PARTS["user_read"], *REAL]
    columns = []
    for count in GOROUTINES:
        rounds = alternate(pages.measures(names, count), MANY_ROUNDS)
        columns.append([f"{_hit(rounds, name).median:.0f} = {_ratio(rounds, name).median:.2f} x" for name in names[1:]])
    rows = [[name, *(column[i] for column in columns)] for i, name in enumerate(names[1:])]
    print_table(["ns a hit, with that many goroutines in turn", *(f"{count:,}" for count in GOROUTINES)], rows)


def cold_caches(pages: Pages) -> None:
    """By how much longer a hit takes with cold caches, as multiples of what its program alone takes longer."""
    rows, names = {name: [name] for name in ALL_REAL}, [NOTHING, *ALL_REAL]
    hits, programs = [], []
    for measures in (pages.measures(names, 1), pages.swept(names)):
        programs_ns = pages.programs_ns(list(ALL_REAL))
        rounds = alternate(measures, COLD_ROUNDS)
        hits.append({name: _hit(rounds, name).median for name in ALL_REAL})
        programs.append({name: programs_ns[name]() for name in ALL_REAL})
    for name, row in rows.items():
        (hot, cold), (program_hot, program_cold) = [h[name] for h in hits], [p[name] for p in programs]
        times = (cold - hot) / (program_cold - program_hot)
        row += [f"{ns:.0f}" for ns in (hot, cold, program_hot, program_cold)] + [f"{times:.1f}"]
    header = ["ns", "a hit, hot", "cold", "program alone, hot", "cold", "times as much longer"]
    print_table(header, list(rows.values()))
    print(f"the bill has {COLD_TRAP:.1f} times")


def main() -> None:
    print("CPU time of a probe hit (medians, in brackets the middle half of the rounds)")
    print_conditions()
    print()
    with ExitStack() as stack:
        pages = Pages(NAMES, stack)
        one_goroutine(pages)
        print()
        many_goroutines(pages)
        print()
        cold_caches(pages)
        pages.check()


if __name__ == "__main__":
    main()
