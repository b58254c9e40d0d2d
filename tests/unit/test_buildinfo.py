"""Build information against `go version -m`, and from binaries that lack it or are not to be traced."""

import json
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schedtrace.errors import NotTraceable
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.buildinfo import BuildInfo, GoVersion, read_buildinfo
from tests.unit import elfwriter
from tests.unit.elfwriter import GoProgram, go_program
from tests.unit.forms import MATRIX, VERSIONS, built, old_extension, without_sections
from tests.workload import binary as workload
from tools import toolchains


def told_by_go(path: Path) -> tuple[str, dict[str, str]]:
    """What the newest `go version -m` says of a binary: version, and its build lines, unquoted."""
    command: list[str | Path] = [toolchains.go_command("1.27"), "version", "-m", path]
    first, *rest = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    settings = {}
    for line in rest:
        _, kind, *assignment = line.split("\t")
        if kind == "build":
            key, _, value = assignment[0].partition("=")
            settings[key] = json.loads(value) if value.startswith('"') else value
    return first.removeprefix(f"{path}: "), settings


def check(path: Path, expected: tuple[str, Mapping[str, str]]) -> None:
    with Binary.open(path) as binary:
        info = read_buildinfo(binary)
    assert info.version is not None
    assert (info.version.text, dict(info.settings)) == expected
    assert info.version.minor == int(info.version.text.split(".")[1])
    assert info.source == ".go.buildinfo"


@pytest.mark.parametrize(("form", "version"), MATRIX)
def test_version_and_settings_are_those_go_tells(tmp_path: Path, form: str, version: str) -> None:
    path = built(form, version)
    expected = told_by_go(path)
    assert expected[0] == f"go{toolchains.release(version)}"
    check(path, expected)
    bare = tmp_path / "bare"
    bare.write_bytes(without_sections(path.read_bytes()))
    check(bare, expected)


@pytest.mark.parametrize("program", toolchains.PROGRAMS)
def test_real_servers_are_told_as_go_tells_them(program: str) -> None:
    path = toolchains.program(program)
    check(path, told_by_go(path))


def test_quoted_settings_are_those_given() -> None:
    flags: dict[str, Any] = {"ldflags": ["-X", "main.x=1", "-s"], "tags": ["one", "two"], "trimpath": False}
    path = workload("hello", "1.27", **flags)
    expected = told_by_go(path)
    assert expected[1]["-ldflags"] == "-X main.x=1 -s"
    assert expected[1]["-tags"] == "one,two"
    check(path, expected)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", ["plain", "stripped", "pie", "cgo-pie"])
def test_without_build_information_the_version_is_the_runtimes(tmp_path: Path, form: str, version: str) -> None:
    if (form, version) not in [*MATRIX, ("stripped", version)]:
        form = "plain"
    image = built(form, version).read_bytes()
    assert image.count(b"\xff Go buildinf:") == 1
    path = tmp_path / "without"
    for content in (image, without_sections(image)):
        path.write_bytes(content.replace(b"\xff Go buildinf:", bytes(14)))
        with Binary.open(path) as binary:
            info = read_buildinfo(binary)
        expected = GoVersion(toolchains.minor(version), f"go{toolchains.release(version)}")
        assert info == BuildInfo(expected, {}, "runtime.buildVersion")


@pytest.mark.parametrize(
    ("text", "minor"),
    [
        ("go1.27.3", 27),
        ("go1.17", 17),
        ("go1.22rc1", 22),
        ("go1.9beta2", 9),
        ("go1.24.1 X:boringcrypto", 24),
        ("go1.21.0-custom", 21),
        ("devel go1.28-3f2a1b Tue Nov 10 2026", 28),
        ("go1.18.3 gccgo (Debian 12.2.0) 12.2.0 linux/amd64", 18),
    ],
)
def test_versions_as_toolchains_call_themselves(text: str, minor: int) -> None:
    assert GoVersion.parse(text) == GoVersion(minor, text)


@pytest.mark.parametrize("text", ["", "go", "go2.1", "devel +4a5b6c Tue", "go1.", "mango1.20", "go1.12345"])
def test_what_names_no_release_is_none(text: str) -> None:
    assert GoVersion.parse(text) is None


def opened(tmp_path: Path, content: GoProgram | bytes, *, with_sections: bool = True) -> Binary:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.elf.to_bytes(with_sections=with_sections))
    return Binary.open(path)


def refusal(tmp_path: Path, content: GoProgram | bytes) -> str:
    with opened(tmp_path, content) as binary:
        with pytest.raises(NotTraceable) as caught:
            read_buildinfo(binary)
        return str(caught.value).removeprefix(f"{binary.path}: ")


def pointer_form(version: str, modules: bytes, *, position_independent: bool) -> GoProgram:
    """A program of Go 1.17 with the build information that points to variables, in front of a table."""
    program = go_program("1.16", version=version, build_info=False, position_independent=position_independent,
                         named_sections=False)  # fmt: skip
    start = 0x700000
    strings = [version.encode(), modules]
    places, content = {}, bytearray(b"\xff Go buildinf:\x08\x00" + bytes(16))
    for number, string in enumerate(strings):
        variable = start + len(content)
        places[start + 16 + 8 * number] = variable
        content += struct.pack("<QQ", 0, len(string))
        if string:
            places[variable] = variable + 16
            content += string + bytes(-len(string) % 16)
    for place, target in places.items() if not position_independent else ():
        struct.pack_into("<Q", content, place - start, target)
    program.elf.load(start, bytes(content), elfwriter.READ | elfwriter.WRITE)
    program.elf.section(".go.buildinfo", start, 32)
    if position_independent:
        # One dynamic segment a file: the one that the program has gives way.
        headers = program.elf.program_headers
        headers[:] = [h for h in headers if h[0] != elfwriter.PT_DYNAMIC]
        program.elf.sections[:] = [s for s in program.elf.sections if s.name != ".dynamic"]
        program.elf.relocate(0x800000, places)
    return program


MODULES = elfwriter.build_information("x", "path\tmain\nbuild\tCGO_ENABLED=0\n")[35:]


@pytest.mark.parametrize("position_independent", [False, True])
@pytest.mark.parametrize("with_sections", [False, True])
@pytest.mark.parametrize(("modules", "settings"), [(MODULES, {"CGO_ENABLED": "0"}), (b"", {})], ids=["mod", "none"])
def test_go_1_17s_pointers_are_followed(
    tmp_path: Path,
    *,
    position_independent: bool,
    with_sections: bool,
    modules: bytes,
    settings: dict[str, str],
) -> None:
    program = pointer_form("go1.17.13", modules, position_independent=position_independent)
    with opened(tmp_path, program, with_sections=with_sections) as binary:
        assert read_buildinfo(binary) == BuildInfo(GoVersion(17, "go1.17.13"), settings, ".go.buildinfo")


def test_the_information_of_releases_with_pointers(tmp_path: Path) -> None:
    library = old_extension("3.2.0")
    check(library, ("go1.17.1", {}))
    assert told_by_go(library) == ("go1.17.1", {})
    assert refusal(tmp_path, old_extension("3.1.0").read_bytes()) == ("built with go1.13.8; Go 1.17 or newer is needed")
    bare = without_sections(old_extension("3.1.0").read_bytes())
    assert refusal(tmp_path, bare) == "built with go1.13.8; Go 1.17 or newer is needed"


@pytest.mark.parametrize("version", ["go1.16.15", "go1.13.8", "go1.9"])
def test_old_releases_are_refused_by_name(tmp_path: Path, version: str) -> None:
    program = pointer_form(version, b"", position_independent=False)
    assert refusal(tmp_path, program) == f"built with {version}; Go 1.17 or newer is needed"


def test_gccgo_is_refused_by_name(tmp_path: Path) -> None:
    reason = "built with gccgo, whose runtime is another one (libgo); build it with Go's own compiler"
    assert refusal(tmp_path, go_program(modules="build\t-compiler=gccgo\n")) == reason
    assert refusal(tmp_path, go_program(version="go1.18 gccgo (Debian 12.2.0-14) 12.2.0")) == reason


def test_a_version_to_come_is_read_as_any_other(tmp_path: Path) -> None:
    with opened(tmp_path, go_program(version="go1.43.1", text_in_header=False)) as binary:
        assert read_buildinfo(binary).version == GoVersion(43, "go1.43.1")


def test_a_version_that_is_no_release_is_none_and_its_settings_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path, go_program(version="devel +0a1b2c3d Mon")) as binary:
        assert read_buildinfo(binary) == BuildInfo(None, {"-compiler": "gc"}, ".go.buildinfo")


@pytest.mark.parametrize("form", ["1.16", "1.18", "1.20"])
def test_versions_that_do_not_fit_the_function_table_are_not_believed(tmp_path: Path, form: str) -> None:
    fitting = {"1.16": "go1.17.1", "1.18": "go1.19", "1.20": "go1.27rc2"}
    for version in fitting.values():
        program = go_program(form, version=version, build_info=False)
        if version == fitting[form]:
            with opened(tmp_path, program) as binary:
                assert read_buildinfo(binary).version == GoVersion(int(version[4:6]), version)
        elif form == "1.16":
            assert refusal(tmp_path, program) == (
                "built with Go 1.16 or 1.17, and nothing says which; Go 1.17 or newer is needed"
            )
        else:
            with opened(tmp_path, program) as binary:
                assert read_buildinfo(binary) == BuildInfo(None, {}, "none")


def test_the_variable_is_found_by_its_symbol(tmp_path: Path) -> None:
    program = go_program(version="go1.27-vendor_special!", build_info=False, symbols=True)
    with opened(tmp_path, program) as binary:
        info = read_buildinfo(binary)
        assert info == BuildInfo(GoVersion(27, "go1.27-vendor_special!"), {}, "runtime.buildVersion")


def test_settings_are_unquoted_as_go_quotes_them(tmp_path: Path) -> None:
    lines = [
        r'build	-ldflags="-X \"main.a=b c\" -X main.t=\tend\\"',
        r'build	"odd key"="\u00e4\x41\101\U0001F600"',
        "build\t-tags=`a,b`",
        "build\tCGO_CFLAGS=",
        'build\t-gcflags=-m="x"',
        "dep\tgolang.org/x/sys\tv0.1.0\th1:abc=",
        "build\tno value",
    ]
    with opened(tmp_path, go_program(modules="\n".join(lines) + "\n")) as binary:
        assert read_buildinfo(binary).settings == {
            "-ldflags": '-X "main.a=b c" -X main.t=\tend\\',
            "odd key": "äAA😀",
            "-tags": "a,b",
            "CGO_CFLAGS": "",
            "-gcflags": '-m="x"',
            "no value": "",
        }


def test_the_information_of_a_program_carried_as_data_is_not_the_programs(tmp_path: Path) -> None:
    carried = go_program(version="go1.18.1", build_info=True).elf.to_bytes()
    carried = bytes(-carried.index(b"\xff Go buildinf:") % 16) + carried
    program = go_program(version="go1.27.3", constants=carried)
    for with_sections in (True, False):
        with opened(tmp_path, program, with_sections=with_sections) as binary:
            info = read_buildinfo(binary)
            assert info.version == GoVersion(27, "go1.27.3")


@pytest.mark.parametrize(
    "information",
    [
        b"\xff Go buildinf:\x08\x02" + bytes(16) + b"\xff" * 9 + b"\x01",
        b"\xff Go buildinf:\x08\x02" + bytes(16) + b"\xff" * 30,
        b"\xff Go buildinf:\x08\x02" + bytes(16) + elfwriter.varint(300) + b"go1.99" + bytes(300),
        b"\xff Go buildinf:\x08\x02" + bytes(16) + b"\0\0",
        b"\xff Go buildinf:\x04\x00" + bytes(16),
        b"\xff Go buildinf:\x08\x01" + bytes(16),
        b"\xff Go buildinf:\x08\x00" + struct.pack("<QQ", 1 << 62, 0x401000),
        b"\xff Go buildinf:",
    ],
)
def test_damaged_information_is_passed_over(tmp_path: Path, information: bytes) -> None:
    program = go_program(version="go1.22.10", build_info=False)
    program.elf.load(0x700000, information, elfwriter.READ | elfwriter.WRITE)
    program.elf.section(".go.buildinfo", 0x700000, len(information))
    with opened(tmp_path, program) as binary:
        assert read_buildinfo(binary) == BuildInfo(GoVersion(22, "go1.22.10"), {}, "runtime.buildVersion")


def test_a_program_without_go_is_refused() -> None:
    with Binary.open("/bin/ls") as binary, pytest.raises(NotTraceable, match="/bin/ls: not a Go program, or"):
        read_buildinfo(binary)
