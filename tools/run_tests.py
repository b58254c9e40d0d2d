"""``make test``: all tests; where BPF can't be loaded, those that don't need it, and a line on the rest."""

import subprocess
import sys

from tools import kernel_access


def main() -> int:
    missing = kernel_access.missing()
    if missing and kernel_access.required():
        print(f"tests/kernel can't run, and may not be left out here: {missing}", file=sys.stderr)
        return 1
    folders = ["tests/unit"] if missing else ["tests/unit", "tests/kernel"]
    status = subprocess.call([sys.executable, "-m", "pytest", *folders])
    if missing:
        print(f"left out: tests/kernel, because {missing}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
