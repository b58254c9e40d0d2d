"""The threads of a process watched without any probe in it, as the agent does all the time."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from schedtrace import abi, join, target
from schedtrace.compilation import Compilation
from schedtrace.join import ThreadCounts
from schedtrace.plan import FunctionNames, make_plan
from schedtrace.procfs import Process, open_process
from schedtrace.runtime_plan import RuntimePlan
from schedtrace.session import Session


@dataclass(frozen=True)
class Threads:
    """A process whose threads are watched."""

    session: Session
    process: Process
    runtime: RuntimePlan
    names: FunctionNames
    load_bias: int

    def counts(self) -> ThreadCounts:
        """What was counted until now."""
        snapshot = self.session.threads.snapshot(self.process.pid)
        return join.thread_counts(snapshot, lambda start_pc: self.names.name(start_pc - self.load_bias))

    def stop(self) -> None:
        """Count no longer."""
        self.session.threads.unwatch([self.process.pid])


@contextmanager
def watched_threads(
    pid: int, change: Callable[[abi.Process, Threads], None] = lambda _record, _threads: None
) -> Iterator[Threads]:
    """Watch the threads of ``pid``, whose executable is a Go program's. ``change`` may spoil what is known of it."""
    with ExitStack() as stack:
        process = stack.enter_context(open_process(pid))
        executable_fd = process.open_executable()
        stack.callback(os.close, executable_fd)
        session = stack.enter_context(Session(Compilation(), ()))
        path = f"/proc/self/fd/{executable_fd}"
        plan = make_plan(path)
        assert not isinstance(plan.runtime, str)
        names, bias = FunctionNames(path), process.load_bias()
        stack.callback(names.close)
        record = target.process_of(process, plan, bias, by_function=True)
        threads = Threads(session, process, plan.runtime, names, bias)
        change(record, threads)
        session.threads.watch(pid, record)
        yield threads
