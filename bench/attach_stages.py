"""One attach in this process, timed stage by stage: `python -m bench.attach_stages PID START`, for attach_time.

START is when the process was started, by CLOCK_MONOTONIC in seconds. Prints JSON: seconds by stage. Imports
little itself, since the time that imports take is part of what is measured.
"""

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Stage -> function that is it. The compilation goes on in a thread while the rest is imported and the plan is made.
COMPILE = "compile, meanwhile"
STAGES = {
    COMPILE: ("schedtrace.session", "Compilation._compile"),
    "plan": ("schedtrace.image", "make_plan"),
    "wait for it, load": ("schedtrace.session", "Session.__init__"),
    "put probes": ("schedtrace.session", "Session.attach"),
    "calibrate": ("schedtrace.target", "calibration"),
}
IMPORTS, COUNTING, DATA, CPU = "start and imports", "counting from", "first data at", "CPU time until then"
DATA_SECONDS = 1.0


def _timed(stage: str, function: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            spent[stage] = spent.get(stage, 0.0) + time.monotonic() - start

    return timed


def _wrap(stage: str, spent: dict[str, float]) -> None:
    module, name = STAGES[stage]
    owner: Any = importlib.import_module(module)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, last, _timed(stage, getattr(owner, last), spent))


def measure(pid: int, started: float) -> dict[str, float]:
    """Attach to a process as the command does; seconds since ``started`` or by stage. No first data if the process
    does nothing."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does
    for module in ("schedtrace.cli", "schedtrace.live"):  # what the command line imports for `attach`
        importlib.import_module(module)
    spent: dict[str, float] = {}
    _wrap(COMPILE, spent)
    with importlib.import_module("schedtrace.compilation").Compilation() as compilation:
        attach = importlib.import_module("schedtrace.attach")
        spent[IMPORTS] = time.monotonic() - started
        for stage in STAGES:
            if stage != COMPILE:
                _wrap(stage, spent)
        _attach_and_wait(attach.Watch, pid, compilation, started, spent)
    return spent


def _attach_and_wait(watch_class: Any, pid: int, compilation: Any, started: float, spent: dict[str, float]) -> None:
    with watch_class(pid, compilation) as watch:
        spent[COUNTING] = time.monotonic() - started
        spent[CPU] = time.process_time()
        deadline = time.monotonic() + DATA_SECONDS
        while not watch.window().transitions and time.monotonic() < deadline:
            time.sleep(0.001)
        if watch.window().transitions:
            spent[DATA] = time.monotonic() - started


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), float(sys.argv[2]))))
