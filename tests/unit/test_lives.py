"""Which goroutine an event is about: addresses are used again, and files are read piece by piece."""

import random
from typing import Any

import numpy as np
import pytest

from schedtrace.events import EVENT, TRANSITION, Flag
from schedtrace.lives import NOBODY, Lives, wakers
from tests.unit.recordings import (
    DEAD,
    OTHER_G,
    RUNNABLE,
    RUNNING,
    START_PC,
    STARTED_NS,
    WAITING,
    goroutine,
    some_events,
    transition,
)

IDLE, SYSCALL, COPYSTACK = 0, 3, 8


def _follow(*pieces: Any) -> tuple[Lives, list[int]]:
    lives = Lives()
    return lives, [int(number) for piece in pieces for number in lives.follow(piece)[1]]


def test_a_goroutine_is_told_by_its_address() -> None:
    lives, numbers = _follow(some_events())
    assert numbers == [0, 0, 0, 1]
    assert lives.table["goid"].tolist() == [18, 7]
    assert lives.table["start_pc"].tolist() == [START_PC, START_PC]
    assert (lives.table["first_ns"] - STARTED_NS).tolist() == [2_000, 9_500]


def _life(start_ns: int, goid: int) -> list[Any]:
    return [
        goroutine(start_ns, start_pc=goid),
        transition(start_ns, DEAD, RUNNABLE),
        goroutine(start_ns + 1, start_pc=goid, goid=goid, flags=0),
        transition(start_ns + 1, RUNNABLE, RUNNING),
        transition(start_ns + 2, RUNNING, DEAD),
    ]


def test_an_address_used_again_is_another_goroutine() -> None:
    lives, numbers = _follow(np.concatenate(_life(0, 5) + _life(10, 6)))
    assert numbers == [0, 0, 0, 1, 1, 1]
    assert lives.table["goid"].tolist() == [5, 6]


def test_one_whose_death_and_name_were_lost_is_another_goroutine_too() -> None:
    events = [*_life(0, 5)[:-1], transition(10, DEAD, RUNNABLE), transition(11, RUNNABLE, RUNNING)]
    lives, numbers = _follow(np.concatenate(events))
    assert numbers == [0, 0, 1, 1]
    assert lives.table["goid"].tolist() == [5, 0]


def test_what_comes_after_a_death_is_another_goroutine() -> None:
    lives, numbers = _follow(np.concatenate([*_life(0, 5), transition(10, WAITING, RUNNABLE)]))
    assert numbers == [0, 0, 0, 1]
    assert lives.table["goid"].tolist() == [5, 0]


def test_targets_have_their_own_addresses() -> None:
    _, numbers = _follow(
        np.concatenate([transition(0, WAITING, RUNNABLE, slot=1), transition(0, WAITING, RUNNABLE, slot=2)])
    )
    assert sorted(numbers) == [0, 1]


def test_a_transition_of_no_life_is_nobodys() -> None:
    events = [
        transition(0, IDLE, DEAD, flags=Flag.NO_INTERVAL),
        *_life(1, 5)[:-1],
        transition(5, RUNNING, COPYSTACK, flags=Flag.NO_INTERVAL),
    ]
    assert _follow(np.concatenate(events))[1] == [NOBODY, 0, 0, NOBODY]


def test_nothing() -> None:
    lives, numbers = _follow(np.zeros(0, EVENT))
    assert (numbers, len(lives.table)) == ([], 0)


@pytest.mark.parametrize("seed", range(20))
def test_it_makes_no_difference_where_the_file_is_cut_into_frames(seed: int) -> None:
    """Against a plain loop over the events, with a dict."""
    rng = random.Random(seed)
    addresses = {OTHER_G + 64 * i: [] for i in range(4)}  # type: dict[int, list[Any]]
    events, expected, count = [], [], 0
    for goid in range(60):
        g = rng.choice(list(addresses))
        addresses[g].extend((event, goid) for event in _life(goid * 10, goid + 1))
    current: dict[int, int] = {}
    while any(addresses.values()):
        g = rng.choice([address for address, left in addresses.items() if left])
        event, goid = addresses[g].pop(0)
        event = event.copy()
        event.view(TRANSITION)["g"] = g
        events.append(event)
        if event["type"][0] == 1:
            if event.view(TRANSITION)["old"][0] == DEAD:
                current[g] = goid
                count += 1
            expected.append(current[g])
    whole = np.concatenate(events)
    cuts = sorted(rng.sample(range(len(whole)), 12))
    lives, numbers = _follow(*np.split(whole, cuts))
    assert len(lives.table) == count == 60
    assert [int(lives.table["goid"][number]) - 1 for number in numbers] == expected


def test_the_waker_is_who_runs_on_the_thread() -> None:
    events = [
        transition(0, RUNNABLE, RUNNING, g=0x1000, tid=7),
        transition(1, RUNNABLE, RUNNING, g=0x2000, tid=8),
        transition(2, WAITING, RUNNABLE, g=0x3000, tid=7),  # woken by 0x1000
        transition(3, DEAD, RUNNABLE, g=0x4000, tid=8),  # made by 0x2000
        transition(4, RUNNING, RUNNABLE, g=0x1000, tid=7),  # preempted: by nobody
        transition(5, WAITING, RUNNABLE, g=0x5000, tid=7),  # by the scheduler
        transition(6, RUNNING, SYSCALL, g=0x2000, tid=8),
        transition(7, WAITING, RUNNABLE, g=0x6000, tid=9),  # by a thread not seen before
        transition(8, SYSCALL, RUNNING, g=0x2000, tid=8),
        transition(9, WAITING, RUNNABLE, g=0x1000, tid=8),  # woken by 0x2000
        transition(10, WAITING, RUNNABLE, g=0x3000, tid=10),  # by 0x7000, which stops there later
        transition(11, RUNNING, WAITING, g=0x7000, tid=10),
    ]
    lives = Lives()
    moves, numbers = lives.follow(np.concatenate(events))
    by = [hex(lives.table["g"][number]) if number != NOBODY else "" for number in wakers(moves, numbers)]
    assert by == ["", "", "0x1000", "0x2000", "", "", "", "", "", "0x2000", "0x7000", ""]


def test_nobody_is_woken_by_nothing() -> None:
    assert len(wakers(np.zeros(0, TRANSITION), np.zeros(0, np.int64))) == 0
