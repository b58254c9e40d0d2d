"""Programs to watch in a bench."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_copy(program: Path) -> Iterator[Path]:
    """A copy of a program that nobody else runs or probes: uprobes belong to a file, whoever runs it."""
    with tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as folder:
        yield Path(shutil.copy(program, folder))
