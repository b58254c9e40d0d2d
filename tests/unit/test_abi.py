"""agent/abi.py is bpf/types.h: the C compiler's debug information is the oracle."""

import ctypes
import subprocess
from pathlib import Path

import pytest
from elftools.dwarf.die import DIE
from elftools.elf.elffile import ELFFile

from schedtrace import abi, histogram
from schedtrace.bpf_text import DIFFERENT_TYPES, OPTIONAL_PROGRAMS, all_programs, program_of, shared_type_assertions

BPF = Path(__file__).parents[2] / "bpf"

# A size and, for structs, (field, offset, size) of each.
Facts = tuple[int, list[tuple[str, int, int]]]


@pytest.fixture(scope="module")
def debug_info(tmp_path_factory: pytest.TempPathFactory) -> list[DIE]:
    """The debugging entries of types.h."""
    folder = tmp_path_factory.mktemp("types")
    uses = "".join(f"struct {name} use_{name};\n" for name in abi.STRUCTS)
    uses += "".join(f"enum {name} use_{name};\n" for name in abi.ENUMS)
    (folder / "types.c").write_text(f'#include "types.h"\n{uses}')
    subprocess.run(
        ["gcc", "-g", "-c", "-nostdinc", f"-I{BPF}", f"-I{BPF}/headers/include", "types.c", "-o", "types.o"],
        cwd=folder,
        check=True,
        timeout=60,
    )
    with (folder / "types.o").open("rb") as file:
        dwarf = ELFFile(file).get_dwarf_info()
        return [die for unit in dwarf.iter_CUs() for die in unit.iter_DIEs()]


def _size(die: DIE) -> int:
    """Size in bytes of a type, through typedefs, qualifiers and arrays."""
    if "DW_AT_byte_size" in die.attributes:
        return int(die.attributes["DW_AT_byte_size"].value)
    if die.tag == "DW_TAG_array_type":
        count = 1
        for dimension in die.iter_children():
            count *= dimension.attributes["DW_AT_upper_bound"].value + 1
        return count * _size(die.get_DIE_from_attribute("DW_AT_type"))
    return _size(die.get_DIE_from_attribute("DW_AT_type"))


def _name(die: DIE) -> str:
    return str(die.attributes["DW_AT_name"].value.decode())


@pytest.mark.parametrize("name", abi.STRUCTS)
def test_struct_is_that_of_types_h(debug_info: list[DIE], name: str) -> None:
    found = [
        die
        for die in debug_info
        if die.tag == "DW_TAG_structure_type" and "DW_AT_name" in die.attributes and _name(die) == name
    ]
    assert len(found) == 1
    members = [
        (
            _name(member),
            member.attributes["DW_AT_data_member_location"].value,
            _size(member.get_DIE_from_attribute("DW_AT_type")),
        )
        for member in found[0].iter_children()
    ]
    ours = abi.STRUCTS[name]
    assert _size(found[0]) == ctypes.sizeof(ours)
    assert members == [
        (field, getattr(ours, field).offset, getattr(ours, field).size) for field, *_ in ours._fields_
    ]
    assert ctypes.sizeof(ours) % 8 == 0


@pytest.mark.parametrize("name", abi.ENUMS)
def test_enum_is_that_of_types_h(debug_info: list[DIE], name: str) -> None:
    prefix, ours = abi.ENUMS[name]
    found = [
        die
        for die in debug_info
        if die.tag == "DW_TAG_enumeration_type" and "DW_AT_name" in die.attributes and _name(die) == name
    ]
    constants = {_name(die): die.attributes["DW_AT_const_value"].value for die in found[0].iter_children()}
    assert constants == {prefix + member.name: member.value for member in ours}


def test_every_struct_and_enum_of_types_h_has_a_twin() -> None:
    text = "".join((BPF / name).read_text() for name in ("types.h", "event_types.h"))
    words = [line.split() for line in text.splitlines() if line.endswith("{")]
    assert {w[1] for w in words if w[0] == "struct"} == set(abi.STRUCTS)
    assert {w[1] for w in words if w[0] == "enum"} == set(abi.ENUMS)


def test_constants_are_those_of_types_h(tmp_path: Path) -> None:
    names = (
        *("HISTOGRAM_SLOTS", "REASON_COUNT", "REASON_UNKNOWN", "OFFSET_UNKNOWN", "SITE_LIMIT", "HITS_BATCH"),
        *("WAITS_KEPT", "STOP_REASON_UNKNOWN"),
    )
    (tmp_path / "constants.c").write_text('#include "types.h"\n' + "".join(f'@ "{n}" {n}\n' for n in names))
    output = subprocess.run(
        ["gcc", "-E", "-P", f"-I{BPF}", f"-I{BPF}/headers/include", tmp_path / "constants.c"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    values = {
        line.split()[1].strip(chr(34)): int(line.split()[2], 0)
        for line in output.splitlines()
        if line[:1] == "@"
    }
    assert values == {name: getattr(abi, name) for name in names}
    assert values["HISTOGRAM_SLOTS"] == histogram.SLOTS


def test_every_kind_of_probe_has_a_program() -> None:
    text = (BPF / "schedtrace.c").read_text()
    programs = [line.split()[1].partition("(")[0] for line in text.splitlines() if line.startswith("int on_")]
    assert {program_of(kind) for kind in abi.ProbeKind} == set(all_programs()) == set(programs)
    assert {line.split()[1] for line in text.splitlines() if line.startswith("#ifdef")} == {
        f"WITH_{program.upper()}" for program in OPTIONAL_PROGRAMS
    }


def _compiles(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "assertions.c").write_text(f'#include "types.h"\n{text}')
    command = ["gcc", "-fsyntax-only", "-nostdinc", f"-I{BPF}", f"-I{BPF}/headers/include", "assertions.c"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_what_is_checked_at_load_holds(tmp_path: Path) -> None:
    assert _compiles(shared_type_assertions(), tmp_path).stderr == ""


@pytest.mark.parametrize(
    ("there", "changed"),
    [
        ("sizeof(struct thread) == 128", "sizeof(struct thread) == 136"),
        ("__builtin_offsetof(struct target, slot) == ", "__builtin_offsetof(struct target, slot) == 1"),
        ("sizeof(((struct goroutine *)0)->state) == 1", "sizeof(((struct goroutine *)0)->state) == 2"),
        ("CAUSE_GC == 9", "CAUSE_GC == 8"),
    ],
)
def test_what_is_checked_at_load_finds_a_difference(tmp_path: Path, there: str, changed: str) -> None:
    text = shared_type_assertions()
    assert text.count(there) == 1
    refused = _compiles(text.replace(there, changed), tmp_path)
    assert refused.returncode != 0
    assert DIFFERENT_TYPES in refused.stderr
