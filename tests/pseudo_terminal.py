"""A program on a terminal of a given size, in a session that the terminal controls: what it shows, keys, hanging up.

>>> with PseudoTerminal([*COMMAND, "attach", pid], 80, 24) as terminal:
...     terminal.await_text("Sources of delay")
...     terminal.press("q")
...     assert terminal.exit_code() == 0
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pyte

from tests.command import SECONDS, environment

ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


class PseudoTerminal:
    """Standard input and output lead to it, and standard error unless ``errors`` is a descriptor."""

    def __init__(
        self,
        command: Sequence[str],
        width: int,
        height: int,
        *,
        env: Mapping[str, str | None] | None = None,
        errors: int | None = None,
    ) -> None:
        self._command = command
        self._env = environment({"TERM": "xterm-256color", "COLUMNS": None, "LINES": None, **(env or {})})
        self._errors = errors
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""

    def __enter__(self) -> Self:
        self._master, self._slave = pty.openpty()
        self._set_size()
        self.modes_before = self.modes()
        self.process = subprocess.Popen(
            ["env", "--default-signal", "setsid", "--ctty", *self._command],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave if self._errors is None else self._errors,
            env=self._env,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        self.hang_up()

    def _set_size(self) -> None:
        size = struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)

    def resize(self, width: int, height: int) -> None:
        """Make it another size, of which the program is told by SIGWINCH. What it has shown is gone."""
        self.screen.resize(height, width)
        self.screen.reset()
        self._set_size()

    def modes(self) -> list[Any]:
        """As tcgetattr gives them."""
        return termios.tcgetattr(self._slave)

    def press(self, keys: str) -> None:
        """As if typed."""
        os.write(self._master, keys.encode())

    def hang_up(self) -> None:
        """The terminal is gone."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def read(self, seconds: float) -> bool:
        """What is written within that time goes to the screen; False if it was nothing."""
        if self._master < 0 or not select.select([self._master], [], [], seconds)[0]:
            return False
        piece = os.read(self._master, 1 << 16)
        self.written += piece
        self._stream.feed(piece)
        return bool(piece)

    def rows(self) -> list[str]:
        """What stands on the screen."""
        return [row.rstrip() for row in self.screen.display]

    def await_text(self, pattern: str) -> list[str]:
        """The rows as soon as the pattern is found in them, and a frame is whole."""
        deadline = time.monotonic() + SECONDS
        while True:
            self.read(0.05)
            while self.read(0.02):
                pass
            if re.search(pattern, "\n".join(self.rows()), re.MULTILINE):
                return self.rows()
            assert time.monotonic() < deadline, (pattern, self.rows(), self.written[-2000:])
            assert self.process.poll() is None, (self.process.returncode, self.written[-2000:])

    def exit_code(self) -> int:
        """Of the program, whose end is waited for."""
        deadline = time.monotonic() + SECONDS
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < deadline, self.rows()
        while self.read(0):
            pass
        return self.process.returncode
