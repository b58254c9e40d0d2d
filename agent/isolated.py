"""A call in a process of its own: whatever a stranger's file does to it, this process goes on.

An executable that a container truncates while it is read through a mapping kills the reader with SIGBUS, and one made
to mislead may take long or much memory. The child is forked, works on what is open here already, and hands its result
back pickled.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NoReturn, TypeVar

from schedtrace.errors import NotTraceable, SchedtraceError

_Result = TypeVar("_Result")

TIME_LIMIT_SECONDS = 10.0
MEMORY_LIMIT_BYTES = 512 << 20
_PIECE_BYTES = 1 << 16


def call(
    function: Callable[[], _Result],
    *,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
) -> _Result:
    """What ``function`` returns, or the SchedtraceError or OSError that it raises. Raises NotTraceable if it is killed
    by a signal, runs into a limit, or fails in another way.

    ``memory_limit_bytes`` is what the child may map beyond what this process has mapped.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        _work(function, send, memory_limit_bytes)
    os.close(send)
    try:
        answer = _read(receive, monotonic() + time_limit_seconds)
    finally:
        os.close(receive)
        os.kill(child, signal.SIGKILL)  # it has nothing more to say
        _, status = os.waitpid(child, 0)
    if answer is None:
        raise NotTraceable(f"reading it took more than {time_limit_seconds:g} s")
    if not answer:
        number = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no answer"
        raise NotTraceable(f"reading it failed ({number}): it changed meanwhile, or asks for too much memory")
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _work(function: Callable[[], object], send: int, memory_limit_bytes: int) -> NoReturn:
    """The child: never returns into what the parent was doing."""
    faulthandler.disable()
    try:
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped_bytes + memory_limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            answer = pickle.dumps((function(), None))
        except (SchedtraceError, OSError) as error:
            answer = pickle.dumps((None, error))
        except MemoryError:
            answer = b""
        except Exception as error:  # noqa: BLE001 (a fault of ours must not stop the caller; it is said)
            answer = pickle.dumps((None, NotTraceable(f"reading it failed: {error!r}; please report it")))
        while answer:
            answer = answer[os.write(send, answer) :]
    finally:
        os._exit(0)


def _read(receive: int, deadline: float) -> bytes | None:
    """All that the child writes; None if it isn't through by the deadline."""
    pieces: list[bytes] = []
    poll = select.poll()
    poll.register(receive, select.POLLIN)
    while poll.poll(max(deadline - monotonic(), 0) * 1000):
        piece = os.read(receive, _PIECE_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    return None
