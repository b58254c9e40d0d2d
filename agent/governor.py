"""How much each target may be watched, so that it costs at most a share of the CPU time that it uses itself. Pure.

A target is watched in windows: for a while its probes are in, then they are out again. Each has an account of CPU time
that grows with what it uses (and a little with time, so that idle ones are seen, too) and pays for its windows: for the
hits of its probes, and for the CPU time that the agent takes to open and to close them, to which the processes of a
group contribute by what they have. A window is opened when the accounts of all processes in it hold what it is expected
to cost, judging by the last one; the first of a process is short. A limit of hits, which the kernel holds, ends a
window that turns out dearer; what it has cost too much is a debt, which is paid before the next.

A window has a level, sampled or full. The two take turns, and a sampled one leaves half of what the account holds: it
sees for longer at the same price, and full sees more. Where full costs so little that its windows are as long as any
may be, there is nothing to sample; where an account can never hold what the shortest would cost, there is nothing else.

Times are in nanoseconds of any clock that doesn't go back. Targets and groups are whatever can be a key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

SECOND = 1_000_000_000
MS = 1_000_000
_Group = TypeVar("_Group", bound=Hashable)

Level = Literal["sampled", "full"]
"""How a process is watched in a window."""

End = Literal["complete", "budget", "exit", "no_budget"]
"""How windows end: their time is over; hits reached the limit; no process is left. Or there was none for long, since it
costs too much."""


@dataclass(frozen=True)
class Policy:
    """What the governor goes by. ``fraction``: of a target's CPU time that watching may cost."""

    fraction: float
    floor_ns_per_second: float = 30_000
    """What an account grows by even if its target does nothing: 0.003 % of a CPU."""
    margin: float = 0.7
    """So much of the budget is planned with: what a hit costs is an estimate, and those between a window's end and that
    of the breakpoints aren't all counted."""
    first_ns: int = 100 * MS
    shortest_ns: int = 100 * MS
    longest_ns: int = 60 * SECOND
    sampled_part: float = 0.5
    """So much of what an account holds a sampled window may take, where there are full ones as well."""
    kept_seconds: float = 60.0
    """An account holds at most what it gains in that time..."""
    kept_openings: float = 6.0
    """...or what it takes to open and close so many windows, if that is more."""
    worthwhile: float = 2.0
    """A window shorter than the longest should cost at least so many times what it takes to open and close it."""
    storm: float = 2.0
    """A window is ended when it costs so many times what was expected..."""
    storm_ns: int = 5 * MS
    """...and that, or what the account holds..."""
    storm_least_ns: int = 2 * MS
    """...but not before that."""
    open_at_once: int = 4
    """So many windows may be open, or a quarter of all there could be."""
    starved_ns: int = 600 * SECOND
    postponed_ns: int = 60 * SECOND


@dataclass
class _Account:
    """Of a target. ``rates``: what a second of watching cost in the last window of a level, in ns."""

    at_ns: int
    cpu_ns: int
    tokens_ns: float = 0.0
    gain_per_second: float = 0.0
    rates: dict[Level, float] = field(default_factory=dict)


@dataclass
class _Turn:
    """Of a group: since when it waits for a window, and the level of the next if it may have any."""

    since_ns: int
    level: Level = "full"
    starved: bool = False
    not_before_ns: int = 0


@dataclass(frozen=True)
class Opening:
    """A window to open: for so long, and with hits that cost each target so much at most."""

    group: Hashable
    level: Level
    duration_ns: int
    limits_ns: Mapping[Hashable, float]


@dataclass
class Governor:
    """Decides, and keeps the accounts. ``ends``: how many windows of a level ended how."""

    policy: Policy
    opening_ns: float = 5 * MS
    """CPU time of the agent to open a window and close it, learnt."""
    ends: Counter[tuple[Level, End]] = field(default_factory=Counter)
    _accounts: dict[Hashable, _Account] = field(default_factory=dict)
    _turns: dict[Hashable, _Turn] = field(default_factory=dict)

    def add(self, target: Hashable, now_ns: int, cpu_ns: int) -> None:
        """A target that has used ``cpu_ns`` of CPU time since it began, all of which counts."""
        self._accounts[target] = _Account(now_ns, 0)
        self.earn(target, now_ns, cpu_ns)

    def remove(self, target: Hashable) -> None:
        """It is gone."""
        self._accounts.pop(target, None)

    def keep_groups(self, groups: Iterable[Hashable]) -> None:
        """Others than these are gone."""
        there = set(groups)
        self._turns = {group: turn for group, turn in self._turns.items() if group in there}

    def postpone(self, group: Hashable, now_ns: int) -> None:
        """Its window could not be opened: not again for a while."""
        level = self._turns[group].level if group in self._turns else "full"
        self._turns[group] = _Turn(now_ns, level, not_before_ns=now_ns + self.policy.postponed_ns)

    def tokens_ns(self, target: Hashable) -> float:
        """What its account holds."""
        return self._accounts[target].tokens_ns

    def earn(self, target: Hashable, now_ns: int, cpu_ns: int) -> None:
        """A target has used so much CPU time until now."""
        account, policy = self._accounts[target], self.policy
        seconds = (now_ns - account.at_ns) / SECOND
        gain = policy.fraction * policy.margin * max(cpu_ns - account.cpu_ns, 0) + policy.floor_ns_per_second * seconds
        if seconds > 0:
            account.gain_per_second = gain / seconds
        account.at_ns, account.cpu_ns = now_ns, cpu_ns
        # What is there already stays: a target that was busy has paid for it.
        account.tokens_ns = max(min(account.tokens_ns + gain, self._most_ns(account)), account.tokens_ns)

    def _most_ns(self, account: _Account) -> float:
        policy = self.policy
        return max(account.gain_per_second * policy.kept_seconds, self.opening_ns * policy.kept_openings)

    def choose(
        self,
        waiting: Mapping[_Group, Collection[Hashable]],
        levels: Callable[[_Group], Collection[Level]],
        now_ns: int,
        open_windows: int,
        groups: int,
    ) -> list[Opening]:
        """Which windows to open now, of the groups that have none: those that have waited longest first. ``levels``:
        what a group may have; ``groups``: of all there are, the number."""
        room = max(self.policy.open_at_once, groups // 4) - open_windows
        for group in waiting:
            self._turns.setdefault(group, _Turn(now_ns))
        openings: list[Opening] = []
        for group in sorted(waiting, key=lambda each: self._turns[each].since_ns):
            if len(openings) >= min(room, self.policy.open_at_once):
                break
            turn = self._turns[group]
            if now_ns < turn.not_before_ns:
                continue
            possible = sorted(levels(group), key=lambda level: level != turn.level)
            level = next((level for level in possible if self._can_ever_pay(waiting[group], level)), turn.level)
            opening = None
            if possible:
                opening = self._opening(group, waiting[group], level, alone=len(possible) == 1)
            if opening:
                turn.since_ns, turn.starved = now_ns, False
                cut = opening.duration_ns < self.policy.longest_ns
                turn.level = "sampled" if opening.level == "full" and cut else "full"
                openings.append(opening)
            elif possible and not turn.starved and now_ns - turn.since_ns > self.policy.starved_ns:
                turn.starved = True
                self.ends[level, "no_budget"] += 1
        return openings

    def _can_ever_pay(self, targets: Collection[Hashable], level: Level) -> bool:
        """Could the accounts of all hold what the shortest window is expected to cost?"""
        accounts = {target: self._accounts[target] for target in targets if target in self._accounts}
        shares = self._shares(accounts, self.opening_ns)
        shortest_seconds = self.policy.shortest_ns / SECOND
        return all(
            self._most_ns(account) >= account.rates.get(level, 0) * shortest_seconds + shares[target]
            for target, account in accounts.items()
        )

    def _opening(
        self, group: Hashable, targets: Collection[Hashable], level: Level, *, alone: bool
    ) -> Opening | None:
        """``alone``: the group has no windows of another level."""
        policy = self.policy
        accounts = {target: self._accounts[target] for target in targets if target in self._accounts}
        if not accounts:
            return None
        shares = self._shares(accounts, self.opening_ns)
        part = 1.0 if alone or level == "full" else policy.sampled_part
        known = all(level in account.rates for account in accounts.values())
        duration = float(policy.longest_ns if known else policy.first_ns)
        worthwhile = not known
        for target, account in accounts.items():
            left = part * account.tokens_ns - shares[target]
            if left <= 0:
                return None
            duration = min(duration, left / max(account.rates.get(level, 0), 1) * SECOND)
            worthwhile |= left >= policy.worthwhile * self.opening_ns
        if duration < policy.shortest_ns or not (worthwhile or duration >= policy.longest_ns):
            return None
        limits_ns: dict[Hashable, float] = {}
        for target, account in accounts.items():
            limit_ns = policy.storm * account.rates.get(level, 0) * duration / SECOND + policy.storm_ns
            limits_ns[target] = max(min(limit_ns, account.tokens_ns - shares[target]), policy.storm_least_ns)
        return Opening(group, level, int(duration), limits_ns)

    def _shares(self, accounts: Mapping[Hashable, _Account], opening_ns: float) -> dict[Hashable, float]:
        """Who pays how much of what it takes to open and to close a window."""
        whole = sum(max(account.tokens_ns, 1) for account in accounts.values())
        return {target: opening_ns * max(account.tokens_ns, 1) / whole for target, account in accounts.items()}

    def limit_ns(self, target: Hashable) -> float:
        """What the hits may cost a process that has begun in the middle of its group's window."""
        return max(self._accounts[target].tokens_ns, self.policy.storm_ns)

    def charge(self, target: Hashable, level: Level, seen_ns: int, hits_ns: float) -> None:
        """A target was in a window for so long, and its hits cost so much."""
        account = self._accounts.get(target)
        if account:
            account.tokens_ns -= hits_ns
            account.rates[level] = hits_ns * SECOND / max(seen_ns, MS)

    def spend(self, target: Hashable, ns: float) -> None:
        """A target has been cost so much by what is no window's."""
        account = self._accounts.get(target)
        if account:
            account.tokens_ns -= ns

    def ended(
        self, group: Hashable, level: Level, end: End, now_ns: int, opening_ns: float, targets: Collection[Hashable]
    ) -> dict[Hashable, float]:
        """A window is over, and its ``targets`` have been charged for their hits. The agent took so much CPU time to
        open and to close it: returns the share of each, in ns."""
        self.ends[level, end] += 1
        accounts = {target: self._accounts[target] for target in targets if target in self._accounts}
        shares = self._shares(accounts, opening_ns)
        for target, share in shares.items():
            self._accounts[target].tokens_ns -= share
        self.opening_ns += (opening_ns - self.opening_ns) / 8
        self._turns[group] = _Turn(now_ns, self._turns[group].level if group in self._turns else "full")
        return shares
