"""What a target on all CPUs gives back of a hit's cost: hits are made longer by a known time.

Each hit of the sampled level's probe waits a microsecond more, or doesn't. That is charged, since the programs time
themselves. Where threads wait for each other's memory, whatever slows them down makes them do so less: less than that
microsecond is then added to the target's CPU time.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

from bench.bill import COLUMNS, SETTLE_SECONDS, Measured, columns, measure
from bench.measurement import print_conditions, print_table
from bench.working import CHANNELS, ONE_CPU, working
from schedtrace import compilation
from schedtrace.bpf_text import source_text
from schedtrace.image import open_image
from schedtrace.procfs import open_process

LONGER_NS = 1000
_PLACE = "\t\tsample(ctx, &hit);\n"
_WAIT = f"""\
\t\t__u64 until_ns = bpf_ktime_get_ns() + {LONGER_NS};
\t\tfor (int i = 0; i < 200; i++)
\t\t\tif (bpf_ktime_get_ns() > until_ns)
\t\t\t\tbreak;
"""


def longer_text() -> str:
    """The BPF programs, with that wait."""
    text = source_text()
    assert text.count(_PLACE) == 1
    return text.replace(_PLACE, _WAIT + _PLACE)


def _measure(work: str, text: Callable[[], str]) -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="schedtrace-bench-") as folder,
        working(work, Path(folder)) as load,
        open_process(load.pid) as process,
        mock.patch.object(compilation, "source_text", text),
    ):
        time.sleep(SETTLE_SECONDS)
        image = open_image(process)
        try:
            return measure(load, replace(image, plan=image.plan.at_sampled_level()))
        finally:
            os.close(image.descriptor)


def main() -> None:
    print(f"A hit of the sampled level, as it is and {LONGER_NS} ns longer: what it took, and what it was charged with")
    print("(medians; what it took with the 95 % interval, what was charged with the middle half of the turns)")
    print_conditions()
    print()
    rows = []
    for work in (ONE_CPU, CHANNELS):
        usual, longer = (_measure(work, text) for text in (source_text, longer_text))
        for name, one in (("as they are", usual), ("longer", longer)):
            rows.append([f"{work}: {name}", *columns(one)])
        took = longer.took_ns - usual.took_ns
        rows.append(["  more", "", f"{took:+.0f}", f"{longer.charged_ns.median - usual.charged_ns.median:+.0f}"])
    print_table(["", *COLUMNS], rows)


if __name__ == "__main__":
    main()
