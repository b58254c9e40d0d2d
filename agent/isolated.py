"""Reading strangers' files in a process of its own: whatever a file does to it, this process goes on.

An executable that a container truncates while it is read through a mapping kills the reader with SIGBUS, and one made
to mislead may take long or much memory. The reader is a forked child. It is handed open files, one after the other,
since a fork for each costs more than what there is to read; an answer comes back pickled. A file is refused only if a
reader fails at it that has read nothing else before: what fails later may be for what others have left behind there.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import pickle
import resource
import select
import signal
import socket
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Generic, NoReturn, TypeVar

from schedtrace.errors import NotTraceable, SchedtraceError

_Tag = TypeVar("_Tag", bound=Hashable)
_Result = TypeVar("_Result")

TIME_LIMIT_SECONDS = 10.0
MEMORY_LIMIT_BYTES = 512 << 20
MOST_PENDING = 64
_MOST_FILES = 256
"""A reader that has read so many is replaced, however well it does."""
_PIECE_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # what an unprivileged process may ask for: a reader doesn't wait until answers are taken
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Answer(Generic[_Result]):
    """What reading a file came to: a result, or the SchedtraceError or OSError that it raised; NotTraceable also if the
    reader was killed by a signal, ran into a limit, or failed in another way."""

    result: _Result | None
    error: Exception | None = None


class Reader(Generic[_Tag, _Result]):
    """A child that calls ``read`` with descriptors of files, in the order in which it is asked. Close it.

    ``read`` may take ``time_limit_seconds`` for one, and ``memory_limit_bytes`` is what the child may map beyond what
    this process had mapped when it was forked. Not for use by several threads at once.
    """

    def __init__(
        self,
        read: Callable[[int], _Result],
        *,
        time_limit_seconds: float = TIME_LIMIT_SECONDS,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        self._read = read
        self._time_limit_seconds = time_limit_seconds
        self._memory_limit_bytes = memory_limit_bytes
        self._child = 0
        self.pending: deque[_Tag] = deque()
        """What it has been asked and has not answered yet, the oldest first."""
        self.idle_since = 0.0
        self._start()

    def ask(self, tag: _Tag, descriptor: int) -> bool:
        """Have the file open at ``descriptor`` read; it may be closed then. False if too much is pending already."""
        if len(self.pending) == MOST_PENDING or (self.pending and self._files >= _MOST_FILES):
            return False
        if not self._child or self._files >= _MOST_FILES:
            self.close()
            self._start()
        try:
            socket.send_fds(self._questions, [b"?"], [descriptor])
        except BlockingIOError:
            return False
        except ConnectionError:
            if self.pending:
                return False  # the answer to the oldest tells what has become of the child
            self.close()
            return self.ask(tag, descriptor)
        if not self.pending:
            self._began = monotonic()
        self.pending.append(tag)
        self._files += 1
        return True

    def answer(self) -> tuple[_Tag, Answer[_Result]] | None:
        """Wait for the answer to the oldest of :attr:`pending`. None if all that was pending must be asked again."""
        piece = self._receive(self._began + self._time_limit_seconds)
        tag = self.pending.popleft()
        if piece:
            self._answered += 1
            self._began = self.idle_since = monotonic()
            answer: Answer[_Result] = pickle.loads(piece)
            return tag, answer
        first = not self._answered
        status = self.close()
        if not first:
            return None
        if piece is None:
            return tag, Answer(None, NotTraceable(f"reading it took more than {self._time_limit_seconds:g} s"))
        number = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no answer"
        message = f"reading it failed ({number}): it changed meanwhile, or asks for too much memory"
        return tag, Answer(None, NotTraceable(message))

    def close(self) -> int:
        """End the child, if there is one, and forget what is pending; the next question starts another. Its status as
        waitpid(2) gives it."""
        self.pending.clear()
        if not self._child:
            return 0
        self._questions.close()
        os.close(self._answers)
        os.kill(self._child, signal.SIGKILL)  # changes nothing about one that dies already
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        return status

    def _start(self) -> None:
        self._questions, questions = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, answers = os.pipe()
        with suppress(OSError):
            fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._child = os.fork()
        if self._child == 0:
            _serve(self._read, questions, answers, self._memory_limit_bytes)
        questions.close()
        os.close(answers)
        self._questions.setblocking(False)
        self._files = self._answered = 0
        self._received = b""
        self._began = self.idle_since = monotonic()

    def _receive(self, deadline: float) -> bytes | None:
        """The next answer as it was pickled; empty if the child has ended, None if it doesn't come by the deadline."""
        while True:
            length = int.from_bytes(self._received[:_LENGTH_BYTES], "little")
            end = _LENGTH_BYTES + length
            if len(self._received) >= max(end, _LENGTH_BYTES + 1):
                piece, self._received = self._received[_LENGTH_BYTES:end], self._received[end:]
                return piece
            if not self._wait(deadline):
                return None
            more = os.read(self._answers, max(_PIECE_BYTES, end - len(self._received)))
            if not more:
                return b""
            self._received += more

    def _wait(self, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(max(deadline - monotonic(), 0) * 1000))


def _serve(
    read: Callable[[int], object], questions: socket.socket, answers: int, memory_limit_bytes: int
) -> NoReturn:
    """The child: never returns into what the parent was doing. It keeps none of the parent's files open, and hears no
    signal that asks the parent to end: it ends when the parent does."""
    try:
        faulthandler.disable()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # of all in this container, it may go
        low, high = sorted((questions.fileno(), answers))
        for first, last in ((3, low), (low + 1, high), (high + 1, _most_files())):
            os.closerange(first, last)
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped_bytes + memory_limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        while True:
            _, descriptors, _, _ = socket.recv_fds(questions, 1, 1)
            if not descriptors:
                break
            answer = _pickled(read, descriptors[0])
            os.close(descriptors[0])
            answer = len(answer).to_bytes(_LENGTH_BYTES, "little") + answer
            while answer:
                answer = answer[os.write(answers, answer) :]
    finally:
        os._exit(0)


def _most_files() -> int:
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _pickled(read: Callable[[int], object], descriptor: int) -> bytes:
    """The answer for one file. Raises MemoryError."""
    try:
        return pickle.dumps(Answer(read(descriptor)))
    except (SchedtraceError, OSError) as error:
        return pickle.dumps(Answer(None, error))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (a fault of ours must not stop the caller; it is said)
        return pickle.dumps(Answer(None, NotTraceable(f"reading it failed: {error!r}; please report it")))
