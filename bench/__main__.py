"""All benches, one after the other: `make bench`. Takes almost half an hour and writes to standard output only."""

import sys
import time

from bench import (
    against_bpftrace,
    agent_budget,
    agent_scale,
    attach_time,
    export,
    hit_cost,
    http,
    nats,
    record,
    switch_cost,
)
from bench.measurement import BenchError
from tools import kernel_access
from tools.toolchains import ToolchainError

BENCHES = (
    *(hit_cost.main, switch_cost.main, against_bpftrace.main, http.main, nats.main, attach_time.main, record.main),
    *(export.main, agent_scale.main, agent_budget.main),
)


def main() -> int:
    if missing := kernel_access.missing():
        print(f"bench: {missing}", file=sys.stderr)
        return 77
    start = time.monotonic()
    try:
        for bench in BENCHES:
            bench()
            print("\n", flush=True)
    except (BenchError, ToolchainError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
