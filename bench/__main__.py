"""All benches, one after the other: `make bench`. Takes two hours and a quarter, and writes to standard output only.

With --write, also into the documents whose figures they are: `make bench-docs`. Names of benches: those alone.
"""

import argparse
import subprocess
import sys
import time

from bench import documents
from bench.measurement import BenchError
from tools import kernel_access
from tools.toolchains import ToolchainError


def _output(name: str) -> str:
    """What a bench prints, which is also shown as it comes. A process each: none finds what another has left."""
    command = [sys.executable, "-m", f"bench.{name}"]
    print(f"\n$ python -m bench.{name}", flush=True)
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=documents.ROOT) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        raise BenchError(f"bench.{name} failed")
    return "\n".join(lines)


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true", help="also into docs/performance.md and README.md")
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the benches that the documents show")
    options = parser.parse_args()
    if missing := kernel_access.missing():
        print(f"bench: {missing}", file=sys.stderr)
        return 77
    start = time.monotonic()
    try:
        if options.write:
            documents.write(_output, only=options.names)
        else:
            shown = [name for path in documents.DOCUMENTS for name in documents.benches_named(path.read_text())]
            for name in options.names or dict.fromkeys(shown):
                _output(name)
    except (BenchError, ToolchainError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
