"""Which processes the agent watches: globs over namespace, pod, container and process name. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from schedtrace.errors import SchedtraceError
from schedtrace.series import Labels

_PARTS = 4


class BadSelection(SchedtraceError):
    """A pattern that can't be understood."""

    exit_code = 2


@dataclass(frozen=True)
class Selection:
    """What ``--select`` names; everything without patterns."""

    patterns: tuple[tuple[str, str, str, str], ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Selection:
        """Patterns NAMESPACE/POD/CONTAINER/PROCESS; parts left out at the end match all. Raises BadSelection."""
        patterns = []
        for text in texts:
            parts = text.split("/")
            if len(parts) > _PARTS or not all(parts):
                raise BadSelection(f"{text!r} is no NAMESPACE/POD/CONTAINER/PROCESS: give one to four globs")
            namespace, pod, container, process = parts + ["*"] * (_PARTS - len(parts))
            patterns.append((namespace, pod, container, process))
        return cls(tuple(patterns))

    @property
    def everything(self) -> bool:
        """Is no process left out?"""
        return not self.patterns or ("*",) * _PARTS in self.patterns

    def __contains__(self, labels: Labels) -> bool:
        parts = (labels.namespace, labels.pod, labels.container, labels.process)
        return not self.patterns or any(
            all(fnmatchcase(part, glob) for part, glob in zip(parts, pattern, strict=True))
            for pattern in self.patterns
        )
