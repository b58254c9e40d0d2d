"""Real servers, as their makers or Debian built them, under load: nothing is inconsistent, and what is seen adds up."""

from pathlib import Path

import pytest

from schedtrace.attach import Watch
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.symtab import Symtab
from schedtrace.window import Window
from tests import servers
from tools import toolchains

SECONDS = 2.0
# Server -> (Go's minor version, how functions are found, a start function that goroutines of its load have)
EXPECTED = {
    "nats-server": (27, "symtab", "github.com/nats-io/nats-server/v2/server.(*Server).startGoRoutine.func1"),
    "caddy": (27, "pclntab", "net/http.(*conn).serve"),
    "prometheus": (19, "pclntab", "net/http.(*Server).Serve.func3"),
    "etcd": (19, "pclntab", "net/http.(*Server).Serve.func3"),
}


def _watch(name: str, folder: Path, *, syscalls: bool) -> Window:
    with servers.started(name, folder) as server, Watch(server.pid, syscalls=syscalls) as watch:
        assert server.load(SECONDS) > 100
        watch.stop()
        return watch.window()


def _assert_adds_up(window: Window) -> None:
    """A state is left as often as it is entered, but for the goroutines that are in it at either end."""
    states = {state for move in window.transitions for state in move} - {"dead", "idle", "copystack"}
    for state in states:
        entered = sum(n for (_, to), n in window.transitions.items() if to == state)
        left = sum(n for (origin, _), n in window.transitions.items() if origin == state)
        assert abs(entered - left) <= window.goroutines, state
    runs = window.transitions["runnable", "running"]
    assert runs == sum(f.runs for f in window.functions)
    began_before = window.lost.get("interval_began_before_window", 0)
    assert 0 <= runs - window.sched_latency_total.count <= began_before
    waits = sum(h.count for h in window.wait.values())
    assert 0 <= window.transitions["waiting", "runnable"] - waits <= began_before


@pytest.mark.parametrize(
    ("name", "syscalls"), [*((name, False) for name in EXPECTED), ("nats-server", True), ("etcd", True)]
)
def test_under_load(name: str, syscalls: bool, tmp_path: Path) -> None:
    window = _watch(name, tmp_path, syscalls=syscalls)
    minor, symbols, worker = EXPECTED[name]
    assert window.target.go_version.startswith(f"go1.{minor}.")
    assert window.target.symbols == symbols
    # Threads' switches that the kernel does not report are no matter of the binary.
    assert set(window.lost) <= {"interval_began_before_window", "thread_switch_unseen"}

    assert {"network", "mutex/semaphore", "new", "gc"} <= window.sched_latency.keys()
    assert window.sched_latency["network"].count > 100
    assert window.wait["IO wait"].count > 100
    assert window.run_queue
    assert window.run_queue.count > 100
    assert (("running", "syscall") in window.transitions) == syscalls
    functions = {f.function: f for f in window.functions}
    assert functions[worker].parks > 100
    assert "(unknown)" not in functions
    assert all(reason and not reason.startswith("reason ") for reason in window.wait), window.wait.keys()
    _assert_adds_up(window)


def test_both_symbol_tables_of_nats_server_agree_on_the_runtime() -> None:
    with Binary.open(str(toolchains.program("nats-server"))) as binary:
        table, symtab = Pclntab.find(binary), Symtab.read(binary)
        assert symtab is not None
        # A generic function's instances share one name in pclntab ("[...]"), and have one each in the symbol table.
        runtime = [f for f in table if f.name.startswith("runtime.") and "[" not in f.name]
        names = {f.name for f in runtime}
        vaddrs = {name: {f.vaddr for f in runtime if f.name == name} for name in names}
        found = symtab.functions_named(names)
        ours = table.functions_named(names)
    assert len(names) > 1000
    missing = {name for name in names - found.keys() if len(vaddrs[name]) == 1}
    assert not missing
    assert {name for name in found if found[name].vaddr not in vaddrs[name]} == set()
    # With a wrapper for the other ABI there are two functions of a name: an assembly function is listed by the wrapper
    # that Go code calls, and pclntab gives the function itself.
    other = {name for name in ours.keys() & found.keys() if ours[name].vaddr != found[name].vaddr}
    assert all(len(vaddrs[name]) == 2 for name in other)
    assert {"runtime.casgstatus", "runtime.park_m", "runtime.ready", "runtime.execute"} <= ours.keys() - other
