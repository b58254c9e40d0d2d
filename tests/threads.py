"""The threads of a process watched without any probe in it, as the agent does all the time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from schedtrace import join, target
from schedtrace.join import ThreadCounts
from schedtrace.plan import FunctionNames, make_plan
from schedtrace.procfs import Process, open_process
from schedtrace.runtime_plan import RuntimePlan, make_runtime_plan
from schedtrace.session import Compilation, Session


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
def watched_threads(pid: int) -> Iterator[Threads]:
    """Watch the threads of ``pid``, whose executable is a Go program's."""
    with open_process(pid) as process, Session(Compilation(), ()) as session:
        plan, runtime = make_plan(process.exe_path), make_runtime_plan(process.exe_path)
        names, bias = FunctionNames(process.exe_path), process.load_bias()
        record = target.process_of(process, runtime, target.reasons_of(plan), bias, by_function=True)
        session.threads.watch(pid, record)
        try:
            yield Threads(session, process, runtime, names, bias)
        finally:
            names.close()
