"""Counts of many processes read in bulk, against one by one."""

import ctypes
import errno
import time

import numpy as np
import pytest

from schedtrace import abi
from schedtrace.compilation import Compilation, Sizes
from schedtrace.session import Session
from tests.workload import Workload, binary

PROCESSES = 40
"""More than are read at once."""


def test_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them busy, most idle; on kernels that read per-CPU maps in bulk and on others."""
    sizes = Sizes(targets=PROCESSES + 1)
    with (
        Session(Compilation(sizes), ()) as session,
        Workload(binary("offcpu"), "-procs", 3, "-compute", 4) as target,
    ):
        threads = session.threads
        idle = list(range(1 << 22, (1 << 22) + PROCESSES))  # no process has such a number
        for pid in (*idle[:-3], target.pid, *idle[-3:]):
            threads.watch(pid, abi.Process())
        target.run()
        threads.unwatch([target.pid])
        time.sleep(0.1)
        found = threads.snapshots()
        assert {*found} == {*idle, target.pid}
        for pid in found:
            assert found[pid].stats.tobytes() == threads.snapshot(pid).stats.tobytes()
        assert found[target.pid].switches > 10
        assert not any(np.frombuffer(found[pid].stats.tobytes(), np.uint64).any() for pid in idle)
        again = threads.snapshots()
        assert all(again[pid] is found[pid] for pid in found)

        def too_old(*_: object) -> int:
            ctypes.set_errno(errno.ENOTSUP)
            return -1

        with monkeypatch.context() as patched:
            patched.setattr(session._maps._lib, "bpf_lookup_batch", too_old)
            old = threads.snapshots()
        assert all(old[pid] is found[pid] for pid in found)
        assert threads.retire([target.pid])[target.pid].switches == found[target.pid].switches
