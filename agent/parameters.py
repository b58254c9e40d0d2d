"""What the command line's options and arguments are made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from schedtrace.condition import Condition

MOST_SECONDS = 1e9
"""What becomes a number of nanoseconds must have an end."""
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Examples(click.Command):
    """A command whose help ends with examples, as those of the BCC tools do."""

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self._examples:
            with formatter.section("Examples"):
                formatter.write_dl([(f"schedtrace {command}", what) for command, what in self._examples])


class Seconds(click.FloatRange):
    """A number, which "nan" is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if seconds != seconds:
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return seconds


class Size(click.ParamType[int]):
    """A number of bytes: 100M."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([0-9]{1,9})([KMG])", str(value).upper())
        size = int(found[1]) * _UNITS[found[2]] if found else 0
        if size < _UNITS["M"]:
            self.fail(f"{value!r} is no size of at least 1M (K, M, G).", param, ctx)
        return size


class When(click.ParamType["Condition"]):
    """A condition: latency>50ms."""

    name = "condition"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Condition:
        from schedtrace.condition import Condition

        try:
            return Condition.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
