"""``make test``: the tests; where BPF can't be loaded, those that don't need it, and a line on the rest.

Given folders as arguments (``make e2e``, ``make cgroup2``), the tests of those.
"""

import subprocess
import sys
from collections.abc import Sequence

from tools import kernel_access

WITHOUT_KERNEL = ("tests/unit", "tests/browser")
WITH_KERNEL = ("tests/kernel", "tests/e2e")
CHANGES_THE_NODE = "tests/cgroup2"  # for a while, and a node may have its cgroups in use: on request only


def main(argv: Sequence[str] | None = None) -> int:
    wanted = (sys.argv[1:] if argv is None else argv) or (*WITHOUT_KERNEL, *WITH_KERNEL)
    missing = kernel_access.missing()
    left_out = [folder for folder in wanted if missing and folder in (*WITH_KERNEL, CHANGES_THE_NODE)]
    if left_out and kernel_access.required():
        print(f"{', '.join(left_out)} can't run, and may not be left out here: {missing}", file=sys.stderr)
        return 1
    folders = [folder for folder in wanted if folder not in left_out]
    status = subprocess.call([sys.executable, "-m", "pytest", *folders]) if folders else 0
    if left_out:
        print(f"left out: {', '.join(left_out)}, because {missing}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
