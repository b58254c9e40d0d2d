"""``schedtrace export`` as a command: where the output goes, and what is said beside it."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from schedtrace.errors import SchedtraceError
from schedtrace.exported import Write, losses, shown
from schedtrace.recording import Recording
from schedtrace.stopping import stop_signals
from schedtrace.timeline import Timeline

STANDARD_OUTPUT = "-"
_READS = {"html": 3}
_OTHER_READS = 2
"""How often the recording is read for a format."""


def export(path: str, form: str, output: str) -> None:
    """Write the recording at ``path`` in a format ("perfetto", "chrome", "csv", "html") to ``output``. What it should
    hold and doesn't is said on standard error. Raises UnreadableRecording; SchedtraceError if the output can't be
    written: then there is none."""
    if output == STANDARD_OUTPUT and form == "perfetto" and sys.stdout.isatty():
        raise SchedtraceError("a Perfetto trace is nothing for a terminal: give a file with -o")
    with stop_signals(), Recording.open(path) as recording:
        if output != STANDARD_OUTPUT and _is_same_file(path, output):
            raise SchedtraceError(f"{output}: that is the recording itself")
        try:
            with _progress(recording.event_count * _READS.get(form, _OTHER_READS)) as advance, _output(output) as out:
                timeline = Timeline(recording, advance)
                _writer(form)(recording, timeline, out)
        except ModuleNotFoundError as error:
            raise SchedtraceError(f"--format {form} needs the Python module {error.name}: install it") from None
    for remark in losses(recording, timeline):
        print(f"schedtrace: {path}: {shown(remark)}", file=sys.stderr)


def _writer(form: str) -> Callable[[Recording, Timeline, Write], None]:
    """What writes a format, with the libraries that it needs and others don't."""
    match form:
        case "perfetto":
            from schedtrace.export_perfetto import write
        case "chrome":
            from schedtrace.export_chrome import write
        case "csv":
            from schedtrace.export_csv import write
        case _:
            from schedtrace.export_html import write
    return write


def _is_same_file(path: str, output: str) -> bool:
    try:
        return os.path.samefile(path, output)  # noqa: PTH121
    except OSError:
        return False


class _OutputError(Exception):
    """What the system says when the output is written, not when the recording is read."""


@contextmanager
def _output(path: str) -> Iterator[Write]:
    """Something to write to. A file is there under its name when it is whole, and not before."""
    if path == STANDARD_OUTPUT:
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    try:
        with _opened(path) as write:
            yield write
    except _OutputError as error:
        raise SchedtraceError(f"{path}: can't be written: {error}") from None


@contextmanager
def _opened(path: str) -> Iterator[Write]:
    with _as_output_error():
        is_special = os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH110, PTH116
        if is_special:
            file, name = open(path, "wb"), ""  # noqa: PTH123, SIM115
        else:
            descriptor, name = tempfile.mkstemp(prefix=".schedtrace-", dir=Path(path).parent)
            file = open(descriptor, "wb")  # noqa: PTH123, SIM115
    try:

        def write(content: bytes) -> None:
            with _as_output_error():
                file.write(content)

        yield write
        with _as_output_error():
            file.close()
            if name:
                os.chmod(name, 0o666 & ~_umask())  # noqa: PTH101
                os.replace(name, path)  # noqa: PTH105
                name = ""
    finally:
        with suppress(OSError):
            file.close()
        if name:
            with suppress(OSError):
                os.unlink(name)  # noqa: PTH108


@contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputError(error.strerror) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _progress(events: int) -> Iterator[Callable[[int], object]]:
    """A bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("exporting"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=events)
        yield lambda count: progress.advance(task, count)
