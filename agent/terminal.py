"""A terminal taken over as a whole: its other screen, keys as they are pressed, and both given back however it ends.

Nothing is drawn and no mode is set while the terminal belongs to another job. Ctrl-Z gives it back before this process
stops, and Ctrl-\\ before it is killed.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.control import Control
from rich.screen import Screen
from rich.text import Text

from schedtrace.streams import is_ours

_KEY_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;<=>?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)
"""What an arrow, a function key or Alt with a key sends, of which no byte is a key of its own."""
_USUAL_SIZE = (80, 24)
_DRAIN_SECONDS = 2.0  # after that, a terminal is taken for one that nobody reads any more


def keys_in(text: str) -> str:
    """The plain keys in what a terminal has sent."""
    return _KEY_SEQUENCE.sub("", text)


class Terminal:
    """The terminal on standard output, from ``with`` to its end. Keys come from standard input, if that is one, too.

    Signals that end the session must not raise anything meanwhile: a terminal half taken would stay so.
    """

    def __init__(self, console: Console) -> None:
        """``console`` writes to standard output."""
        self._console = console
        self._output = sys.stdout.fileno()
        self._input = 0 if os.isatty(0) else None
        self._modes: list[Any] | None = None
        self._taken = False
        self._drawn_size: tuple[int, int] | None = None
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}

    @property
    def has_keys(self) -> bool:
        """Is there a keyboard?"""
        return self._input is not None

    def __enter__(self) -> Self:
        ours = [signal.SIGTSTP, signal.SIGCONT, signal.SIGQUIT]
        wanted = [number for number in ours if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._remember) for number in wanted}
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # it is gone; who writes next finds out
            self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        """Done in :meth:`attend`: here, a line may be half written."""
        self._signals.append(number)

    def _take(self) -> None:
        if self._input is not None:
            with suppress(termios.error):
                self._modes = self._modes or termios.tcgetattr(self._input)
                modes = termios.tcgetattr(self._input)
                modes[tty.LFLAG] &= ~(termios.ICANON | termios.ECHO)
                modes[tty.IFLAG] &= ~termios.IXON  # else Ctrl-S would have us wait for Ctrl-Q in the middle of a frame
                modes[tty.CC][termios.VMIN], modes[tty.CC][termios.VTIME] = 1, 0
                termios.tcsetattr(self._input, termios.TCSANOW, modes)
        self._taken, self._drawn_size = True, None
        with self._console:
            self._console.set_alt_screen(True)
            self._console.show_cursor(False)

    def _give_back(self) -> None:
        """The modes first: they can be set where nothing can be written."""
        if not self._taken:
            return
        if self._input is not None and self._modes is not None:
            with suppress(termios.error):
                termios.tcflush(self._input, termios.TCIFLUSH)  # keys meant for us
                termios.tcsetattr(self._input, termios.TCSANOW, self._modes)
        if self._takes_output(_DRAIN_SECONDS):
            with self._console:
                self._console.show_cursor(True)
                self._console.set_alt_screen(False)
        self._taken = False

    def _takes_output(self, seconds: float) -> bool:
        return bool(select.select([], [self._output], [], seconds)[1])

    def attend(self) -> None:
        """Do what signals ask for that have come: stop, be killed, go on. To be called often."""
        signals, self._signals = self._signals, []
        for number in signals:
            if number == signal.SIGCONT:
                self._taken = False  # a shell has had it meanwhile
                continue
            self._give_back()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, self._remember)  # goes on here after a stop
        if not self._taken and is_ours(self._output):
            self._take()

    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        columns, rows = os.get_terminal_size(self._output)
        return columns or _USUAL_SIZE[0], rows or _USUAL_SIZE[1]

    def needs_frame(self) -> bool:
        """Is it of another size than the last frame, or was it given back since?"""
        return self._taken and self._drawn_size != self.size()

    def draw(self, text: Text, size: tuple[int, int]) -> None:
        """Put a frame made for this size over the one before, with one write. Nothing is erased before: that would
        flicker. A terminal that takes nothing at the moment misses the frame."""
        if not self._taken or not self._takes_output(0):
            return
        self._console.size = size
        with self._console:
            self._console.control(Control.home())
            self._console.print(Screen(text, application_mode=True), end="")
        self._drawn_size = size

    def pressed(self) -> str:
        """The keys pressed since the last call."""
        if self._input is None or not self._taken or not select.select([self._input], [], [], 0)[0]:
            return ""
        try:
            read = os.read(self._input, 4096)
        except OSError:
            read = b""
        if not read:  # it has hung up
            self._input = None
        return keys_in(read.decode("latin-1"))
