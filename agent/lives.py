"""Which goroutine an event is about. Pure.

Events name a goroutine by the address of its structure, which the runtime uses again for others. :class:`Lives` numbers
them, from 0, in the order of a recording.
"""

from __future__ import annotations

import numpy as np

from schedtrace.abi import GoroutineState
from schedtrace.events import GOROUTINE, TRANSITION, Array, EventType, Flag

_GOES_ON, _JUST_MADE, _ENDED = 0, 1, 2
_SLOT_SHIFT = np.uint64(52)  # no address is longer
NOBODY = -1

LIFE = np.dtype([("slot", "<u2"), ("g", "<u8"), ("start_pc", "<u8"), ("goid", "<u8"), ("first_ns", "<u8")])
"""A goroutine: number of its target, address, address of the start function and id (0: not known), and when it was seen
first."""


class Lives:
    """The goroutines of a recording, as far as its events have been given to :meth:`follow`."""

    def __init__(self) -> None:
        self._lives = np.zeros(1024, LIFE)
        self._count = 0
        # The goroutine last seen at each address: sorted by address and target.
        self._keys = np.zeros(0, np.uint64)
        self._numbers = np.zeros(0, np.int64)
        self._states = np.zeros(0, np.uint8)

    @property
    def table(self) -> Array:
        """All goroutines so far, by number: records of :data:`LIFE`. What is not known yet may be filled in later."""
        return self._lives[: self._count]

    @property
    def current(self) -> Array:
        """Numbers of those seen last at each address, also if they have ended."""
        return self._numbers

    def follow(self, events: Array) -> tuple[Array, Array]:
        """The transitions among ``events``, the next of the recording, and the number of each one's goroutine;
        :data:`NOBODY` where the transition is none of a goroutine's life (``NO_INTERVAL``)."""
        is_move = events["type"] == EventType.TRANSITION
        is_name = events["type"] == EventType.GOROUTINE
        moves: Array = events[is_move].view(TRANSITION)
        numbers = np.full(len(moves), NOBODY, np.int64)
        counted = (moves["flags"] & Flag.NO_INTERVAL) == 0
        used = is_name.copy()
        used[is_move] = counted
        if used.any():
            found = self._number(events[used], is_name[used])
            numbers[counted] = found[~is_name[used]]
        return moves, numbers

    def _number(self, events: Array, is_name: Array) -> Array:
        moves: Array = events.view(TRANSITION)
        names: Array = events.view(GOROUTINE)
        keys = moves["g"] + (moves["slot"].astype(np.uint64) << _SLOT_SHIFT)
        order = np.argsort(keys, kind="stable")
        keys, is_name = keys[order], is_name[order]
        starts = np.concatenate([[True], keys[1:] != keys[:-1]])
        ends = np.concatenate([starts[1:], [True]])
        made = is_name & ((events["flags"][order] & Flag.FIRST) != 0)
        born = ~is_name & (moves["old"][order] == GoroutineState.DEAD)
        states = np.zeros(len(keys), np.uint8)
        states[made] = _JUST_MADE
        states[~is_name & (moves["new"][order] == GoroutineState.DEAD)] = _ENDED
        # What was at this address before each event, in these events or in those before.
        group = np.cumsum(starts) - 1
        known, known_numbers, known_states = self._known(keys[starts])
        before = np.concatenate([[np.uint8(0)], states[:-1]])
        before[starts] = known_states
        begins = made | (born & (before != _JUST_MADE)) | (before == _ENDED)
        begins[starts] |= ~known
        begun = np.cumsum(begins)
        begun_in_group = begun - (begun - begins)[starts][group]
        numbers = np.where(begun_in_group > 0, self._count + begun - 1, known_numbers[group])
        first = order[begins]
        self._add(moves[first])
        self._name(names[order][is_name], numbers[is_name])
        self._remember(keys[ends], numbers[ends], states[ends], known)
        result = np.empty(len(keys), np.int64)
        result[order] = numbers
        return result

    def _known(self, keys: Array) -> tuple[Array, Array, Array]:
        """Which of these (sorted, each once) were seen before, as which goroutines, in what state."""
        if not len(self._keys):
            return np.zeros(len(keys), bool), np.zeros(len(keys), np.int64), np.zeros(len(keys), np.uint8)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return self._keys[places] == keys, self._numbers[places], self._states[places]

    def _remember(self, keys: Array, numbers: Array, states: Array, known: Array) -> None:
        if not known.all():
            merged = np.concatenate([self._keys, keys[~known]])
            order = np.argsort(merged, kind="stable")
            self._keys = merged[order]
            self._numbers = np.concatenate([self._numbers, numbers[~known]])[order]
            self._states = np.concatenate([self._states, states[~known]])[order]
        places = np.searchsorted(self._keys, keys)
        self._numbers[places], self._states[places] = numbers, states

    def _add(self, firsts: Array) -> None:
        count = self._count + len(firsts)
        if count > len(self._lives):
            grown = np.zeros(max(count, 2 * len(self._lives)), LIFE)
            grown[: self._count] = self.table
            self._lives = grown
        new = self._lives[self._count : count]
        new["slot"], new["g"], new["first_ns"] = firsts["slot"], firsts["g"], firsts["time_ns"]
        self._count = count

    def _name(self, names: Array, numbers: Array) -> None:
        """In the order of the events: a later one knows more."""
        for field in ("start_pc", "goid"):
            known = names[field] != 0
            self._lives[field][numbers[known]] = names[field][known]


def wakers(moves: Array, numbers: Array) -> Array:
    """The goroutine that made another one runnable, for each transition: the one that ran on that thread at the time;
    :data:`NOBODY` where none did (the scheduler, the network poller), it isn't known, or nobody was made runnable.

    ``moves``, ``numbers``: from :meth:`Lives.follow`. A goroutine runs on a thread from the move by which it begins to
    until the one by which it stops; one of both is enough.
    """
    runs = (GoroutineState.RUNNING, GoroutineState.SYSCALL)
    woken = (moves["new"] == GoroutineState.RUNNABLE) & ~np.isin(moves["old"], runs)
    order = np.argsort(moves["tid"], kind="stable")
    thread, who = moves["tid"][order], numbers[order]
    begins = (moves["new"] == GoroutineState.RUNNING)[order]
    stops = (np.isin(moves["old"], runs) & ~np.isin(moves["new"], runs))[order]
    places = np.arange(len(order))
    changes = begins | stops
    last = np.maximum.accumulate(np.where(changes, places, -1))
    following = np.minimum.accumulate(np.where(changes, places, len(order))[::-1])[::-1]
    running = np.full(len(order), NOBODY, np.int64)
    for found, known in ((following, stops), (last, begins)):
        at = np.clip(found, 0, max(len(order) - 1, 0))
        seen = (found == at) & known[at] & (thread[at] == thread)
        running[seen] = who[at[seen]]
    result = np.full(len(moves), NOBODY, np.int64)
    result[order] = running
    result[~woken] = NOBODY
    return result
