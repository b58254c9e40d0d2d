"""Plans: what is probed in every version and form, that each transition has one probe, and what is refused."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from schedtrace.abi import ProbeKind
from schedtrace.errors import NotTraceable
from schedtrace.plan import FunctionNames, Probe, ProbePlan, make_plan
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.code import call_sites
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.symtab import Symtab
from schedtrace.transitions import is_uninteresting
from tests.unit.disassembly import callee, disassembly
from tests.unit.forms import FORMS, MATRIX, VERSIONS, built, without_sections
from tests.workload import binary
from tools import pgo

# In functions mode, beside the ones that only some versions have.
ALWAYS = {
    "execute": "run", "park_m": "park", "ready": "ready", "goschedImpl": "yield", "goyield_m": "yield",
    "preemptPark": "stop",
}  # fmt: skip
CALLS = {
    "park_m": 1,
    "injectglist": 1,
    "findRunnable": 5,
    "(*gcControllerState).findRunnableGCWorker": 1,
    "newproc1": 1,
}
SYSTEM_CALLS_UNSEEN = "system calls: a goroutine in one counts as running"


def shown(probes: Iterable[Probe]) -> list[tuple[str, str]]:
    return [(probe.function.removeprefix("runtime."), probe.kind.name.lower()) for probe in probes]


def expected_functions(minor: int, *, cgo: bool = False) -> list[tuple[str, str]]:
    expected = list(ALWAYS.items())
    expected.append(("gdestroy" if minor >= 22 else "goexit0", "exit"))
    expected.append(("exitsyscallNoP" if minor >= 26 else "exitsyscall0", "syscall_exit_no_p"))
    expected += [(name, "casgstatus") for name, count in CALLS.items() for _ in range(count)]
    if cgo:
        expected += [("needm", "casgstatus"), ("dropm", "casgstatus")]
    return sorted(expected)


@pytest.mark.parametrize(("form", "version"), [*MATRIX, *(("arm64", version) for version in VERSIONS)])
def test_plan_of_every_version_and_form(form: str, version: str) -> None:
    plan = make_plan(str(built(form, version)))
    minor = int(version[2:])
    assert plan.go_version.startswith(f"go{version}.")
    assert plan.arch == ("arm64" if "arm64" in form else "amd64")
    assert plan.symbols == ("pclntab" if form == "stripped" else "symtab")
    assert plan.notes == ()
    assert plan.unseen == (SYSTEM_CALLS_UNSEEN,)
    assert all(probe.emulated for probe in plan.probes)
    assert plan.layout is not None
    assert plan.layout.wait_reasons_source == "target"
    assert "chan receive" in plan.layout.wait_reasons
    if minor >= 26:
        assert plan.mode == "casgstatus"
        assert shown(plan.probes) == [("casgstatus", "casgstatus"), ("preemptPark", "stop")]
    else:
        assert plan.mode == "functions"
        assert sorted(shown(plan.probes)) == expected_functions(minor, cgo=bool(FORMS[form][1].get("cgo")))
        assert shown(plan.probes)[:2] == [("execute", "run"), ("park_m", "park")]  # hit most


@pytest.mark.parametrize("version", VERSIONS)
def test_plan_with_system_calls(version: str) -> None:
    plan = make_plan(str(built("plain", version)), syscalls=True)
    expected = [("casgstatus", "casgstatus"), ("preemptPark", "stop")]
    if int(version[2:]) >= 26:
        expected += [("reentersyscall", "syscall"), ("exitsyscall", "syscall_exit")]
    assert plan.mode == "casgstatus"
    assert sorted(shown(plan.probes)) == sorted(expected)
    assert plan.unseen == ()


def test_iter_pull_brings_a_probe_on_coroutine_switches() -> None:
    for version, mode in (("1.23", "functions"), ("1.25", "functions"), ("1.27", "casgstatus")):
        plan = make_plan(str(binary("coroutines", version)))
        assert plan.mode == mode
        assert ("coroswitch_m", "coroutine_switch") in shown(plan.probes)
        assert plan.unseen == (SYSTEM_CALLS_UNSEEN,)


def calls_of_casgstatus(path: Path, arch: str) -> dict[int, str]:
    """Address of the call -> function it is in."""
    return {
        line.vaddr: name
        for name, lines in disassembly(path, arch).items()
        for line in lines
        if line.mnemonic in ("call", "CALL") and callee(line) == "casgstatus"
    }


def entered(probe: Probe) -> bool:
    return probe.kind not in (ProbeKind.CASGSTATUS, ProbeKind.CREATE, ProbeKind.CREATED)


def assert_each_transition_has_one_probe(plan: ProbePlan, path: Path) -> None:
    """In functions mode, by the disassembly: every call of casgstatus is probed, or its function is, or it is known
    to be of no interest; and no call is in two of these classes, but for functions of two transitions."""
    calls = calls_of_casgstatus(path, plan.arch)
    at_calls = {probe.vaddr: probe for probe in plan.probes if probe.kind == ProbeKind.CASGSTATUS}
    at_entry = {probe.function.removeprefix("runtime.") for probe in plan.probes if entered(probe)}
    assert at_calls.keys() <= calls.keys()
    assert len({probe.vaddr for probe in plan.probes}) == len(plan.probes)
    left: dict[str, int] = {}
    for vaddr, name in calls.items():
        if vaddr not in at_calls and not is_uninteresting(name):
            left[name] = left.get(name, 0) + 1
    system_calls = {"reentersyscall": 1, "entersyscallblock": 1, "exitsyscall": 1, "needm": 1, "dropm": 1}
    swaps_itself = int(plan.go_version.split(".")[1]) >= 26
    for name, count in left.items():
        if name in ("newproc1", "newproc.func1"):
            assert count == 1  # idle -> dead, of a g that is new itself
        elif name == "coroswitch_m":
            assert count == 3  # what the probe on it reports, once more
        else:
            assert count == system_calls.get(name, 1), name
            assert name in system_calls or name in at_entry, name
    assert swaps_itself or left.keys() >= {"reentersyscall", "exitsyscall"}
    assert {"execute", "park_m", "ready", "goyield_m", "preemptPark"} <= at_entry


@pytest.mark.parametrize("arch", ["amd64", "arm64"])
@pytest.mark.parametrize("version", ["1.19", "1.21", "1.22", "1.23", "1.24", "1.25"])
def test_each_transition_has_one_probe(version: str, arch: str) -> None:
    path = built("plain" if arch == "amd64" else "arm64", version)
    plan = make_plan(str(path))
    assert plan.mode == "functions"
    assert_each_transition_has_one_probe(plan, path)


# --- profile-guided builds ---


@pytest.mark.parametrize("version", ["1.22", "1.24", "1.27"])
def test_profile_that_inlines_casgstatus_leads_to_the_functions(version: str) -> None:
    path = pgo.build_pgo(version)
    plan = make_plan(str(path))
    assert plan.mode == "functions"
    copies = plan.mode_reason.removeprefix("the compiler copied casgstatus into ").split(", ")
    assert {f"runtime.{name}" for name in copies} >= set(pgo.INLINED_INTO)
    for name in copies:
        assert pgo.changes_status_inline(path, f"runtime.{name}")
    assert_each_transition_has_one_probe(plan, path)
    assert all(probe.emulated for probe in plan.probes)
    stripped = make_plan(str(pgo.build_pgo(version, strip=True)))
    assert [p.function for p in stripped.probes] == [p.function for p in plan.probes]


@pytest.mark.parametrize("version", ["1.22", "1.27"])
def test_profile_and_system_calls(version: str) -> None:
    plan = make_plan(str(pgo.build_pgo(version)), syscalls=True)
    added = [pair for pair in shown(plan.probes) if pair[0] in ("reentersyscall", "entersyscallblock", "exitsyscall")]
    kinds = {"1.22": ("casgstatus", "casgstatus"), "1.27": ("syscall", "syscall_exit")}[version]
    assert dict(added) == {
        "reentersyscall": kinds[0], "entersyscallblock": "casgstatus", "exitsyscall": kinds[1],
    }  # fmt: skip


# --- probes are where they should be ---


# Which byte tells an instruction, and its values.
FIRST_BYTES = {
    "amd64": (0, {"push": b"\x55", "call": b"\xe8", "nop": b"\x90", "je": b"\x74\x0f", "jne": b"\x75\x0f"}),
    "arm64": (3, {"tbnz": b"\x37", "bl": b"\x94\x97", "adrp": b"\x90\xb0\xd0\xf0", "b.ne": b"\x54"}),
}


@pytest.mark.parametrize(
    ("form", "version"), [("plain", "1.25"), ("pie", "1.27"), ("c-shared", "1.24"), ("arm64", "1.19")]
)
def test_offsets_in_the_file_hold_the_instruction(form: str, version: str) -> None:
    path = built(form, version)
    image = path.read_bytes()
    plan = make_plan(str(path), syscalls=True)
    assert plan.probes
    with Binary.open(path) as opened:
        symtab = Symtab.read(opened)
        assert symtab is not None
        functions = symtab.functions_named(probe.function for probe in plan.probes)
        for probe in plan.probes:
            assert opened.vaddr_at(probe.file_offset) == probe.vaddr
            function = functions[probe.function]
            assert int(probe.site.split()[0]) == probe.vaddr - function.vaddr
            code = image[probe.file_offset : probe.file_offset + 4]
            assert code[FIRST_BYTES[plan.arch][0]] in FIRST_BYTES[plan.arch][1][probe.site.split()[1]]


def test_a_file_without_section_headers_has_the_same_plan(tmp_path: Path) -> None:
    for form, version in (("stripped", "1.24"), ("stripped", "1.27"), ("pie", "1.24")):
        path = tmp_path / f"{form}-{version}"
        path.write_bytes(without_sections(built(form, version).read_bytes()))
        bare, whole = make_plan(str(path)), make_plan(str(built(form, version)))
        assert bare.probes == whole.probes
        assert bare.symbols == "pclntab"
        assert bare.layout is not None
        assert bare.layout.source == "table"
        assert bare.layout.wait_reasons_source == "target"


def test_names_of_start_functions() -> None:
    path = built("stripped", "1.27")
    with Binary.open(built("plain", "1.27")) as opened:
        symtab = Symtab.read(opened)
        assert symtab is not None
        addresses = symtab.functions_named(["main.main", "runtime.forcegchelper", "runtime.bgsweep"])
    with FunctionNames(str(path)) as names:
        for name, function in addresses.items():
            assert names.name(function.vaddr) == name
            assert names.name(function.vaddr + function.size - 1) == name
        assert names.name(0) is None
        names.close()
        assert names.name(addresses["main.main"].vaddr) == "main.main"  # opened again


# --- what is not known, and what is refused ---


def altered(tmp_path: Path, path: Path, *changes: tuple[bytes, bytes]) -> str:
    """A copy of the file with bytes replaced wherever they occur."""
    image = path.read_bytes()
    for old, new in changes:
        assert len(old) == len(new)
        assert old in image
        image = image.replace(old, new)
    copy = tmp_path / "altered"
    copy.write_bytes(image)
    return str(copy)


def test_unknown_version_without_dwarf_counts_transitions_only(tmp_path: Path) -> None:
    path = altered(tmp_path, built("stripped", "1.27"), (b"go1.27.3", b"go1.99.3"))
    plan = make_plan(path)
    assert plan.go_version == "go1.99.3"
    assert plan.layout is None
    assert shown(plan.probes) == [("casgstatus", "casgstatus"), ("preemptPark", "stop")]
    assert plan.unseen == (
        (
            "wait reasons, causes of wakes, start functions (go1.99.3: only Go up to 1.27 is known, and the binary "
            "has no DWARF)"
        ),
        SYSTEM_CALLS_UNSEEN,
    )


def test_unknown_version_without_dwarf_can_not_follow_coroutines(tmp_path: Path) -> None:
    path = altered(tmp_path, binary("coroutines", "1.27", strip=True), (b"go1.27.3", b"go1.99.3"))
    plan = make_plan(path)
    assert "coroswitch_m" not in dict(shown(plan.probes))
    assert any("coroutine switches (iter.Pull)" in text for text in plan.unseen)


def test_unknown_version_with_dwarf_is_followed_in_full(tmp_path: Path) -> None:
    plan = make_plan(altered(tmp_path, built("plain", "1.27"), (b"go1.27.3", b"go1.99.3")))
    assert plan.layout is not None
    assert plan.layout.source == "dwarf"
    assert plan.layout.wait_reasons[18] == "select"
    assert plan.unseen == (SYSTEM_CALLS_UNSEEN,)


def test_code_that_does_not_agree_with_the_layout_is_believed(tmp_path: Path) -> None:
    # A binary that calls itself 1.24 and keeps the status where 1.27 does.
    plan = make_plan(altered(tmp_path, built("stripped", "1.27"), (b"go1.27.3", b"go1.24.3")))
    assert plan.layout is None
    assert plan.unseen[0] == (
        "wait reasons, causes of wakes, start functions (go1.24.3: the binary's code does not agree with the layout "
        "of go1.24.11)"
    )


@pytest.mark.parametrize(
    ("form", "version", "change", "message"),
    [
        ("arm64", "1.19", (b"go1.19.8", b"go1.17.8"), "Go 1.17 on arm64 passes arguments on the stack"),
        ("plain", "1.27", (b"runtime.casgstatus\0", b"runtime.casgstatuz\0"), "no function runtime.casgstatus in it"),
        ("stripped", "1.25", (b"runtime.ready\0", b"runtime.raedy\0"), "no function runtime.ready to probe"),
    ],
)
def test_refusals(tmp_path: Path, form: str, version: str, change: tuple[bytes, bytes], message: str) -> None:
    path = altered(tmp_path, built(form, version), change)
    with pytest.raises(NotTraceable, match=re.escape(message)) as caught:
        make_plan(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_copy_of_casgstatus_where_no_probe_can_follow_is_refused(tmp_path: Path) -> None:
    # Another function under ready's name, so that the one with the copy has a name that says nothing.
    path = altered(
        tmp_path,
        pgo.build_pgo("1.27", strip=True),
        (b"runtime.ready\0", b"runtime.reedy\0"),
        (b"runtime.stopm\0", b"runtime.ready\0"),
    )
    with pytest.raises(NotTraceable, match=r"copied casgstatus into runtime\.reedy in a way that no probe can"):
        make_plan(path)


def calling(tmp_path: Path, path: Path, *, caller: str, old: str, new: str) -> Path:
    """A copy of the file in which ``caller`` calls ``new`` where it called ``old``, by amd64's relative calls."""
    image = bytearray(path.read_bytes())
    with Binary.open(path) as opened:
        found = Pclntab.find(opened).functions_named(f"runtime.{name}" for name in (caller, old, new))
        function, target, other = (found[f"runtime.{name}"] for name in (caller, old, new))
        for call in call_sites(opened, function):
            if call.target_vaddr == target.vaddr:
                place = opened.file_offset(call.vaddr) + 1
                image[place : place + 4] = (other.vaddr - call.vaddr - 5).to_bytes(4, "little", signed=True)
    copy = tmp_path / f"{path.name}-{caller}"
    copy.write_bytes(image)
    return copy


def test_creation_is_seen_in_newproc_where_newproc1_shows_no_call_of_casgstatus(tmp_path: Path) -> None:
    path = calling(tmp_path, built("plain", "1.25"), caller="newproc1", old="casgstatus", new="wakep")
    (probe,) = (p for p in make_plan(str(path)).probes if "newproc" in p.function)
    assert (probe.function, probe.kind) == ("runtime.newproc.func1", ProbeKind.CREATED)
    with Binary.open(path) as opened:
        table = Pclntab.find(opened)
        found = table.functions_named(["runtime.newproc.func1", "runtime.newproc1", "runtime.runqput"])
        calls = {call.target_vaddr: call for call in call_sites(opened, found["runtime.newproc.func1"])}
    makes, queues = calls[found["runtime.newproc1"].vaddr], calls[found["runtime.runqput"].vaddr]
    assert makes.vaddr + 5 <= probe.vaddr < queues.vaddr
    # newproc1 inlined, too
    path = calling(tmp_path, path, caller="newproc.func1", old="newproc1", new="wakep")
    (probe,) = (p for p in make_plan(str(path)).probes if "newproc" in p.function)
    assert (probe.function, probe.kind) == ("runtime.newproc.func1", ProbeKind.CREATE)
    assert probe.vaddr == queues.vaddr
    assert probe.site == f"+{queues.vaddr - found['runtime.newproc.func1'].vaddr} call runqput"
    # and runqput
    path = calling(tmp_path, path, caller="newproc.func1", old="runqput", new="wakep")
    plan = make_plan(str(path))
    assert not any("newproc" in p.function for p in plan.probes)
    assert "the creation of goroutines: a new one is first seen when it runs" in plan.unseen


def test_not_go(tmp_path: Path) -> None:
    with pytest.raises(NotTraceable, match="not a Go program"):
        make_plan(os.path.realpath("/bin/true"))
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(NotTraceable, match="empty file"):
        make_plan(str(tmp_path / "empty"))
