"""Where stops of the world can be seen in a binary: made for :mod:`schedtrace.plan`, used by recordings only.

``stopTheWorldWithSema`` begins one and ``startTheWorldWithSema`` ends it, whoever asks for it; no other can begin
meanwhile. The first is told why from Go 1.21 on, the second from Go 1.23 on when all had stopped (runtime/proc.go).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedtrace.abi import ProbeKind
from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import Site, calls_in, cheapest_site
from schedtrace.symbols.function import Function
from schedtrace.symbols.layout import NEWEST_MINOR, Layout
from schedtrace.symbols.pclntab import Pclntab

_TOLD_WHEN_STOPPED = 23  # Go 1.23
_TOLD_WHY = 21
_STOP, _START, _RESIZE = "stopTheWorldWithSema", "startTheWorldWithSema", "procresize"
NAMES = (_STOP, _START, _RESIZE, "schedinit")
"""Functions, without the package, that :func:`make_stops_plan` asks for."""


@dataclass(frozen=True)
class StopsPlan:
    """``sites``: function, kind and place of each probe. ``reasons``: why the world can be stopped, by number; none
    where the runtime doesn't tell. ``start_told``: is the function that starts it told when all had stopped?"""

    sites: tuple[tuple[str, ProbeKind, Site], ...]
    reasons: tuple[str, ...]
    start_told: bool


def make_stops_plan(
    binary: Binary, table: Pclntab, layout: Layout | None, functions: Mapping[str, Function]
) -> StopsPlan:
    """``functions``: those of :data:`NAMES` that there are. Raises NotTraceable, saying why, if stops can't be seen."""
    if layout is None or not 0 < layout.minor <= NEWEST_MINOR:
        raise NotTraceable(f"{binary.path}: of this version of the runtime it is not known how it stops the world")
    if missing := [name for name in NAMES if name not in functions]:
        raise NotTraceable(f"{binary.path}: the compiler left no function runtime.{missing[0]}")
    _refuse_copies(binary, table, functions)
    told = layout.minor >= _TOLD_WHEN_STOPPED
    sites = []
    for name, kind, arguments in (
        (_STOP, ProbeKind.STOP_WORLD, int(layout.minor >= _TOLD_WHY)),
        (_START, ProbeKind.START_WORLD, 4 if told else 0),
    ):
        site = cheapest_site(binary, functions[name], arguments)
        if site is None:
            raise NotTraceable(f"{binary.path}: no instruction of runtime.{name} is certain to run once a call")
        sites.append((functions[name].name, kind, site))
    return StopsPlan(tuple(sites), layout.stw_reasons, told)


def _refuse_copies(binary: Binary, table: Pclntab, functions: Mapping[str, Function]) -> None:
    """Whoever starts the world calls procresize, as nobody else but schedinit does: a call from elsewhere shows that
    startTheWorldWithSema was copied there. Where stopTheWorldWithSema was, stops have no beginning."""
    own = {functions[name].vaddr for name in (_START, "schedinit")}
    for segment in binary.segments:
        if not segment.executable:
            continue
        end = segment.vaddr + segment.file_size
        for vaddr in calls_in(binary, segment.vaddr, end, functions[_RESIZE].vaddr):
            function = table.function_at(vaddr)
            if function and function.vaddr not in own:
                raise NotTraceable(f"{binary.path}: the compiler copied runtime.{_START} into {function.name}")
