"""Binary against readelf, against what the loader made of a running program, and against files that lie."""

import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from schedtrace.errors import NotTraceable, PermissionDenied
from schedtrace.symbols.binary import Arch, Binary
from tests.unit import elfwriter
from tests.unit.elfwriter import Elf
from tests.unit.forms import built, without_sections

SYSTEM_PROGRAMS = [Path("/bin/ls"), Path(sys.executable).resolve()]
GO_FORMS = [("plain", "1.27"), ("pie", "1.27"), ("cgo", "1.19"), ("c-shared", "1.24"), ("arm64-pie", "1.27")]
REAL = [*SYSTEM_PROGRAMS, *GO_FORMS]


def file_of(source: Path | tuple[str, str]) -> Path:
    return source if isinstance(source, Path) else built(*source)


def readelf(*arguments: str | Path) -> str:
    done = subprocess.run(["readelf", "--wide", *map(str, arguments)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def written(tmp_path: Path, content: bytes, name: str = "file") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def refusal(path: Path) -> str:
    """Why the file is refused, one line that starts with its path."""
    with pytest.raises(NotTraceable) as caught:
        Binary.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("source", REAL, ids=str)
def test_segments_are_those_readelf_shows(source: Path | tuple[str, str]) -> None:
    path = file_of(source)
    shown = []
    for line in readelf("--segments", path).splitlines():
        if line.split()[:1] == ["LOAD"]:
            offset, vaddr, _, file_size, memory_size = (int(number, 16) for number in line.split()[1:6])
            flags = line[line.index(line.split()[5]) + len(line.split()[5]) :]
            shown.append((vaddr, offset, file_size, memory_size, "R" in flags, "W" in flags, "E" in flags))
    with Binary.open(path) as binary:
        assert [
            (s.vaddr, s.file_offset, s.file_size, s.memory_size, s.readable, s.writable, s.executable)
            for s in binary.segments
        ] == sorted(shown)


@pytest.mark.parametrize("source", REAL, ids=str)
def test_sections_and_build_id_are_those_readelf_shows(source: Path | tuple[str, str]) -> None:
    path = file_of(source)
    row = re.compile(r" *\[ *\d+\] (\S+) +(\S+) +([0-9a-f]{16}) ([0-9a-f]{6,}) ([0-9a-f]{6,}) ([0-9a-f]+) ")
    rows = [match for line in readelf("--sections", path).splitlines() if (match := row.match(line))]
    note = re.search(r"Build ID: ([0-9a-f]+)", readelf("--notes", path))
    with Binary.open(path) as binary:
        found = [(s.name, s.vaddr, s.file_offset, s.size, s.entry_size) for s in binary.section_table[1:]]
        assert found == [(match[1], *(int(number, 16) for number in match.groups()[2:])) for match in rows]
        assert binary.build_id == (note[1] if note else None)
        kind = re.search(r"Type: +(\w+)", readelf("--file-header", path))
        assert kind is not None
        assert binary.position_independent == (kind[1] == "DYN")


def test_the_architecture_is_the_files() -> None:
    with Binary.open(built("arm64", "1.27")) as arm64, Binary.open(built("plain", "1.27")) as amd64:
        assert (arm64.arch, amd64.arch) == (Arch.ARM64, Arch.AMD64)


@pytest.mark.parametrize("source", REAL, ids=str)
def test_addresses_and_offsets_are_two_names_of_one_byte(source: Path | tuple[str, str]) -> None:
    path = file_of(source)
    image = path.read_bytes()
    with Binary.open(path) as binary:
        for segment in (s for s in binary.segments if s.file_size):
            for inside in (0, 1, segment.file_size // 2, segment.file_size - 1):
                vaddr = segment.vaddr + inside
                offset = binary.file_offset(vaddr)
                assert offset == segment.file_offset + inside
                assert binary.vaddr_at(offset) == vaddr
                assert binary.read(vaddr, 1) == image[offset : offset + 1]
            assert (
                binary.read(segment.vaddr, segment.file_size)
                == (image[segment.file_offset : segment.file_offset + segment.file_size])
            )
        text = binary.sections[".text"]
        assert binary.file_offset(text.vaddr) == text.file_offset
        assert binary.view(text.vaddr, text.size) == binary.content(text)


def test_what_the_file_does_not_back_is_refused(tmp_path: Path) -> None:
    elf = Elf()
    elf.load(0x401000, b"code" * 4, elfwriter.READ | elfwriter.EXECUTE)
    elf.load(0x403010, b"data", elfwriter.READ | elfwriter.WRITE, memory_size=100)
    path = written(tmp_path, elf.to_bytes())
    with Binary.open(path) as binary:
        assert binary.read(0x403010, 4) == b"data"
        assert binary.read(0x403014 - 1, 1) == b"a"
        for vaddr, size in [
            (0x403014, 1),
            (0x403010, 5),
            (0x400FFF, 1),
            (0x401010, 1),
            (0x401000, -1),
            (-1, 1),
        ]:
            with pytest.raises(NotTraceable, match=re.escape(f"{path}: the file has no ")):
                binary.view(vaddr, size)
        with pytest.raises(NotTraceable, match="no content for address 0x403014"):
            binary.file_offset(0x403014)
        with pytest.raises(NotTraceable, match="byte 1 of the file is not loaded"):
            binary.vaddr_at(1)


def test_segments_need_not_be_in_the_order_of_addresses(tmp_path: Path) -> None:
    elf = Elf()
    elf.load(0x500000, b"high")
    elf.load(0x401000, b"low.")
    with Binary.open(written(tmp_path, elf.to_bytes())) as binary:
        assert [s.vaddr for s in binary.segments] == [0x401000, 0x500000]
        assert (binary.read(0x401000, 4), binary.read(0x500000, 4)) == (b"low.", b"high")


@pytest.mark.parametrize("form", ["pie", "cgo-pie", "static-pie", "c-shared", "arm64-pie"])
@pytest.mark.parametrize("version", ["1.19", "1.27"])
def test_pointers_are_the_addends_of_readelfs_relocations(form: str, version: str) -> None:
    path = built(form, version)
    row = re.compile(r"([0-9a-f]{16})  [0-9a-f]{16} R_(?:X86_64|AARCH64)_RELATIVE? +([0-9a-f]+)$")
    addends = {
        int(match[1], 16): int(match[2], 16)
        for line in readelf("--relocs", path).splitlines()
        if (match := row.match(line))
    }
    assert len(addends) > 1000
    with Binary.open(path) as binary:
        assert {vaddr: binary.pointer(vaddr) for vaddr in addends} == addends
        for segment in (s for s in binary.segments if s.writable):
            first, count = -(-segment.vaddr // 8) * 8, (segment.file_size - 8) // 8
            words = binary.pointers(first, count).tolist()
            for vaddr, word in zip(range(first, first + 8 * count, 8), words, strict=True):
                assert word == addends.get(vaddr, int.from_bytes(binary.read(vaddr, 8), "little"))
        assert binary.sections[".rela.dyn" if ".rela.dyn" in binary.sections else ".rela"].size >= 24 * len(addends)


@pytest.mark.parametrize("form", ["pie", "cgo-pie", "static-pie"])
@pytest.mark.parametrize("version", ["1.19", "1.24", "1.27"])
def test_pointers_are_what_the_loader_made_of_them(form: str, version: str) -> None:
    path = built(form, version)
    with (
        Binary.open(path) as binary,
        subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        try:
            assert process.stdout is not None
            assert b"ready" in process.stdout.readline()
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            bias = min(int(line.split("-")[0], 16) for line in maps if line.endswith(str(path)))
            bias -= binary.segments[0].vaddr & ~0xFFF
            # What is read-only after relocation: the program can't have changed it since.
            (relro,) = re.findall(r"GNU_RELRO +0x\w+ 0x(\w+) 0x\w+ 0x\w+ 0x(\w+)", readelf("--segments", path))
            start, size = (int(number, 16) for number in relro)
            places = [v for v in binary.relocations.vaddrs.tolist() if start <= v < start + size]
            assert len(places) > 100
            with Path(f"/proc/{process.pid}/mem").open("rb", buffering=0) as memory:
                memory.seek(bias + start)
                loaded = memory.read(size)
            assert len(loaded) == size
        finally:
            process.kill()
        for vaddr in places:
            (word,) = struct.unpack_from("<Q", loaded, vaddr - start)
            assert word - bias == binary.pointer(vaddr)


def test_relocations_are_found_in_any_order_and_in_place_words_where_there_is_none(tmp_path: Path) -> None:
    elf = Elf(elf_type=elfwriter.SHARED)
    elf.load(0x1000, struct.pack("<4Q", 11, 22, 33, 44), elfwriter.READ | elfwriter.WRITE)
    elf.relocate(0x3000, {0x1018: 0x9999, 0x1008: 0x7777})
    with Binary.open(written(tmp_path, elf.to_bytes())) as binary:
        assert [binary.pointer(v) for v in (0x1000, 0x1008, 0x1010, 0x1018)] == [11, 0x7777, 33, 0x9999]
        assert binary.pointers(0x1000, 4).tolist() == [11, 0x7777, 33, 0x9999]
        assert binary.pointers(0x1010, 1).tolist() == [33]
        assert binary.relocations.vaddrs_of(0x7777) == [0x1008]


def test_without_section_headers_all_but_sections_is_the_same(tmp_path: Path) -> None:
    path = built("cgo-pie", "1.27")
    with (
        Binary.open(path) as whole,
        Binary.open(written(tmp_path, without_sections(path.read_bytes()))) as bare,
    ):
        assert bare.sections == {}
        assert bare.section_table == ()
        assert (bare.segments, bare.build_id, bare.arch) == (whole.segments, whole.build_id, whole.arch)
        assert bare.relocations.vaddrs.tolist() == whole.relocations.vaddrs.tolist()


def test_the_writers_files_are_sound(tmp_path: Path) -> None:
    for position_independent in (False, True):
        program = elfwriter.go_program(position_independent=position_independent, symbols=True)
        path = written(tmp_path, program.elf.to_bytes())
        readelf("--all", path)  # says so on standard error, which must stay empty, if it isn't
        with Binary.open(path) as binary:
            assert ".shstrtab" in binary.sections


HEADER = elfwriter.go_program().elf.to_bytes()
CUT = f"truncated: the file ends at byte {len(HEADER)}"


def changed(offset: int, form: str, value: int) -> bytes:
    image = bytearray(HEADER)
    struct.pack_into(form, image, offset, value)
    return bytes(image)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"#!/bin/sh\n", "not an ELF file"),
        (b"\x7fEL", "not an ELF file"),
        (b"\x7fELF", "truncated: the file ends at byte 4, the ELF header at 64"),
        (HEADER[:63], "truncated: the file ends at byte 63, the ELF header at 64"),
        (changed(4, "<B", 1), "not a 64-bit ELF file; only amd64 and arm64 can be traced"),
        (changed(5, "<B", 2), "not a little-endian ELF file; only amd64 and arm64 can be traced"),
        (changed(18, "<H", 243), "built for RISC-V; only amd64 and arm64 can be traced"),
        (changed(18, "<H", 4711), "built for machine 4711; only amd64 and arm64 can be traced"),
        (changed(16, "<H", 1), "neither an executable nor a shared object but an object file, not linked"),
        (changed(16, "<H", 4), "neither an executable nor a shared object but a core dump"),
        (changed(16, "<H", 77), "neither an executable nor a shared object but ELF type 77"),
        (changed(56, "<H", 0), "no program headers: nothing the kernel can load"),
        (changed(56, "<H", 0xFFFF), "damaged: the kernel would refuse its program headers"),
        (changed(54, "<H", 32), "damaged: the kernel would refuse its program headers"),
        (changed(58, "<H", 40), "damaged: section headers of an unknown size"),
        (changed(32, "<Q", 1 << 63), f"{CUT}, the program headers at {(1 << 63) + 168}"),
        (changed(40, "<Q", len(HEADER) - 63), f"{CUT}, the section headers at "),
        (changed(60, "<H", 65535), f"{CUT}, the section headers at "),
        (changed(64 + 32, "<Q", 1 << 40), "damaged: impossible size of the segment at 0x401000"),
        (changed(64 + 16, "<Q", 1 << 63), "damaged: impossible size of the segment at 0x8000000000000000"),
        (changed(64 + 8, "<Q", 0x1008), "damaged: the segment at 0x401000 can't be mapped from byte 4104"),
        (changed(64 + 56 + 16, "<Q", 0x401040), "damaged: segments overlap at 0x401040"),
        (changed(64 + 8, "<Q", 1 << 40), f"{CUT}, the segment at 0x401000 at 109951162"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_right_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    assert refusal(written(tmp_path, content)).startswith(reason)


def test_only_debug_symbols_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "hello.debug"
    subprocess.run(["objcopy", "--only-keep-debug", built("cgo", "1.27"), path], check=True)
    assert refusal(path) == "no code in it (a file of debug symbols only?)"


def test_segments_that_share_their_content_are_refused(tmp_path: Path) -> None:
    elf = Elf()
    elf.load(0x401000, bytes(5000))
    image = bytearray(elf.to_bytes())
    row = image[64:120]
    for number in range(1, 6):
        struct.pack_into("<Q", row, 16, 0x401000 + number * 0x10000)
        image[64 + 56 * number : 120 + 56 * number] = row
    struct.pack_into("<H", image, 56, 6)
    assert refusal(written(tmp_path, bytes(image))) == "damaged: its segments share their content"


def test_truncated_anywhere_it_is_refused_or_whole_enough(tmp_path: Path) -> None:
    elf = elfwriter.go_program(symbols=True).elf
    image = elf.to_bytes()
    path = tmp_path / "file"
    refused = []
    for size in sorted({*range(400), *range(400, len(image), 11), *range(len(image) - 400, len(image))}):
        path.write_bytes(image[:size])
        refused.append(refusal(path))
    assert refused[0] == "empty file"
    assert set(refused[1:4]) == {"not an ELF file"}
    assert all(reason.startswith("truncated: ") for reason in refused[4:])
    path.write_bytes(image)
    Binary.open(path).close()


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def open_files() -> set[str]:
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.mkdir, "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (socket_at, "not a file that can be mapped"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to("/proc/self/maps"), "empty file"),
        (lambda path: path.symlink_to("/sys/kernel/uevent_seqnum"), "not a file that can be mapped"),
        (lambda path: path.with_name("else").touch(), "No such file or directory"),
    ],
    ids=["folder", "FIFO", "socket", "loop", "device", "procfs", "sysfs", "nothing"],
)  # fmt: skip
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object], reason: str) -> None:
    path = tmp_path / "it"
    make(path)
    assert refusal(path) == reason


def test_an_impossible_path_is_refused() -> None:
    with pytest.raises(NotTraceable, match="not a path to a file that can be read"):
        Binary.open("/bin/l\0s")


def test_without_the_right_to_read_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # root, which may run this, is denied nothing
    with pytest.raises(PermissionDenied, match="no permission to read it; run as root, or with CAP_SYS_PTRACE"):
        Binary.open(tmp_path / "file")


def test_views_outlive_the_binary_and_the_binary_ends_when_closed(tmp_path: Path) -> None:
    elf = Elf()
    elf.load(0x401000, b"still here")
    binary = Binary.open(written(tmp_path, elf.to_bytes()))
    view = binary.view(0x401000, 10)
    binary.close()
    assert bytes(view) == b"still here"
    with pytest.raises(ValueError, match="released"):
        binary.read(0x401000, 1)


def test_no_file_stays_open(tmp_path: Path) -> None:
    before = open_files()
    for content in (HEADER, HEADER[:-1], b"no"):
        path = written(tmp_path, content)
        try:
            Binary.open(path).close()
        except NotTraceable:
            assert content != HEADER
    assert open_files() == before


def memory_kib() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def test_a_huge_file_costs_nothing_to_open(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER)
    os.truncate(path, 64 << 30)  # sparse
    before, started = memory_kib(), time.process_time()
    with Binary.open(path) as binary:
        assert len(binary.segments) == 3
        assert time.process_time() - started < 0.1
        assert memory_kib() - before < 4096
