"""Totals per series that outlive the processes they came from, so that no counter goes backwards.

An account is kept while a process counts into it or its pod lives (while the pod's cgroup directory exists: a crashing
container's is gone between two runs). Then it is shown once more, and dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from schedtrace.series import NOTHING, Labels, SeriesTotals, TargetInfo

MOST_NAMES = 100
"""Process names that one container can have accounts for."""


@dataclass(frozen=True)
class Owner:
    """Whose account it is: cgroup directories of the container, and of the pod, whose life keeps the account. ``life``
    is empty where no directory tells (a process of the host in the root cgroup): its processes alone keep it."""

    container: str
    life: str


@dataclass
class Account:
    """What has been paid in by processes that ended and cgroups that are gone, and who owns it now."""

    totals: SeriesTotals = NOTHING
    infos: set[TargetInfo] = field(default_factory=set)
    has_throttling: bool = False
    throttled_ns: int = 0
    containers: dict[str, int] = field(default_factory=dict)
    """Living container cgroups -> throttled time in ns when last read."""
    lives: set[str] = field(default_factory=set)
    shown_last: bool = False

    def pod_lives(self) -> bool:
        """Is there a directory still whose life keeps it?"""
        self.lives = {directory for directory in self.lives if Path(directory).is_dir()}
        return bool(self.lives)

    def refresh_throttling(self, read: Callable[[str], int | None]) -> int | None:
        """Time that its container cgroups have been throttled, in ns, those that are gone included; None if it was
        never known. ``read``: the counter of a cgroup directory, None if it can't be read (any more)."""
        for directory, before in list(self.containers.items()):
            now = read(directory)
            if now is not None:
                self.has_throttling = True
                self.containers[directory] = now
            elif not Path(directory).exists():
                self.throttled_ns += before
                del self.containers[directory]
        return self.throttled_ns + sum(self.containers.values()) if self.has_throttling else None


class Accounts:
    """Accounts by labels."""

    def __init__(self) -> None:
        self._accounts: dict[Labels, Account] = {}
        self._names = Counter[tuple[str, str, str]]()
        """How many accounts each container has."""

    def open(self, labels: Labels, owner: Owner, info: TargetInfo) -> None:
        """A process in ``owner`` counts into ``labels`` from now on."""
        account = self._account(labels)
        if owner.container:
            account.containers.setdefault(owner.container, 0)
        if owner.life:
            account.lives.add(owner.life)
        account.infos.add(info)
        account.shown_last = False

    def has_room_for(self, labels: Labels) -> bool:
        """May a process have these labels? Whoever can copy an executable can invent names without end: a container
        gets so many."""
        return labels in self._accounts or self._names[_container(labels)] < MOST_NAMES

    def _account(self, labels: Labels) -> Account:
        if labels not in self._accounts:
            self._accounts[labels] = Account()
            self._names[_container(labels)] += 1
        return self._accounts[labels]

    def pay_in(self, labels: Labels, totals: SeriesTotals) -> None:
        """A process has ended, or counts into other labels from now on: this is what it did."""
        account = self._account(labels)
        account.totals = account.totals + totals

    def for_scrape(self, alive: Collection[Labels]) -> Iterator[tuple[Labels, Account]]:
        """The accounts to show, by labels. ``alive``: labels that living processes count into. Accounts that have lost
        their last owner are among them once, and are dropped by the next call."""
        for labels, account in sorted(self._accounts.items()):
            if labels not in alive and not account.pod_lives():
                if account.shown_last:
                    del self._accounts[labels]
                    self._names -= Counter([_container(labels)])  # without those that have none left
                    continue
                account.shown_last = True
            yield labels, account


def _container(labels: Labels) -> tuple[str, str, str]:
    return labels.namespace, labels.pod, labels.container
