"""Damaged files: no exception but a SchedtraceError, no input over a second, no more than 200 MB.

5,000 inputs here; SCHEDTRACE_MUTATIONS=100000 in the environment, or `python -m tests.unit.mutations`, runs
more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.mutations import applied, mutation, seeds

COUNT = int(os.environ.get("SCHEDTRACE_MUTATIONS", "5000"))
MAX_MIB = 200


def test_damaged_files_are_refused_or_read_and_nothing_else() -> None:
    # A process of its own, so that its peak of memory is the readers'.
    command = [sys.executable, "-m", "tests.unit.mutations", "--count", str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["failures"] == []
    assert outcome["count"] == COUNT
    assert outcome["peak_mib"] < MAX_MIB
    # Both kinds, or the mutations test nothing: too weak to be noticed, or too strong to get past the
    # headers.
    assert 0.05 < outcome["accepted"] / COUNT < 0.95


def test_a_mutation_is_the_same_every_time_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for seed in seeds()[:3]:
        path.write_bytes(seed.image)
        for number in range(200):
            with applied(seed, mutation(seed, number), path):
                changed = path.read_bytes()
            assert path.read_bytes() == seed.image
            with applied(seed, mutation(seed, number), path):
                assert path.read_bytes() == changed
            assert path.stat().st_size == len(seed.image)
