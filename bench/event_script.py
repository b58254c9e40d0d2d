"""A plain BCC script, as one would write it without schedtrace: probes by function name, each call an event for Python.

``python -m bench.event_script PROGRAM`` says "attached" when the probes are in, counts events until its standard input
ends, and prints how many it got and how many were lost since it was too slow. :func:`attached` runs it.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

from bench.bpftrace import THREE
from bench.measurement import BenchError
from schedtrace import uprobe_multi, uprobe_pmu
from schedtrace.bpf_text import FOLDER
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.symtab import Symtab

ROOT = Path(__file__).parents[1]
PAGES = 256
"""Of each CPU's buffer: 1 MB."""
POLL_MS = 100
_ATTACHED = "attached"


def file_offsets(program: Path, functions: tuple[str, ...]) -> dict[str, int]:
    """Where the first instruction of each function is in the file. Raises BenchError."""
    with Binary.open(program) as binary:
        symtab = Symtab.read(binary)
        found = symtab.functions_named(functions) if symtab else {}
        offsets = {name: binary.file_offset(function.vaddr) for name, function in found.items()}
    if len(offsets) < len(functions):
        raise BenchError(f"{program} has no symbols of {', '.join(functions)}")
    return offsets


def main() -> None:
    """The script."""
    import bcc  # noqa: TID251 (no session's programs)

    program = Path(sys.argv[1])
    os.environ["BCC_KERNEL_SOURCE"] = str(FOLDER / "headers")
    bpf = bcc.BPF(text=Path(__file__).with_suffix(".c").read_bytes(), cflags=[f"-I{FOLDER}"])
    # BCC 0.26 hands its own library too few arguments for a uprobe, so the probes are put in without it.
    multi = uprobe_multi.refusal() == 0
    for name, offset in file_offsets(program, THREE).items():
        handler = f"on_{name.rpartition('.')[2]}".encode()
        fd = bpf.load_func(handler, bcc.BPF.KPROBE, attach_type=uprobe_multi.ATTACH_TYPE if multi else -1).fd
        if multi:
            uprobe_multi.attach(fd, str(program), (offset,))
        else:
            uprobe_pmu.attach(fd, str(program), offset)
    counts = {"events": 0, "lost": 0}
    events = bpf[b"events"]

    def event(_cpu: int, data: int, _size: int) -> None:
        events.event(data)  # its fields, as a script that does anything with them needs
        counts["events"] += 1

    def lost(count: int) -> None:
        counts["lost"] += count

    events.open_perf_buffer(event, page_cnt=PAGES, lost_cb=lost)
    print(_ATTACHED, flush=True)
    while not select([0], [], [], 0)[0]:
        bpf.perf_buffer_poll(POLL_MS)
    print(json.dumps(counts), flush=True)
    os._exit(0)  # the kernel takes the probes out


@contextmanager
def attached(program: Path, seen: Counter[str]) -> Iterator[None]:
    """The script on that program, in whatever process, for as long as the block; what it got ("events") and what was
    "lost" is added to ``seen``. Raises BenchError."""
    command: list[str | Path] = [sys.executable, "-m", "bench.event_script", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout
        if process.stdout.readline().strip() != _ATTACHED:
            raise BenchError("the BCC script did not attach")
        yield
        output, _ = process.communicate("", timeout=60)
        counts = json.loads(output)
        seen.update(counts)
        if not counts["events"]:
            raise BenchError(f"the BCC script saw nothing: {output}")
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
