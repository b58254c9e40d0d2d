"""Where the runtime's variables are, from code alone, against the symbol tables of unstripped files."""

from dataclasses import replace
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from schedtrace.errors import NotTraceable
from schedtrace.plan import make_plan
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.buildinfo import GoVersion, read_buildinfo
from schedtrace.symbols.layout import Layout, layout_of
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.runtime_data import RuntimeData, derivations_of, find_runtime_data
from schedtrace.symbols.symtab import Symtab
from tests.runtime_plans import make_runtime_plan
from tests.unit.forms import FORMS, LANDMARKS, VERSIONS, built, without_sections
from tools import pgo, toolchains

NAMES = ("sched", "allp", "gomaxprocs", "allgs", "memstats", "gcController", "allm")
NAMED = [form for form in FORMS if form != "stripped"]
EVERY = [(form, v) for form in NAMED for v in VERSIONS if v in LANDMARKS or form in ("plain", "arm64")]
HISTOGRAMS = {
    20: {"schedt.timeToRun", "mstats.gcPauseDist"},
    99: {
        *("schedt.timeToRun", "schedt.stwStoppingTimeGC", "schedt.stwStoppingTimeOther"),
        *("schedt.stwTotalTimeGC", "schedt.stwTotalTimeOther"),
    },
}


def layout(binary: Binary, version: GoVersion | None = None) -> Layout:
    found = layout_of(binary, version or read_buildinfo(binary).version)
    assert found is not None
    return found


def stripped_layout(minor: int) -> Layout:
    """The table's layout of that version."""
    with Binary.open(built("stripped", "1.27")) as binary:
        return layout(binary, GoVersion(minor, f"go1.{minor}"))


def from_code(path: Path, table_layout: Layout | None = None) -> RuntimeData:
    with Binary.open(path) as binary:
        return find_runtime_data(binary, Pclntab.find(binary), None, table_layout or layout(binary))


def addresses(data: RuntimeData) -> tuple[int | None, ...]:
    return (
        *(data.sched_vaddr, data.allp_vaddr, data.gomaxprocs_vaddr, data.allgs_vaddr),
        *(data.memstats_vaddr, data.gc_controller_vaddr, data.allm_vaddr),
    )


def check_against_symbols(path: Path) -> None:
    with Binary.open(path) as binary:
        table, symtab, its_layout = Pclntab.find(binary), Symtab.read(binary), layout(binary)
        assert symtab is not None
        by_name = find_runtime_data(binary, table, symtab, its_layout)
        by_code = find_runtime_data(binary, table, None, its_layout)
        derived = derivations_of(binary, table, its_layout)
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".symtab")
        assert isinstance(section, SymbolTableSection)
        symbols = {symbol.name: symbol["st_value"] for symbol in section.iter_symbols()}
    expected = {name: symbols[f"runtime.{name}"] for name in NAMES}
    assert (by_name.source, by_code.source) == ("symtab", "code")
    assert addresses(by_name) == addresses(by_code) == tuple(expected.values())
    # Not only enough of them, but every way leads there; the last one to allgs is for Go 1.17.
    for name, vaddr in expected.items():
        ways = derived[name][: 2 if name == "allgs" else None]
        assert set(ways) == {frozenset([vaddr])}, name
        assert len(ways) >= 2
    assert derived["allgs"][2] == frozenset()
    # Not by the layout, which doesn't say for all versions.
    assert by_code.alllink_offset == by_name.alllink_offset == its_layout.offsets["m.alllink"]
    assert by_code.histograms == by_name.histograms
    assert by_code.histograms.keys() == HISTOGRAMS[20 if its_layout.minor <= 21 else 99]
    for field, vaddr in by_code.histograms.items():
        base = expected["memstats" if field.startswith("mstats.") else "sched"]
        assert vaddr == base + its_layout.offsets[field]


@pytest.mark.parametrize(("form", "version"), EVERY)
def test_code_says_what_symbols_say(form: str, version: str) -> None:
    check_against_symbols(built(form, version))


@pytest.mark.parametrize("version", ["1.22", "1.24", "1.27"])
def test_code_compiled_with_a_profile(version: str) -> None:
    check_against_symbols(pgo.build_pgo(version))


@pytest.mark.parametrize("version", VERSIONS)
def test_stripped(version: str, tmp_path: Path) -> None:
    path = built("stripped", version)
    plan = make_runtime_plan(str(path))
    assert make_plan(str(path)).runtime == plan
    assert (plan.source, plan.layout_source, plan.go_version) == ("code", "table", f"go{toolchains.release(version)}")
    assert None not in addresses(from_code(path))
    bare = tmp_path / "bare"
    bare.write_bytes(without_sections(path.read_bytes()))
    assert replace(make_runtime_plan(str(bare)), path=plan.path) == plan


def test_arm64_with_the_table_alone(tmp_path: Path) -> None:
    for version in VERSIONS:
        path = tmp_path / version
        path.write_bytes(without_sections(built("arm64", version).read_bytes()))
        assert addresses(from_code(path)) == addresses(from_code(built("arm64", version)))


READ = ("schedt.nmidle", "schedt.mnext", "schedt.nmfreed", "schedt.ngsys", "schedt.npidle", "schedt.timeToRun")


def read_from(data: RuntimeData, by: Layout) -> set[int]:
    """Where those fields of sched are that are read; the global queue's length and the unused goroutines included."""
    fields = {f for f in by.offsets if f.startswith(("schedt.gFree.", "schedt.runq.size", "schedt.runqsize"))}
    return {data.sched_vaddr + by.offsets[field] for field in fields.union(READ) if field in by.offsets}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_layout_of_another_version_is_found_out(version: str) -> None:
    own_layout = stripped_layout(int(version[2:]))
    own = from_code(built("stripped", version), own_layout)
    refused = 0
    for minor in range(17, 28):
        other = stripped_layout(minor)
        try:
            found = from_code(built("stripped", version), other)
        except NotTraceable:
            refused += 1
            continue
        # Or it makes no difference: nothing that is read has moved, but for all of it together.
        assert read_from(found, other) == read_from(own, own_layout), minor
        assert found.histograms.items() <= own.histograms.items(), minor
        for vaddr, own_vaddr in zip(addresses(found)[1:], addresses(own)[1:], strict=True):
            assert vaddr in (own_vaddr, None), minor
    assert refused >= 5


def test_symbols_that_disagree_with_the_code(tmp_path: Path) -> None:
    image = bytearray(built("plain", "1.27").read_bytes())
    with built("plain", "1.27").open("rb") as file:
        section = ELFFile(file).get_section_by_name(".symtab")
        assert isinstance(section, SymbolTableSection)
        names = [symbol.name for symbol in section.iter_symbols()]
        place = section["sh_offset"] + names.index("runtime.sched") * section["sh_entsize"] + 8
    for shift in (8, 64, 4096):
        forged = bytearray(image)
        value = int.from_bytes(image[place : place + 8], "little") + shift
        forged[place : place + 8] = value.to_bytes(8, "little")
        path = tmp_path / "forged"
        path.write_bytes(forged)
        with pytest.raises(NotTraceable, match=r"symbols and its code disagree on where runtime\.sched is"):
            make_runtime_plan(str(path))


def without_code_of(function: str, path: Path) -> Path:
    """The stripped program with nothing in that function."""
    origin = built("stripped", "1.27")
    with Binary.open(origin) as binary:
        named = f"runtime.{function}"
        gone = Pclntab.find(binary).functions_named([named])[named]
        place = binary.file_offset(gone.vaddr)
    image = bytearray(origin.read_bytes())
    image[place : place + gone.size] = b"\x90" * gone.size
    path.write_bytes(image)
    return path


@pytest.mark.parametrize("function", ["procresize", "GOMAXPROCS", "handoffp", "stopTheWorldWithSema"])
def test_code_that_is_missing_and_not_missed(function: str, tmp_path: Path) -> None:
    found, whole = from_code(without_code_of(function, tmp_path / "gone")), from_code(built("stripped", "1.27"))
    assert addresses(found) == addresses(whole)
    stopping = {name for name in whole.histograms if "Stopping" in name}
    assert whole.histograms.keys() - found.histograms.keys() == (stopping if "stop" in function else set())


@pytest.mark.parametrize(("function", "what"), [("casgstatus", "record scheduling latencies"), ("allgadd", "allgs is")])
def test_code_that_is_missing(function: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(NotTraceable, match=f"its code doesn't .*{what}"):
        from_code(without_code_of(function, tmp_path / "gone"))


def test_not_go() -> None:
    with pytest.raises(NotTraceable, match="not a Go program"):
        make_runtime_plan("/bin/ls")


def test_version_that_is_not_known(tmp_path: Path) -> None:
    image = built("stripped", "1.27").read_bytes()
    path = tmp_path / "future"
    path.write_bytes(image.replace(b"go1.27.3", b"go1.99.3"))
    with pytest.raises(NotTraceable, match=r"go1\.99\.3: only Go up to 1\.27 is known"):
        make_runtime_plan(str(path))
