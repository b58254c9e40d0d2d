"""Pclntab against .symtab and nm in every form and version, and against tables written here."""

import re
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary, Section
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.symtab import Symtab
from tests.unit import elfwriter
from tests.unit.elfwriter import Function, GoProgram, go_program
from tests.unit.forms import LANDMARKS, MATRIX, VERSIONS, built, old_extension, without_sections

SHARED_NAMES = {"runtime.asmcgocall", "runtime.osyield", "runtime.reflectcall", "runtime/cgo.set_crosscall2"}
SCHEDULER = [
    "runtime." + name
    for name in ("casgstatus", "gopark", "ready", "execute", "park_m", "newproc", "newproc1", "goschedImpl",
                 "gosched_m", "goexit0", "goyield_m", "injectglist", "preemptPark", "reentersyscall",
                 "exitsyscall", "entersyscallblock", "schedule", "mcall", "systemstack", "stopm")
]  # fmt: skip


def listed(binary: Binary) -> dict[int, dict[str, int]]:
    """By address, the functions that .symtab has there: name and size in bytes."""
    symtab = Symtab.read(binary)
    assert symtab is not None
    by_address: dict[int, dict[str, int]] = defaultdict(dict)
    for name, function in symtab.functions_named(symtab.function_names()).items():
        by_address[function.vaddr][name] = function.size
    return by_address


def same_function(name: str, in_symtab: Iterable[str]) -> str | None:
    """The one of ``in_symtab`` that is the linker's name of what the function table calls ``name``."""
    plain = name.replace("·", ".")
    for other in in_symtab:
        # Instantiations of one generic function share the name f[...] in the function table.
        if other in (plain, f"{plain}.abi0") or plain == re.sub(r"\[.*\]", "[...]", other):
            return other
    return None


@pytest.mark.parametrize(("form", "version"), [pair for pair in MATRIX if pair[0] != "stripped"])
def test_every_function_is_where_the_symbol_table_has_it(form: str, version: str) -> None:
    with Binary.open(built(form, version)) as binary:
        table = Pclntab.find(binary)
        expected = listed(binary)
        assert table.moduledata is not None
        ambiguous = 0
        for function in table:
            here = expected.get(function.vaddr, {})
            name = same_function(function.name, here)
            if name is None:
                ambiguous += 1  # several C or Go functions of that name, so not in ``expected``
                continue
            assert here[name] <= function.size < here[name] + 64  # with the padding
        assert ambiguous <= 3
        assert len(table) > 1000
        go_text = range(table.text_vaddr, table.moduledata.etext_vaddr)
        assert {v for v in expected if v in go_text} <= {f.vaddr for f in table}


@pytest.mark.parametrize(("form", "version"), [pair for pair in MATRIX if pair[0] != "stripped"])
def test_looking_up_names_agrees_with_the_symbol_table(form: str, version: str) -> None:
    with Binary.open(built(form, version)) as binary:
        table, symtab = Pclntab.find(binary), Symtab.read(binary)
        assert symtab is not None
        names = {function.name for function in table if "[" not in function.name and "·" not in function.name}
        found = table.functions_named(names)
        also = symtab.functions_named(names)
        # Of these few, assembly with a wrapper for Go, the symbol table gives the wrapper (see Symtab).
        differing = {n for n in found if n not in also or found[n].vaddr != also[n].vaddr}
        assert differing <= SHARED_NAMES
        assert len(names - found.keys()) <= 8
        assert set(SCHEDULER) - found.keys() <= {"runtime.goyield_m", "runtime.entersyscallblock"}
        for name in ("runtime.newproc", "runtime.goexit1"):  # these two have a wrapper of the same name
            assert found[name].vaddr == also[name].vaddr


@pytest.mark.parametrize("version", VERSIONS)
def test_stripped_the_functions_are_those_of_the_twin_with_symbols(version: str) -> None:
    with Binary.open(built("stripped", version)) as stripped, Binary.open(built("plain", version)) as whole:
        assert Symtab.read(stripped) is None
        assert list(Pclntab.find(stripped)) == list(Pclntab.find(whole))


@pytest.mark.parametrize("version", LANDMARKS)
@pytest.mark.parametrize("form", ["cgo", "cgo-pie", "static-pie", "pie", "c-shared"])
def test_the_strip_command_changes_nothing(tmp_path: Path, form: str, version: str) -> None:
    path = tmp_path / "stripped"
    subprocess.run(["strip", "--strip-all", "-o", path, built(form, version)], check=True)
    with Binary.open(path) as stripped, Binary.open(built(form, version)) as whole:
        assert Symtab.read(stripped) is None
        assert list(Pclntab.find(stripped)) == list(Pclntab.find(whole))


@pytest.mark.parametrize(("form", "version"), MATRIX)
def test_without_section_headers_the_functions_are_the_same(tmp_path: Path, form: str, version: str) -> None:
    path = tmp_path / "bare"
    path.write_bytes(without_sections(built(form, version).read_bytes()))
    with Binary.open(path) as bare, Binary.open(built(form, version)) as whole:
        found, expected = Pclntab.find(bare), Pclntab.find(whole)
        assert (found.vaddr, found.text_vaddr, len(found)) == (
            expected.vaddr,
            expected.text_vaddr,
            len(expected),
        )
        assert found.moduledata == expected.moduledata
        assert found.functions_named(SCHEDULER) == expected.functions_named(SCHEDULER)


@pytest.mark.parametrize("version", ["1.19", "1.27"])
def test_text_does_not_start_where_the_section_does_when_c_comes_first(version: str) -> None:
    path = built("cgo", version)
    symbols = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    (text,) = re.findall(r"^([0-9a-f]+) [Tt] runtime\.text$", symbols, re.MULTILINE)
    (end,) = re.findall(r"^([0-9a-f]+) [Tt] runtime\.etext$", symbols, re.MULTILINE)
    with Binary.open(path) as binary:
        table = Pclntab.find(binary)
        assert table.text_vaddr == int(text, 16) > binary.sections[".text"].vaddr
        assert table.moduledata is not None
        assert table.moduledata.etext_vaddr == int(end, 16)


@pytest.mark.parametrize(("form", "version"), [("plain", "1.19"), ("cgo", "1.27"), ("arm64", "1.27")])
def test_the_function_at_an_address(form: str, version: str) -> None:
    with Binary.open(built(form, version)) as binary:
        table = Pclntab.find(binary)
        functions = list(table)
        for function in functions:
            if function.size:
                assert table.function_at(function.vaddr) == function
                assert table.function_at(function.vaddr + function.size - 1) == function
                assert table.name_at(function.vaddr + function.size // 2) == function.name
        end = functions[-1].vaddr + functions[-1].size
        for outside in (-1, 0, functions[0].vaddr - 1, end, 1 << 63, 1 << 70):
            assert table.function_at(outside) is None
            assert table.name_at(outside) is None


def test_names_stay_readable_after_the_binary_is_closed() -> None:
    with Binary.open(built("stripped", "1.27")) as binary:
        table = Pclntab.find(binary)
        execute = table.functions_named(["runtime.execute"])["runtime.execute"]
    assert table.name_at(execute.vaddr + 5) == "runtime.execute"
    assert table.functions_named(["runtime.execute"]) == {"runtime.execute": execute}


@pytest.mark.parametrize("bare", [False, True])
def test_a_library_that_go_1_17_built(tmp_path: Path, *, bare: bool) -> None:
    library = old_extension("3.2.0")
    shown = subprocess.run(["readelf", "--wide", "--dyn-syms", library], capture_output=True, text=True, check=True)
    rows = [line.split() for line in shown.stdout.splitlines()]
    exported = {row[7]: int(row[1], 16) for row in rows if row[3:4] == ["FUNC"] and row[6] != "UND"}
    path = tmp_path / "library"
    path.write_bytes(without_sections(library.read_bytes()) if bare else library.read_bytes())
    with Binary.open(path) as binary:
        assert binary.position_independent
        table = Pclntab.find(binary)
        assert (table.oldest_minor, table.newest_minor) == (16, 17)
        # Some of Go's functions are exported for cgo's sake.
        go = {name: v for name, v in exported.items() if name.startswith(("_cgo_topo", "_cgo_pan", "cross", "_cgoexp"))}
        assert len(go) == 6
        assert {name: function.vaddr for name, function in table.functions_named(go).items()} == go
        assert all(table.name_at(vaddr) == name for name, vaddr in go.items())
        assert table.functions_named(SCHEDULER).keys() >= set(SCHEDULER) - {"runtime.entersyscallblock"}
        ends = table.moduledata and (table.moduledata.min_pc_vaddr, table.moduledata.max_pc_vaddr)
        functions = list(table)
        assert ends == (functions[0].vaddr, functions[-1].vaddr + functions[-1].size)


FORMATS = {"1.16": "go1.17.13", "1.18": "go1.19.8", "1.20": "go1.22.10"}
SHAPES = [
    {"position_independent": independent, "named_sections": named_sections, "text_in_header": in_header,
     "machine": machine}
    for independent in (False, True)
    for named_sections in (False, True)
    for in_header in (False, True)
    for machine in (elfwriter.AMD64, elfwriter.ARM64)
]  # fmt: skip


def opened(tmp_path: Path, content: GoProgram | bytes, *, with_sections: bool = True) -> Binary:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.elf.to_bytes(with_sections=with_sections))
    return Binary.open(path)


@pytest.mark.parametrize("with_sections", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(str(value) for value in shape.values()))
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_in_every_shape(tmp_path: Path, form: str, shape: dict[str, bool], with_sections: bool) -> None:
    program = go_program(form, version=FORMATS[form], code_before_text=0x180, **shape)  # type: ignore[arg-type]
    with opened(tmp_path, program, with_sections=with_sections) as binary:
        table = Pclntab.find(binary)
        assert [(f.name, f.vaddr, f.size) for f in table] == [
            (f.name, program.vaddr_of(i), f.size) for i, f in enumerate(program.functions)
        ]
        assert (table.vaddr, table.text_vaddr) == (program.pclntab_vaddr, program.text_vaddr)
        assert table.moduledata is not None
        assert table.moduledata.vaddr == program.moduledata_vaddr
        newproc = table.functions_named(["runtime.newproc"])["runtime.newproc"]
        assert (newproc.vaddr, newproc.size) == (program.vaddr_of(4), 64)
        minors = (table.oldest_minor, table.newest_minor)
        assert minors == {"1.16": (16, 17), "1.18": (18, 19), "1.20": (20, None)}[form]


def test_of_a_wrapper_and_its_function_it_is_the_function_whichever_comes_first(tmp_path: Path) -> None:
    functions = [
        Function("a", func_id=23), Function("a"), Function("b"), Function("b", func_id=22),
        Function("special", func_id=9), Function("special", func_id=21),
        Function("shared[...]"), Function("shared[...]"),
    ]  # fmt: skip
    program = go_program(functions=functions)
    with opened(tmp_path, program) as binary:
        found = Pclntab.find(binary).functions_named(["a", "b", "special", "shared[...]"])
        assert {name: f.vaddr for name, f in found.items()} == {
            "a": program.vaddr_of(1),
            "b": program.vaddr_of(2),
            "special": program.vaddr_of(4),
        }


def test_of_functions_at_one_address_it_is_the_one_with_code(tmp_path: Path) -> None:
    functions = [Function("before"), Function("empty", 0), Function("none", 0), Function("code")]
    program = go_program(functions=functions)
    with opened(tmp_path, program) as binary:
        table = Pclntab.find(binary)
        assert table.name_at(program.vaddr_of(3)) == "code"
        assert table.name_at(program.vaddr_of(3) - 1) == "before"


@pytest.mark.parametrize("form", FORMATS)
def test_code_of_a_package_is_few_ranges(tmp_path: Path, form: str) -> None:
    functions = [
        Function("runtime.a"), Function("runtime_b", 0x20000), Function("runtime.c"), Function("main.d"),
        Function("runtime.e", 32), Function("main.f", 0x20000), Function("main.g"), Function("runtime."),
    ]  # fmt: skip
    program = go_program(form, functions=functions)
    with opened(tmp_path, program) as binary:
        table = Pclntab.find(binary)
        bounds = ((0, 1), (2, 5), (7, 8))
        expected = [(program.vaddr_of(first), program.vaddr_of(end)) for first, end in bounds]
        assert table.ranges_named("runtime.") == expected
        assert table.ranges_named("absent.") == []
        with pytest.raises(ValueError, match="longer than a word"):
            table.ranges_named("runtime.g")


@pytest.mark.parametrize("named_sections", [True, False])
def test_a_program_carried_as_data_is_not_the_program(tmp_path: Path, named_sections: bool) -> None:
    carried = go_program(functions=[Function("main.carried"), *elfwriter.FUNCTIONS]).elf.to_bytes()
    program = go_program(constants=carried, named_sections=named_sections)
    with opened(tmp_path, program) as binary:
        table = Pclntab.find(binary)
        assert table.vaddr == program.pclntab_vaddr
        assert [f.name for f in table] == [f.name for f in elfwriter.FUNCTIONS]


def test_a_section_with_the_tables_name_proves_nothing(tmp_path: Path) -> None:
    program = go_program(named_sections=False)
    program.elf.section(".gopclntab", program.text_vaddr, 64)
    with opened(tmp_path, program) as binary:
        assert isinstance(binary.sections[".gopclntab"], Section)
        assert Pclntab.find(binary).vaddr == program.pclntab_vaddr


def refusal(tmp_path: Path, content: GoProgram | bytes, *, with_sections: bool = True) -> str:
    with opened(tmp_path, content, with_sections=with_sections) as binary:
        with pytest.raises(NotTraceable) as caught:
            Pclntab.find(binary)
        message = str(caught.value)
        assert message.startswith(f"{binary.path}: ")
        return message.removeprefix(f"{binary.path}: ")


@pytest.mark.parametrize("known", [0, 2])
def test_between_two_tables_only_the_runtime_can_choose(tmp_path: Path, known: int) -> None:
    program = go_program(named_sections=False)
    table = elfwriter.function_table("1.20", program.functions, program.text_vaddr).content
    end = program.text_vaddr + sum(f.size for f in program.functions)
    second = 0x500000
    words = {0: second, 8: second + 72, 160: program.text_vaddr, 168: end, 176: program.text_vaddr, 184: end}
    record = b"".join(struct.pack("<Q", words.get(offset, 0)) for offset in range(0, 192, 8))
    program.elf.load(second, table + bytes(-len(table) % 8) + record * (known // 2), elfwriter.READ | elfwriter.WRITE)
    if not known:
        _forget_moduledata(program)
    assert refusal(tmp_path, program) == f"has 2 Go function tables and its runtime knows {known} of them"


def test_go_1_15_is_named(tmp_path: Path) -> None:
    reason = "built with Go 1.15 or older; Go 1.17 or newer is needed"
    with Binary.open(old_extension("3.1.0")) as binary, pytest.raises(NotTraceable, match=reason):
        Pclntab.find(binary)
    program = go_program("1.16", build_info=False)
    for start, content in program.elf.contents.items():
        program.elf.contents[start] = content.replace(b"\xfa\xff\xff\xff\0\0\x01\x08", b"\xfb\xff\xff\xff\0\0\x01\x08")
    assert refusal(tmp_path, program) == reason


def no_go() -> elfwriter.Elf:
    elf = elfwriter.Elf()
    elf.load(0x401000, b"\xc3" * 512)
    return elf


def test_a_program_without_go_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, no_go().to_bytes()) == (
        "not a Go program, or not of Go's own compiler: no function table (pclntab) in it"
    )
    with Binary.open("/bin/ls") as binary, pytest.raises(NotTraceable, match="/bin/ls: not a Go program, or"):
        Pclntab.find(binary)


@pytest.mark.parametrize("place", ["head", "tail"])
def test_upx_is_named(tmp_path: Path, place: str) -> None:
    image = no_go().to_bytes()
    if place == "head":
        image = image[:200] + b"UPX!" + image[204:]  # between the headers and the first segment
    else:
        image += bytes(5000) + b"UPX!\x0d\x16\x02\x0a" + bytes(28)
    assert refusal(tmp_path, image) == (
        "packed with UPX: its code exists only in memory, where no probe reaches it; run it unpacked (upx -d)"
    )


def test_gccgo_is_named(tmp_path: Path) -> None:
    reason = "built with gccgo, whose runtime is another one (libgo); build it with Go's own compiler"
    elf = no_go()
    elf.extra(".go_export", b"v3;\n")
    assert refusal(tmp_path, elf.to_bytes()) == reason
    elf = no_go()
    strings = b"\0libc.so.6\0libgo.so.21\0"
    elf.load(0x403000, struct.pack("<8Q", 1, 11, 5, 0x403040, 10, len(strings), 0, 0) + strings, elfwriter.READ)
    elf.mark(elfwriter.PT_DYNAMIC, 0x403000, 64)
    assert refusal(tmp_path, elf.to_bytes(with_sections=False)) == reason


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (8, 0, "0 functions don't fit in it"),
        (8, 1 << 40, "1099511627776 functions don't fit in it"),
        (8, (1 << 64) - 1, "18446744073709551615 functions don't fit in it"),
        (32, 0, "parts out of order"),
        (40, 8, "parts out of order"),
        (64, 1 << 63, "parts out of order"),
        (24, 0x500000, "its functions are not where code is"),
        (24, 0x4010F8, "the runtime's own record has other bounds"),
        (24, 0x403040, "its functions are not where code is"),
    ],
)
def test_a_damaged_table_is_refused_with_what_is_wrong(tmp_path: Path, offset: int, value: int, reason: str) -> None:
    program = go_program(code_before_text=0x100)
    (start,) = (s for s, c in program.elf.contents.items() if s <= program.pclntab_vaddr < s + len(c))
    content = bytearray(program.elf.contents[start])
    struct.pack_into("<Q", content, program.pclntab_vaddr - start + offset, value)
    program.elf.contents[start] = bytes(content)
    expected = f"damaged Go function table at {program.pclntab_vaddr:#x}: {reason}"
    assert refusal(tmp_path, program) == expected
    assert refusal(tmp_path, program, with_sections=False) == expected


def test_functions_out_of_order_are_refused(tmp_path: Path) -> None:
    program = go_program(functions=[Function("a", 64), Function("b", -32), Function("c", 64)])
    assert refusal(tmp_path, program).endswith("functions out of order")


def _forget_moduledata(program: GoProgram) -> None:
    for start, content in program.elf.contents.items():
        if start <= program.moduledata_vaddr < start + len(content):
            place = program.moduledata_vaddr - start
            program.elf.contents[start] = content[:place] + bytes(8) + content[place + 8 :]


def test_without_the_text_word_and_without_moduledata_nothing_is_guessed(tmp_path: Path) -> None:
    program = go_program(text_in_header=False)
    _forget_moduledata(program)
    assert refusal(tmp_path, program).endswith("nothing says where its code starts")


def test_half_a_million_functions_take_little_time_and_memory(tmp_path: Path) -> None:
    functions = [
        Function(f"example.com/module/package{i // 1000}.(*Type{i % 97}).Method{i}", 80) for i in range(500_000)
    ]
    functions[250_000:250_000] = [Function(name) for name in SCHEDULER]
    path = tmp_path / "large"
    path.write_bytes(go_program(functions=functions, text_in_header=False).elf.to_bytes())
    del functions
    script = """
import re, sys, time
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.pclntab import Pclntab

def anonymous_kib():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

path, names = sys.argv[1], sys.argv[2:]
before, started = anonymous_kib(), time.process_time()
with Binary.open(path) as binary:
    found = Pclntab.find(binary).functions_named(names)
print(len(found), time.process_time() - started, anonymous_kib() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, path, *SCHEDULER, *(f"example.com/nowhere.f{i}" for i in range(20))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found, cpu_seconds, anonymous_kib = done.stdout.split()
    assert int(found) == len(SCHEDULER)
    assert float(cpu_seconds) < 0.5
    assert int(anonymous_kib) < 60 * 1024
