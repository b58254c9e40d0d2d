"""Which processes share probes, and when those are taken out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from schedtrace import attachments
from schedtrace.abi import ProbeKind
from schedtrace.attachments import Attachments, Probed
from schedtrace.binaries import GoBinary
from schedtrace.bpf_text import program_of
from schedtrace.errors import AttachFailed
from schedtrace.session import ANCHOR, Attachment, ProbeSite, Session

PLAN = cast(
    Any, SimpleNamespace(anchor=32, sampled=None, probes=(SimpleNamespace(kind=ProbeKind.CASGSTATUS, file_offset=64),))
)


def _binary(device: int, inode: int) -> GoBinary:
    return GoBinary((device, inode, 1000, 5), PLAN, "")


@dataclass
class _Session:
    """Remembers what it was asked for."""

    pids: list[int] = field(default_factory=list)
    inside: list[Attachment] = field(default_factory=list)
    refuses: bool = False

    def attach(self, executable_fd: int, sites: Sequence[ProbeSite], pid: int) -> Attachment:
        assert executable_fd == 3
        assert list(sites) == [ProbeSite(ANCHOR, 32), ProbeSite(program_of(ProbeKind.CASGSTATUS), 64)]
        if self.refuses:
            raise AttachFailed("it has gone")
        self.pids.append(pid)
        self.inside.append(Attachment())
        return self.inside[-1]

    def detach(self, gone: Sequence[Attachment]) -> None:
        self.inside = [one for one in self.inside if not any(one is each for each in gone)]


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(attachments, "monotonic", clock)
    monkeypatch.setattr(attachments, "has_breakpoint", lambda process, _plan: process.pid >= 10)
    return clock


def _probe(probes: Attachments, pid: int, binary: GoBinary, start: int = 1) -> Probed:
    process = cast(Any, SimpleNamespace(pid=pid, start_time_ticks=start))
    probed = probes.probe(process, binary, PLAN, 3)
    probed.pids.add(pid)
    return probed


@pytest.mark.usefixtures("clock")
def test_processes_of_one_inode_share_probes() -> None:
    session = _Session()
    probes = Attachments(cast(Session, session), confined=False, always="full")
    first = _probe(probes, 1, _binary(1, 7))
    assert _probe(probes, 2, _binary(1, 7)) is first
    assert _probe(probes, 10, _binary(2, 7)) is first  # through another overlay: the breakpoint tells
    assert _probe(probes, 3, _binary(2, 7)) is not first  # no breakpoint: another file that looks alike
    assert _probe(probes, 11, _binary(1, 8)) is not first
    assert session.pids == [-1, -1, -1]


def test_shared_probes_stay_for_a_while(clock: _Clock) -> None:
    session = _Session()
    probes = Attachments(cast(Session, session), confined=False, always="full")
    first = _probe(probes, 1, _binary(1, 7))
    other = _probe(probes, 2, _binary(1, 8))
    clock.now = 200
    probes.remove_idle()
    assert len(session.inside) == 2  # both are in use
    first.leave(1)
    clock.now = 229
    probes.remove_idle()
    assert len(session.inside) == 2
    assert _probe(probes, 3, _binary(1, 7)) is first
    first.leave(3)
    clock.now = 260
    probes.remove_idle()
    assert [id(one) for one in session.inside] == [id(other.attachment)]
    assert _probe(probes, 4, _binary(1, 7)) is not first


@pytest.mark.usefixtures("clock")
def test_confined_probes_are_one_process_s() -> None:
    session = _Session()
    probes = Attachments(cast(Session, session), confined=True, always="full")
    first = _probe(probes, 10, _binary(1, 7))
    assert _probe(probes, 11, _binary(1, 7)) is not first
    assert _probe(probes, 10, _binary(1, 9)) is not first  # it executes another program
    assert _probe(probes, 10, _binary(1, 7), start=2) is not first  # another process of that number
    assert session.pids == [10, 11, 10, 10]
    first.leave(10)
    probes.remove_idle()
    assert len(session.inside) == 3


@pytest.mark.usefixtures("clock")
def test_nothing_is_kept_of_what_could_not_be_probed() -> None:
    session = _Session(refuses=True)
    probes = Attachments(cast(Session, session), confined=False, always="full")
    with pytest.raises(AttachFailed):
        _probe(probes, 1, _binary(1, 7))
    assert not probes._probed
    session.refuses = False
    assert _probe(probes, 1, _binary(1, 7)).pids == {1}
