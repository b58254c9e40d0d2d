"""Symtab against nm, and where there is nothing to read."""

import struct
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from schedtrace.symbols.binary import Binary
from schedtrace.symbols.function import Function
from schedtrace.symbols.nametable import NameTable
from schedtrace.symbols.symtab import Symtab
from tests.unit import elfwriter
from tests.unit.elfwriter import FUNCTION, OBJECT, Elf
from tests.unit.forms import built

Symbols = list[tuple[str, int, int]]


def nm(path: Path) -> tuple[Symbols, Symbols]:
    """Functions and data objects as (name, vaddr, size), as nm's System V format shows them."""
    shown = subprocess.run(
        ["nm", "--format=sysv", "--defined-only", "--no-demangle", path],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found: dict[str, Symbols] = {"FUNC": [], "OBJECT": []}
    for line in shown.splitlines():
        # Generic functions have bars in their names, so the six other columns are counted from the right.
        columns = line.rsplit("|", 6)
        if len(columns) == 7 and columns[3].strip() in found:
            name, vaddr, _, kind, size, _, _ = (column.strip() for column in columns)
            found[kind].append((name, int(vaddr, 16), int(size, 16) if size else 0))
    return found["FUNC"], found["OBJECT"]


def unambiguous(symbols: Symbols) -> dict[str, tuple[int, int]]:
    places: dict[str, set[tuple[int, int]]] = {}
    for name, vaddr, size in symbols:
        places.setdefault(name, set()).add((vaddr, size))
    return {name: found.pop() for name, found in places.items() if len(found) == 1}


@pytest.mark.parametrize(
    ("form", "version"),
    [("plain", "1.19"), ("plain", "1.27"), ("cgo", "1.27"), ("static-pie", "1.24"), ("arm64-pie", "1.26")],
)
def test_every_symbol_is_where_nm_shows_it(form: str, version: str) -> None:
    path = built(form, version)
    functions, data = nm(path)
    assert len(functions) > 1000
    assert len(data) > 300
    with Binary.open(path) as binary:
        symtab = Symtab.read(binary)
        assert symtab is not None
        assert Counter(symtab.function_names()) == Counter(name for name, _, _ in functions)
        expected = unambiguous(functions)
        names = [name for name, _, _ in functions]
        found = symtab.functions_named(names)
        assert {n: (f.vaddr, f.size) for n, f in found.items() if n in expected} == expected
        assert {f.name for f in found.values()} == set(found)
        # What nm shows more than once is found only under its assembly name, if it has one.
        assert all(f"{name}.abi0" in expected for name in found.keys() - expected.keys())
        assert symtab.data_named(name for name, _, _ in data) == unambiguous(data)


def test_names_that_are_absent_are_left_out() -> None:
    with Binary.open(built("plain", "1.27")) as binary:
        symtab = Symtab.read(binary)
        assert symtab is not None
        assert symtab.functions_named(["runtime.casgstatu", "runtime.casgstatuss", "", "ä", "\udcff"]) == {}
        assert symtab.data_named(["runtime.casgstatus"]) == {}  # a function
        assert symtab.functions_named([]) == {}


@pytest.mark.parametrize("form", ["stripped"])
def test_stripped_there_is_none(form: str) -> None:
    with Binary.open(built(form, "1.27")) as binary:
        assert Symtab.read(binary) is None


def test_an_assembly_function_is_found_under_its_name_in_go() -> None:
    path = built("plain", "1.27")
    functions = unambiguous(nm(path)[0])
    with Binary.open(path) as binary:
        symtab = Symtab.read(binary)
        assert symtab is not None
        found = symtab.functions_named(["runtime.mcall", "runtime.gogo", "runtime.asmcgocall"])
        gogo = functions["runtime.gogo.abi0"]
        assert found["runtime.gogo"] == Function("runtime.gogo", *gogo)
        assert found["runtime.mcall"].vaddr == functions["runtime.mcall"][0]
        # Assembly with a wrapper for calls from Go: its name is the wrapper's, to which Go's calls go.
        assert found["runtime.asmcgocall"].vaddr == functions["runtime.asmcgocall"][0]


def symtab_of(tmp_path: Path, elf: Elf) -> Symtab | None:
    path = tmp_path / "file"
    path.write_bytes(elf.to_bytes())
    with Binary.open(path) as binary:
        return Symtab.read(binary)


def some_code() -> Elf:
    elf = Elf()
    elf.load(0x401000, bytes(64))
    return elf


def test_what_several_have_is_nobodys(tmp_path: Path) -> None:
    elf = some_code()
    elf.symbols([
        ("one", 0x401000, 4, FUNCTION),
        ("two", 0x401004, 4, FUNCTION),
        ("two", 0x401008, 4, FUNCTION),
        ("alias", 0x40100C, 4, FUNCTION),
        ("alias", 0x40100C, 4, FUNCTION),
        ("one", 0x401010, 8, OBJECT),
    ])  # fmt: skip
    symtab = symtab_of(tmp_path, elf)
    assert symtab is not None
    assert symtab.functions_named(["one", "two", "alias"]) == {
        "one": Function("one", 0x401000, 4),
        "alias": Function("alias", 0x40100C, 4),
    }
    assert symtab.data_named(["one"]) == {"one": (0x401010, 8)}
    assert list(symtab.function_names()) == ["one", "two", "two", "alias", "alias"]


def test_an_undefined_function_is_not_found(tmp_path: Path) -> None:
    elf = some_code()
    undefined = struct.pack("<IBBHQQ", 1, FUNCTION, 0, 0, 0x401000, 4)
    elf.extra(".symtab", bytes(24) + undefined, elfwriter.SHT_SYMTAB, link=".strtab", entry_size=24)
    elf.extra(".strtab", b"\0puts\0", elfwriter.SHT_STRTAB)
    symtab = symtab_of(tmp_path, elf)
    assert symtab is not None
    assert symtab.functions_named(["puts"]) == {}


@pytest.mark.parametrize(
    ("content", "link", "entry_size"),
    [(bytes(48), "", 24), (bytes(48), ".strtab", 16), (bytes(23), ".strtab", 24), (b"", ".strtab", 24)],
    ids=["no names", "other entries", "no whole entry", "empty"],
)
def test_a_table_without_sense_is_none(tmp_path: Path, content: bytes, link: str, entry_size: int) -> None:
    elf = some_code()
    elf.extra(".symtab", content, elfwriter.SHT_SYMTAB, link=link, entry_size=entry_size)
    elf.extra(".strtab", b"\0a\0", elfwriter.SHT_STRTAB)
    assert symtab_of(tmp_path, elf) is None


@pytest.mark.parametrize("length", range(1, 40))
def test_names_of_every_length_match_whole_and_at_the_end_of_the_table(length: int) -> None:
    name = ("abcdefg" * 6)[:length]
    others = [name[:-1], name + "x", name[:-1] + "X", "x" + name[1:]]
    table = b"\0".join(n.encode() for n in [*others, name])  # the last one without a terminator
    offsets, place = [], 0
    for one in [*others, name]:
        offsets.append(place)
        place += len(one) + 1
    for data in (table, table + b"\0"):
        found = NameTable(memoryview(data)).matches(np.array(offsets, np.uint32), [name])
        assert found[name].tolist() == [i for i, n in enumerate([*others, name]) if n == name]


def test_offsets_outside_of_the_table_match_nothing() -> None:
    names = NameTable(memoryview(b"\0runtime.casgstatus\0"))
    offsets = np.array([1, 19, 20, 21, 4_000_000_000, 0xFFFFFFFF, 0, 2], np.uint32)
    assert {n: i.tolist() for n, i in names.matches(offsets, ["runtime.casgstatus", "", "s"]).items()} == {
        "runtime.casgstatus": [0]
    }
    assert [names.name_at(o) for o in (1, 9, 19, 20, -1)] == [
        "runtime.casgstatus",
        "casgstatus",
        "",
        None,
        None,
    ]
    assert NameTable(memoryview(b"")).matches(offsets, ["a"]) == {}
