"""Puts uprobes in and takes them out in a process of its own, so that kill -9 of this one can't harm a target.

The kernel's access to another process's pages gives up when the process that asks is being killed (__get_user_pages).
Whoever has SIGKILL pending while a probe is put in or taken out leaves breakpoints that nobody takes out any more. The
target goes on rightly, but pays for a trap at each; the kernel's log says "failed to unregister, leaking uprobe".
Measured on Linux 6.18: of 60 processes killed within 5 ms of starting to detach, 2 left breakpoints. A process that
dies while it merely holds probes harms nothing: its files are closed when the signal is no longer pending.

So a child makes the probes and holds them as well as this process does. When this process ends, however it ends, the
child reads the end of their channel, closes them and exits. It is in a session of its own and hears no Ctrl-C.

With the last probe of a file the kernel forgets that a process has any (MMF_HAS_UPROBES, as soon as another of its
threads comes by). A thread that a breakpoint stopped just before is in an interrupt that asks for that: its trap then
is nobody's, and SIGTRAP kills the process. It can happen where taking a breakpoint out of memory doesn't wait for every
CPU: with KVM's paravirtual TLB flush, AMD's INVLPGB, on arm64. A target was seen to die so, once. So there is an
anchor: a probe at an instruction that no thread comes to any more, put in before all others, and taken out after them
when every CPU has been seen outside of interrupts. Descriptors of a process that is killed are closed from the highest
down, and the anchor's is the lowest.

Probes of a window are held by the child alone, which takes them out when the window's time is over, or as soon as BPF
says that a target has had as many hits as it may: however busy the session's process is.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic_ns, sleep
from typing import Any, Literal

from schedtrace import uprobe_line, uprobe_multi, uprobe_pmu
from schedtrace.ring_buffer import RingBuffer

Way = Literal["link", "perf", "line"]
"""How a probe gets into the kernel: :mod:`uprobe_multi`, :mod:`uprobe_pmu`, :mod:`uprobe_line`."""

_MESSAGE_BYTES = 1 << 17
_CLOSERS = 256  # so many are closed at a time: each waits for a grace period of the kernel
_HELD_BY_CHILD = -1
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_MEMBARRIER_GLOBAL = 1
_EVERY_CPU_SECONDS = 0.2  # where the kernel doesn't tell: an interrupt is over long before


@dataclass(frozen=True)
class Held:
    """Probes that are in: all that a program has in a file (by link), or one (else). ``number`` is what the child calls
    them, ``descriptor`` this process's own hold on them."""

    number: int
    descriptor: int


@dataclass(frozen=True)
class KeptWindow:
    """When the child takes probes out by itself: at ``until_ns`` (CLOCK_MONOTONIC), or when BPF reports the end of the
    window ``number``."""

    number: int
    until_ns: int


class ProbeKeeper:
    """The child. Close it, and all of its probes are out."""

    def __init__(self) -> None:
        """Start it. Raises OSError."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ends_heard = False
        with theirs:
            # -P: the folder it is started in is nowhere to import from
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "schedtrace.probe_keeper", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear_ends(self, ring_buffer_fd: int) -> None:
        """Have it take out the probes of windows whose numbers (struct window_end) come out of that BPF ring buffer.
        Raises OSError."""
        if not self._ends_heard:
            self._ask({"ends": True}, [ring_buffer_fd])
            self._ends_heard = True

    def windows(self) -> set[int]:
        """Numbers of the windows whose probes are not all out yet. Raises OSError."""
        return set(self._ask({"windows": True}, [])[0]["windows"])

    def end_windows(self, numbers: Sequence[int]) -> None:
        """Begin to take their probes out now. Raises OSError."""
        self._ask({"end": list(numbers)}, [])

    def attach(
        self,
        way: Way,
        program_fd: int | None,
        executable_fd: int,
        file_offsets: Sequence[int],
        pid: int,
        window: KeptWindow | None = None,
    ) -> list[Held]:
        """Run a program, loaded for that way, at instructions of the executable open at ``executable_fd``; with another
        ``pid`` than :data:`uprobe_pmu.ANY_PROCESS` only in that process. Without a program it is an anchor, which is
        taken out after those that are taken out with it. With ``window``, the child alone holds them.

        Raises OSError; probes put in until then are taken out again.
        """
        held: list[Held] = []
        for offsets in [list(file_offsets)] if way == "link" else [[offset] for offset in file_offsets]:
            question = {"way": way, "offsets": offsets, "pid": pid}
            if window:
                question |= {"window": window.number, "until_ns": window.until_ns}
            answer, descriptors = self._ask(question, [executable_fd, *([] if program_fd is None else [program_fd])])
            if answer["errno"]:
                self.detach(held)
                raise OSError(answer["errno"], os.strerror(answer["errno"]))
            if window:
                held.append(Held(answer["number"], _HELD_BY_CHILD))
                continue
            if not descriptors:  # the kernel passes none on to a process at its limit
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            held.append(Held(answer["number"], descriptors[0]))
        return held

    def detach(self, held: Sequence[Held]) -> None:
        """Take these probes out, and wait until they are."""
        for probes in reversed(held):  # if the child has been killed, it is these that keep them in
            if probes.descriptor != _HELD_BY_CHILD:
                os.close(probes.descriptor)
        with suppress(OSError):  # a child that is gone has closed them
            self._ask({"close": [probes.number for probes in held]}, [])

    def close(self) -> None:
        """Take out all probes that the child still holds alone, and wait until it has exited. May be called twice."""
        self._channel.close()
        self._process.wait()

    def _ask(self, question: dict[str, Any], descriptors: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        socket.send_fds(self._channel, [json.dumps(question).encode()], descriptors)
        answer, received, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 1)
        if not answer:
            raise ConnectionResetError(errno.ECONNRESET, "the process that holds the probes has ended")
        return json.loads(answer), received


@dataclass
class _OpenWindow:
    """``taking_out``: what does that, once the window has ended."""

    until_ns: int
    probes: list[int] = field(default_factory=list)
    taking_out: threading.Thread | None = None


@dataclass(frozen=True)
class _Probes:
    """``line``: the name of their line, if that is the way."""

    descriptor: int
    line: str
    is_anchor: bool


@dataclass
class _Child:
    """What the child does and has: probes by number."""

    channel: socket.socket
    session_pid: int
    held: dict[int, _Probes] = field(default_factory=dict)
    windows: dict[int, _OpenWindow] = field(default_factory=dict)
    made: int = 0
    ends_fd: int = -1
    ends: RingBuffer | None = None

    def serve(self) -> None:
        """Answer until the other end of the channel is closed, then take all probes out."""
        with suppress(ConnectionError):
            while True:
                if not self._question_is_there():
                    continue
                message, descriptors, _, _ = socket.recv_fds(self.channel, _MESSAGE_BYTES, 2)
                if not message:
                    break
                question = json.loads(message)
                if "close" in question:
                    self._take_out(question["close"])
                    self._answer({})
                elif "windows" in question:
                    self._forget_ended()
                    self._answer({"windows": list(self.windows)})
                elif "end" in question:
                    self._end(question["end"])
                    self._answer({})
                elif "ends" in question:
                    (self.ends_fd,) = descriptors
                    self.ends = RingBuffer(self.ends_fd)
                    self._answer({})
                else:
                    self._put_in(question, *descriptors)
        self._end(list(self.windows))
        self._take_out(list(self.held))
        for window in self.windows.values():
            if window.taking_out:
                window.taking_out.join()

    def _question_is_there(self) -> bool:
        """Wait for one, and end windows meanwhile."""
        open_until = [window.until_ns for window in self.windows.values() if not window.taking_out]
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        if self.ends:
            poll.register(self.ends_fd, select.POLLIN)
        left_ms = max(min(open_until) - monotonic_ns(), 0) / 1e6 if open_until else None
        ready = {descriptor for descriptor, _ in poll.poll(left_ms)}
        now_ns = monotonic_ns()
        over = [number for number, window in self.windows.items() if window.until_ns <= now_ns]
        if self.ends:
            over += [int.from_bytes(record[:4], sys.byteorder) for record in self.ends.read()]
        self._end(over)
        return self.channel.fileno() in ready

    def _end(self, numbers: Sequence[int]) -> None:
        """Begin to take out the probes of windows. It waits for the kernel in a thread: others may end meanwhile."""
        for number in numbers:
            window = self.windows.get(number)
            if window and not window.taking_out:
                window.taking_out = threading.Thread(target=self._take_out, args=(window.probes,))
                window.taking_out.start()

    def _forget_ended(self) -> None:
        for number, window in list(self.windows.items()):
            if window.taking_out and not window.taking_out.is_alive():
                del self.windows[number]

    def _put_in(self, question: dict[str, Any], executable_fd: int, program_fd: int | None = None) -> None:
        is_anchor = program_fd is None
        try:
            self.made += 1
            if program_fd is None:
                program_fd = uprobe_multi.load_empty_program(
                    uprobe_multi.ATTACH_TYPE if question["way"] == "link" else 0
                )
            probe, line = self._make(question, program_fd, executable_fd)
        except OSError as error:
            self._answer({"errno": error.errno or errno.EIO})
        else:
            self.held[self.made] = _Probes(probe, line, is_anchor)
            if "window" in question:
                window = self.windows.get(question["window"])
                if not window or window.taking_out:
                    self.windows[question["window"]] = window = _OpenWindow(question["until_ns"])
                window.probes.append(self.made)
                self._answer({"errno": 0, "number": self.made})
            else:
                self._answer({"errno": 0, "number": self.made}, probe)
        finally:
            os.close(executable_fd)
            if program_fd is not None:
                os.close(program_fd)

    def _make(self, question: dict[str, Any], program_fd: int, executable_fd: int) -> tuple[int, str]:
        path, offsets, pid = f"/proc/self/fd/{executable_fd}", question["offsets"], question["pid"]
        if question["way"] == "link":
            return uprobe_multi.attach(program_fd, path, offsets, max(pid, uprobe_multi.ANY_PROCESS)), ""
        if question["way"] == "perf":
            return uprobe_pmu.attach(program_fd, path, offsets[0], pid), ""
        name = uprobe_line.line_name(os.fstat(executable_fd).st_ino, offsets[0], self.made, self.session_pid)
        return uprobe_line.attach(program_fd, path, offsets[0], pid, name), name

    def _answer(self, answer: dict[str, Any], *descriptors: int) -> None:
        socket.send_fds(self.channel, [json.dumps(answer).encode()], descriptors)

    def _take_out(self, numbers: list[int]) -> None:
        probes = [self.held.pop(number) for number in numbers if number in self.held]
        _close([each for each in probes if not each.is_anchor])
        if anchors := [each for each in probes if each.is_anchor]:
            _wait_for_every_cpu()
            _close(anchors)


def _close(probes: Sequence[_Probes]) -> None:
    def close_every(start: int) -> None:
        for each in probes[start::_CLOSERS]:
            os.close(each.descriptor)

    threads = [threading.Thread(target=close_every, args=(i,)) for i in range(min(len(probes), _CLOSERS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in probes:
        if each.line:
            uprobe_line.remove(each.line)


def _wait_for_every_cpu() -> None:
    """Until each CPU has been outside of interrupts: membarrier's oldest command is a grace period of RCU."""
    number, libc = _MEMBARRIER.get(platform.machine()), ctypes.CDLL(None)
    if number is None or libc.syscall(ctypes.c_long(number), ctypes.c_int(_MEMBARRIER_GLOBAL), ctypes.c_uint(0)):
        sleep(_EVERY_CPU_SECONDS)  # EINVAL with nohz_full, EPERM under a filter


def _go_first() -> None:
    """While this process waits for a CPU, targets pay for windows that have ended. A nice value would count only
    against those of its own cgroup or session."""
    with suppress(OSError):  # it may not, without CAP_SYS_NICE, or in a cgroup without real-time budget
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the other end of the channel does
    _go_first()
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _Child(ours, os.getppid()).serve()
