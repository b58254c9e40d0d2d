"""Where the Go runtime keeps what the probes read: offsets in its structs, and what its reason numbers mean.

First choice is the target's own DWARF. Without it, a table by minor version (layouts.json), which ``make
layouts`` regenerates from the DWARF of small programs, one per toolchain and architecture. Within one minor
version the structs used here are the same in all patch releases that were looked at, except that ``m`` grew
between 1.24.3 and 1.24.11 behind the fields used here up to ``m.spinning``.

Entries for 1.17, 1.18 and 1.20 are marked unverified: those toolchains can't be had prebuilt any more, the
numbers were taken once from builds of their sources.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from schedtrace.symbols.binary import Binary
from schedtrace.symbols.buildinfo import GoVersion
from schedtrace.symbols.dwarf import read_structs

# Struct -> the fields that are recorded. A dotted path goes through an embedded struct.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "g": (
        "stack.lo", "stack.hi", "m", "sched.sp", "sched.pc", "sched.bp", "syscallsp", "syscallpc",
        "syscallbp", "atomicstatus", "goid", "schedlink", "waitsince", "waitreason", "preempt",
        "preemptStop", "lockedm", "parentGoid", "gopc", "startpc", "waiting", "timer", "sleepWhen", "coroarg",
        "coroexit", "bubble",
    ),
    "m": ("g0", "procid", "gsignal", "curg", "p", "id", "locks", "spinning", "alllink", "lockedg"),
    "p": (
        "id", "status", "schedtick", "syscalltick", "m", "runqhead", "runqtail", "runq", "runnext", "preempt",
        "gcMarkWorkerMode", "gFree.n", "gFree.size",
    ),
    "schedt": (
        "lock", "nmidle", "nmidlelocked", "mnext", "maxmcount", "nmsys", "nmfreed", "ngsys", "npidle", "nmspinning",
        "needspinning", "nGsyscallNoP", "runq.head", "runq.tail", "runq.size", "runqsize", "gFree.n",
        "gFree.stack.size", "gFree.noStack.size", "gcwaiting", "stopwait",
        "timeToRun", "idleTime", "totalMutexWaitTime", "stwStoppingTimeGC", "stwStoppingTimeOther",
        "stwTotalTimeGC", "stwTotalTimeOther", "goroutinesCreated",
    ),
    "timeHistogram": ("counts", "underflow", "overflow"),
    "mstats": ("numgc", "numforcedgc", "pause_total_ns", "last_gc_nanotime", "enablegc", "gcPauseDist"),
    "gcControllerState": (
        "memoryLimit", "gcPercentHeapGoal", "sweepDistMinTrigger", "triggered", "lastHeapGoal", "heapMarked",
        "heapInUse", "heapFree", "totalAlloc", "totalFree", "mappedReady",
    ),
    "timer": ("when", "period"),
    "gobuf": ("sp", "pc", "g", "bp"),
    "coro": ("gp", "f"),
    "gList": ("head", "size"),
}  # fmt: skip

# Without these a probe could not follow a goroutine.
_NEEDED = ("g.atomicstatus", "g.waitreason", "g.startpc", "g.schedlink")
OLDEST_MINOR, NEWEST_MINOR = 17, 27


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes as ``offsets["g.atomicstatus"]``, sizes in bytes as ``sizes["g"]``; absent where the
    version has no such field. Reasons are indexed by their number.

    ``minor`` is 0 if nothing says which version it is. ``source``: "dwarf", "table" or "table
    (unverified)"; ``wait_reasons_source``: "target" or "table".
    """

    minor: int
    source: str
    toolchain: str  # the release that the offsets are from
    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    wait_reasons: tuple[str, ...]
    wait_reasons_source: str
    stw_reasons: tuple[str, ...]


def layout_of(binary: Binary, version: GoVersion | None, wait_reasons: tuple[str, ...] = ()) -> Layout | None:
    """The layout of ``binary``'s runtime; None if it has no DWARF and its version is not in the table.

    ``wait_reasons`` is the target's own table if it could be read (see :mod:`schedtrace.symbols.reasons`).
    """
    table = _table().get(str(version.minor)) if version else None
    reasons_source = "target" if wait_reasons else "table"
    reasons = wait_reasons or (tuple(table["wait_reasons"]) if table else ())
    stops = tuple(table["stw_reasons"]) if table else ()
    offsets, sizes = read_offsets(binary)
    minor, release = (version.minor, version.text) if version else (0, "unknown")
    if all(name in offsets for name in _NEEDED):
        return Layout(minor, "dwarf", release, offsets, sizes, reasons,
                      reasons_source, stops)  # fmt: skip
    if table is None:
        return None
    entry = {
        kind: {**table[kind], **table.get(binary.arch.value, {}).get(kind, {})}
        for kind in ("offsets", "sizes")
    }
    return Layout(
        minor=minor,
        source="table" if table["verified"] else "table (unverified)",
        toolchain=table["toolchain"],
        offsets=dict(entry["offsets"]),
        sizes=dict(entry["sizes"]),
        wait_reasons=reasons,
        wait_reasons_source=reasons_source,
        stw_reasons=stops,
    )


def read_offsets(binary: Binary) -> tuple[dict[str, int], dict[str, int]]:
    """Offsets and sizes of everything in FIELDS that the binary's DWARF describes; empty if it has none."""
    structs = read_structs(binary, {f"runtime.{name}": fields for name, fields in FIELDS.items()})
    offsets, sizes = {}, {}
    for qualified, struct in structs.items():
        name = qualified.removeprefix("runtime.")
        sizes[name] = struct.size
        offsets.update({f"{name}.{field}": offset for field, offset in struct.offsets.items()})
    return offsets, sizes


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    text = resources.files("schedtrace.symbols").joinpath("layouts.json").read_text("utf-8")
    versions: dict[str, Any] = json.loads(text)["versions"]
    return versions
