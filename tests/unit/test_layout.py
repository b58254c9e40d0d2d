"""Struct layouts and reasons: recorded values, pyelftools reading the long way, and Go's own sources."""

import re
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from schedtrace.symbols.binary import Binary
from schedtrace.symbols.buildinfo import GoVersion, read_buildinfo
from schedtrace.symbols.dwarf import read_structs
from schedtrace.symbols.layout import FIELDS, Layout, layout_of, read_offsets
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.reasons import read_stop_reasons, read_wait_reasons
from schedtrace.symbols.symtab import Symtab
from tests.unit.forms import FORMS, LANDMARKS, VERSIONS, built
from tools import toolchains
from tools.regenerate_layouts import UNSTABLE

# What a study of these releases by other means wrote down; None: the version has no such field.
RECORDED: Mapping[str, tuple[int | None, ...]] = {
    "g": (392, 408, 424, 432, 440, 440, 456, 456),
    "m": (1008, 1008, 2024, 1760, 1832, 1816, 1824, 1832),
    "p": (8912, 8912, 8944, 8944, 8952, 9512, 15920, 15920),
    "schedt": (6080, 1632, 6824, 6824, 6824, 6848, 6872, 6872),
    "g.sched.bp": (104, 104, 104, 104, 104, 96, 96, 96),
    "g.syscallsp": (112, 112, 112, 112, 112, 104, 104, 104),
    "g.atomicstatus": (144, 144, 144, 152, 152, 144, 144, 144),
    "g.goid": (152, 152, 152, 160, 160, 152, 152, 152),
    "g.schedlink": (160, 160, 160, 168, 168, 160, 160, 160),
    "g.waitreason": (176, 176, 176, 184, 184, 176, 176, 176),
    "g.preempt": (177, 177, 177, 185, 185, 177, 177, 177),
    "g.lockedm": (232, 208, 208, 216, 216, 208, 208, 208),
    "g.parentGoid": (None, 272, 272, 280, 280, 272, 280, 280),
    "g.gopc": (296, 280, 280, 288, 288, 280, 288, 288),
    "g.startpc": (312, 296, 296, 304, 304, 296, 304, 304),
    "g.coroarg": (None, None, 368, 384, 384, 376, 384, 384),
    "m.procid": (72, 72, 72, 72, 72, 64, 64, 64),
    "m.curg": (192, 192, 192, 192, 192, 184, 184, 184),
    "m.p": (208, 208, 208, 208, 208, 200, 208, 208),
    "p.runqhead": (400, 400, 400, 392, 392, 392, 400, 400),
    "p.runnext": (2456, 2456, 2456, 2448, 2448, 2448, 2456, 2456),
    "schedt.lock": (24, 24, 24, 24, 24, 32, 32, 32),
    "schedt.npidle": (88, 88, 88, 88, 88, 96, 112, 112),
    "schedt.runqsize": (112, 120, 120, 120, 120, None, None, None),
    "schedt.runq.size": (None, None, None, None, None, 128, 144, 144),
    "schedt.gcwaiting": (224, 232, 232, 232, 232, 248, 264, 264),
    "schedt.timeToRun": (312, 320, 320, 320, 320, 344, 360, 360),
    "schedt.stwStoppingTimeGC": (None, None, 1632, 1632, 1632, 1656, 1672, 1672),
    "schedt.stwTotalTimeOther": (None, None, 5520, 5520, 5520, 5544, 5560, 5560),
    "timeHistogram": (5768, 1296, 1296, 1296, 1296, 1296, 1296, 1296),
    "gobuf.bp": (48, 48, 48, 48, 48, 40, 40, 40),
    "coro.gp": (None, None, 0, 0, 0, 0, 0, 0),
    "gList.head": (0, 0, 0, 0, 0, 0, 0, 0),
}
REASON_COUNTS = (27, 32, 37, 38, 44, 47, 47, 47)


def layout(path: Path, version: GoVersion | None = None) -> Layout:
    with Binary.open(path) as binary:
        found = layout_of(binary, version or read_buildinfo(binary).version)
    assert found is not None
    return found


def numbers(found: Layout) -> dict[str, int]:
    return {**found.offsets, **found.sizes}


@pytest.mark.parametrize("form", ["plain", "arm64"])
@pytest.mark.parametrize("version", VERSIONS)
def test_layout_from_dwarf_is_the_recorded_one(version: str, form: str) -> None:
    found = layout(built(form, version))
    assert found.source == "dwarf"
    assert found.minor == int(version[2:])
    column = VERSIONS.index(version)
    expected = {name: values[column] for name, values in RECORDED.items() if values[column] is not None}
    if form == "arm64" and found.minor >= 26:
        expected["p"] = 14320
    assert {name: numbers(found).get(name) for name in expected} == expected
    absent = {name for name, values in RECORDED.items() if values[column] is None}
    assert not absent & numbers(found).keys()


@pytest.mark.parametrize("goarch", ["amd64", "arm64"])
@pytest.mark.parametrize("version", VERSIONS)
def test_table_is_what_the_toolchain_says(version: str, goarch: str) -> None:
    """If this fails after a toolchain was added or changed: make layouts."""
    with_dwarf = layout(built("plain" if goarch == "amd64" else "arm64", version))
    stripped = layout(toolchains.build(version, Path("tests/golang/hello").resolve(), goarch=goarch, strip=True))
    assert stripped.source == "table"
    assert stripped.toolchain == f"go{toolchains.release(version)}"
    unstable = UNSTABLE.get(stripped.minor, frozenset())
    assert numbers(stripped) == {name: n for name, n in numbers(with_dwarf).items() if name not in unstable}


@pytest.mark.parametrize("version", LANDMARKS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_layout_of_its_version(form: str, version: str) -> None:
    found = layout(built(form, version))
    expected = dict(numbers(layout(built("arm64" if "arm64" in form else "plain", version))))
    if found.source == "table":
        expected = {name: n for name, n in expected.items() if name not in UNSTABLE.get(found.minor, ())}
    assert found.source == ("table" if form == "stripped" else "dwarf")
    # What a program does not use, its DWARF may leave out.
    shared = expected.keys() & numbers(found).keys()
    assert {name: numbers(found)[name] for name in shared} == {name: expected[name] for name in shared}
    assert {"g.atomicstatus", "g.waitreason", "g.startpc", "m.procid", "schedt.lock"} <= shared


@pytest.mark.parametrize("version", ["1.19", "1.24", "1.27"])  # DWARF 4, 4 and 5
def test_reading_one_entry_finds_what_reading_all_of_them_finds(version: str) -> None:
    path = built("plain", version)
    with Binary.open(path) as binary:
        offsets, sizes = read_offsets(binary)
    expected_offsets, expected_sizes = {}, {}
    with path.open("rb") as file:
        for unit in ELFFile(file).get_dwarf_info().iter_CUs():
            for die in unit.iter_DIEs():
                name = die.attributes["DW_AT_name"].value.decode() if "DW_AT_name" in die.attributes else ""
                struct = name.removeprefix("runtime.")
                if die.tag != "DW_TAG_structure_type" or name == struct or struct not in FIELDS:
                    continue
                expected_sizes[struct] = die.attributes["DW_AT_byte_size"].value
                for member in die.iter_children():
                    field = member.attributes["DW_AT_name"].value.decode()
                    if field in FIELDS[struct]:
                        at = member.attributes["DW_AT_data_member_location"].value
                        expected_offsets[f"{struct}.{field}"] = at
    assert sizes == expected_sizes
    plain = {name: offset for name, offset in offsets.items() if name.count(".") == 1}
    assert plain == expected_offsets
    assert offsets["g.sched.pc"] == plain["gobuf.pc"] + offsets["g.sched.sp"]


def test_layouts_that_no_toolchain_can_confirm_are_marked() -> None:
    with Binary.open(toolchains.build("1.19", Path("tests/golang/hello").resolve(), strip=True)) as binary:
        for minor, status, process_id in ((17, 144, 72), (18, 144, 72), (20, 144, 72)):
            found = layout_of(binary, GoVersion(minor, f"go1.{minor}"))
            assert found is not None
            assert found.source == "table (unverified)"
            assert (found.offsets["g.atomicstatus"], found.offsets["m.procid"]) == (status, process_id)
            assert found.wait_reasons[9] == "select"


def test_unknown_version_has_a_layout_only_with_dwarf() -> None:
    future = GoVersion(99, "go1.99.1")
    with_dwarf = layout(built("plain", "1.27"), future)
    assert (with_dwarf.source, with_dwarf.minor, with_dwarf.toolchain) == ("dwarf", 99, "go1.99.1")
    assert with_dwarf.offsets["g.atomicstatus"] == 144
    assert with_dwarf.wait_reasons == ()
    with Binary.open(built("stripped", "1.27")) as binary:
        assert layout_of(binary, future) is None
        assert layout_of(binary, None) is None
        assert layout_of(binary, future, ("", "select")) is None


def test_patch_releases_share_a_layout() -> None:
    with Binary.open(built("stripped", "1.27")) as binary:
        found = layout_of(binary, GoVersion(27, "go1.27.99"))
    assert found is not None
    assert found.offsets["g.goid"] == 152


# --- reasons ---


@cache
def named_in_source(version: str, table: str, first: str, prefix: str) -> tuple[str, ...]:
    """A table of names in runtime2.go or proc.go: its `constant: "text"` lines, in the order of the constants."""
    sources = toolchains.goroot(version) / "src/runtime"
    text = "".join((sources / name).read_text() for name in ("runtime2.go", "proc.go"))
    entries = re.search(rf"^var {table} = \[\.\.\.\]string\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    order = re.search(rf"^\t{first} +\w+ += iota.*?^\)", text, re.MULTILINE | re.DOTALL)
    assert entries
    assert order
    names = dict(re.findall(r'^\t(\w+):\s*"(.*?)",', entries[1], re.MULTILINE))
    return tuple(names[name] for name in re.findall(rf"^\t({prefix}\w+)", order[0], re.MULTILINE))


@pytest.mark.parametrize("version", VERSIONS)
def test_wait_reasons_are_those_of_the_source(version: str) -> None:
    expected = named_in_source(version, "waitReasonStrings", "waitReasonZero", "waitReason")
    assert len(expected) == REASON_COUNTS[VERSIONS.index(version)]
    for form in ("plain", "stripped", "arm64", *(("pie", "arm64-pie", "cgo-pie") if version in LANDMARKS else ())):
        with Binary.open(built(form, version)) as binary:
            symtab, table = Symtab.read(binary), Pclntab.find(binary)
            assert (symtab is None) == (form == "stripped")
            by_name = read_wait_reasons(binary, symtab, lambda _: {})
            through_code = read_wait_reasons(binary, None, table.functions_named)
        assert through_code == expected, form
        assert by_name == (() if form == "stripped" else expected), form
    assert layout(built("stripped", version)).wait_reasons == expected  # the table's


@pytest.mark.parametrize("version", VERSIONS)
def test_stop_reasons_are_those_of_the_source(version: str) -> None:
    path = built("plain", version)
    with Binary.open(path) as binary:
        found = read_stop_reasons(binary, Symtab.read(binary))
    expected: tuple[str, ...] = ()
    if version != "1.19":
        expected = named_in_source(version, "stwReasonStrings", "stwUnknown", "stw")
    assert found == expected == layout(path).stw_reasons
    assert list(expected[1:3]) == ([] if version == "1.19" else ["GC mark termination", "GC sweep termination"])


def test_a_table_that_is_none_is_not_taken_for_one(tmp_path: Path) -> None:
    image = bytearray(built("plain", "1.27").read_bytes())
    # One reason's text gone: the word lies among the strings that Go's linker puts side by side.
    place = image.index(b"GC worker (idle)")
    image[place] = 0
    path = tmp_path / "damaged"
    path.write_bytes(image)
    with Binary.open(path) as binary:
        assert read_wait_reasons(binary, Symtab.read(binary), Pclntab.find(binary).functions_named) == ()
        found = layout_of(binary, GoVersion(27, "go1.27.3"))
    assert found is not None
    assert found.wait_reasons_source == "table"
    assert found.wait_reasons[18] == "select"


# --- damaged DWARF ---


def with_debug_info(path: Path, changed: bytes | None, *, size: int | None = None) -> bytes:
    """The file at ``path`` with other contents in its .debug_info, not longer than before."""
    image = bytearray(path.read_bytes())
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".debug_info")
        assert section is not None
        start, length = section["sh_offset"], section["sh_size"]
    if changed is not None:
        assert len(changed) <= length
        image[start + 24 : start + 24 + len(changed)] = changed
    if size is not None:
        image[start + 8 : start + 16] = size.to_bytes(8, "little")
    return bytes(image)


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        pytest.param(b"\0" * 64, None, id="not zlib"),
        pytest.param(None, 1 << 62, id="claims to be huge"),
        pytest.param(None, 1000, id="longer than it claims"),
        pytest.param(zlib.compress(b"\xff" * 1000), 1000, id="no units in it"),
        pytest.param(zlib.compress(b"\x10\0\0\0\1runtime.g\0" + bytes(100)), 114, id="a name and nothing else"),
        pytest.param(zlib.compress(bytes(60 << 20), 9)[:40000], 60 << 20, id="cut off"),
    ],
)
def test_damaged_dwarf_is_as_good_as_none(tmp_path: Path, changed: bytes | None, size: int | None) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(with_debug_info(built("plain", "1.24"), changed, size=size))
    with Binary.open(path) as binary:
        assert read_structs(binary, {"runtime.g": ["goid"]}) == {}
        found = layout_of(binary, GoVersion(24, "go1.24.11"))
    assert found is not None
    assert found.source == "table"


def test_structs_and_fields_that_are_not_there_are_left_out() -> None:
    with Binary.open(built("plain", "1.27")) as binary:
        found = read_structs(
            binary, {"runtime.g": ["goid", "nosuch", "goid.x", "sched.nosuch", "m.procid"], "runtime.nosuch": ["x"]}
        )
    assert found.keys() == {"runtime.g"}
    assert found["runtime.g"].size == 456
    assert found["runtime.g"].offsets == {"goid": 152}  # m is a pointer: what it points to is not inside
