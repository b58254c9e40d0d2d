"""The sampled level's plan: where its one probe goes, what it is hit with, where goroutines stop; and where it isn't
possible. Disassemblers and symbol tables that the project has no part in are the oracle."""

import re
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from schedtrace import target
from schedtrace.abi import STOP_LIMIT, Duration, ProbeKind, StopPlace
from schedtrace.errors import NotTraceable
from schedtrace.plan import ProbePlan, make_plan
from schedtrace.sampled_plan import DURATIONS, SampledPlan
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.window import FULL_LEVEL, SAMPLED_LEVEL
from tests.unit.disassembly import Line, callee, disassembly
from tests.unit.forms import MATRIX, VERSIONS, built, without_sections
from tools import pgo, toolchains

BPF = Path(__file__).parents[2] / "bpf"
RECORD = "(*timeHistogram).record"
SAMPLED = tuple(version for version in VERSIONS if version != "1.19")
# Which functions stop their goroutine by mcall -> what that is.
STOPPED_IN = {
    **dict.fromkeys(("gopark",), StopPlace.PARK),
    **dict.fromkeys(("Gosched", "goschedIfBusy", "goyield", "semrelease1", "main", "gcStart"), StopPlace.YIELD),
    **dict.fromkeys(("gcAssistAlloc", "memclrNoHeapPointersChunked", "bgsweep"), StopPlace.YIELD),
    "asyncPreempt2": StopPlace.PREEMPT,
    **dict.fromkeys(("debugCallWrap", "debugCallWrap1"), StopPlace.UNKNOWN),
}
NEVER_BACK = {"goexit1", "gopanic", "(*_panic).nextDefer", "coroswitch", "corostart", "coroexit"}
STOPS_OF_THE_WORLD = {duration for duration in Duration if duration not in (Duration.RUN, Duration.COUNT)}


def sampled(path: Path) -> tuple[ProbePlan, SampledPlan]:
    plan = make_plan(str(path))
    assert plan.sampled is not None, plan.sampled_obstacle
    assert plan.sampled_obstacle == ""
    assert plan.levels == (SAMPLED_LEVEL, FULL_LEVEL)
    return plan, plan.sampled


def data_symbols(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".symtab")
        assert isinstance(section, SymbolTableSection)
        return {symbol.name: symbol["st_value"] for symbol in section.iter_symbols()}


def behind_calls(lines: list[Line], name: str) -> list[int]:
    """The addresses behind a function's calls of ``name``."""
    return [
        following.vaddr
        for line, following in pairwise(lines)
        if line.mnemonic in ("call", "CALL") and callee(line) == name
    ]


@pytest.mark.parametrize(
    ("form", "version"), [*(m for m in MATRIX if m[1] in SAMPLED), *(("arm64", version) for version in SAMPLED)]
)
def test_plan_of_every_version_and_form(form: str, version: str) -> None:
    plan, found = sampled(built(form, version))
    minor = int(version[2:])
    assert found.function == f"runtime.{RECORD}"
    assert found.site.emulated
    # Where objdump has the first branch, or the push that comes first.
    mnemonic = {"amd64": "push" if minor <= 23 else "jl", "arm64": "tbz"}[plan.arch]
    assert found.site.instruction.split()[0] == mnemonic
    assert found.unseen == (() if minor >= 22 else ("stops of the world that are not the collector's",))
    seen = STOPS_OF_THE_WORLD if minor >= 22 else {Duration.STOPPED_GC}
    assert set(found.histograms) == {Duration.RUN, *seen}
    assert found.stops[0][1] is StopPlace.PARK
    kinds = Counter(place for _, place in found.stops)
    assert (kinds[StopPlace.PARK], kinds[StopPlace.SYSCALL]) == (1, 1)
    assert kinds[StopPlace.PREEMPT] == (1 if minor >= 26 else 2)
    assert kinds[StopPlace.UNKNOWN] == 2  # both of debugCallWrap's
    assert found.other_place is StopPlace.UNKNOWN
    assert len({vaddr for vaddr, _ in found.stops}) == len(found.stops)


@pytest.mark.parametrize("form", ["plain", "arm64"])
@pytest.mark.parametrize("version", SAMPLED)
def test_site_and_addresses(form: str, version: str) -> None:
    path = built(form, version)
    plan, found = sampled(path)
    lines = disassembly(path, plan.arch)[RECORD]
    (at,) = (line for line in lines if line.vaddr == found.site.vaddr)
    before = [line for line in lines if line.vaddr < at.vaddr]
    # Both arguments are as they came: nothing before it writes to their registers.
    written = re.compile(r"^(e?ax|rax|e?bx|rbx|r14)," if plan.arch == "amd64" else r", ?R(0|1|28)$")
    stores = ("cmp", "test", "CMP", "TST", "push", "MOVD.W")
    assert not [line for line in before if written.search(line.operands) and not line.mnemonic.startswith(stores)]
    symbols = data_symbols(path)
    assert plan.layout is not None
    for field, duration in DURATIONS.items():
        if duration in found.histograms and field in plan.layout.offsets:
            base = symbols["runtime.memstats" if field.startswith("mstats") else "runtime.sched"]
            assert found.histograms[duration] == base + plan.layout.offsets[field]
    assert found.mcall_vaddr == symbols["runtime.mcall"]


@pytest.mark.parametrize("form", ["plain", "arm64"])
@pytest.mark.parametrize("version", SAMPLED)
def test_where_goroutines_stop(form: str, version: str) -> None:
    path = built(form, version)
    plan, found = sampled(path)
    expected: dict[int, StopPlace] = {}
    for name, lines in disassembly(path, plan.arch).items():
        behind = behind_calls(lines, "mcall")
        if name == "exitsyscall":  # yields if the collector wants it to; the last way is without a P
            places = [StopPlace.YIELD] * (len(behind) - 1) + [StopPlace.SYSCALL]
            expected.update(zip(behind, places, strict=True))
        elif behind and name not in NEVER_BACK:
            expected.update(dict.fromkeys(behind, STOPPED_IN[name]))
    assert dict(found.stops) == expected


def called_by_goabi(found: SampledPlan, path: Path, arch: str, folder: Path) -> list[str]:
    """What bpf/goabi.h makes of the bytes before each stop, and before the address behind it: "mcall" or "no"."""
    with Binary.open(path) as binary:
        places = [vaddr + shift for vaddr, _ in found.stops for shift in (0, 4)]
        rows = [(vaddr, ", ".join(map(str, binary.read(vaddr - 5, 5)))) for vaddr in places]
    table = ",\n".join(f"{{ {vaddr}ULL, {{ {content} }} }}" for vaddr, content in rows)
    (folder / "calls.c").write_text(
        "#include <stdio.h>\n"
        "typedef unsigned char __u8; typedef unsigned int __u32; typedef int __s32;\n"
        "typedef long long __s64; typedef unsigned long long __u64;\n"
        f"#undef __x86_64__\n#define {'__aarch64__' if arch == 'arm64' else '__x86_64__'} 1\n"
        '#include "goabi.h"\n'
        f"static struct {{ __u64 pc; __u8 bytes[5]; }} table[] = {{ {table} }};\n"
        "int main(void)\n{\n"
        "\tfor (unsigned i = 0; i < sizeof(table) / sizeof(*table); i++) {\n"
        "\t\t__u8 *call = table[i].bytes + 5 - CALL_SIZE;\n"
        f"\t\tputs(IS_CALL(call) && CALLED(call, table[i].pc) == {found.mcall_vaddr}ULL ? \"mcall\" : \"no\");\n"
        "\t}\n}\n"
    )
    command = ["gcc", f"-I{BPF}", "calls.c", "-o", "calls"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return subprocess.run([folder / "calls"], capture_output=True, text=True, check=True, timeout=60).stdout.split()


@pytest.mark.parametrize("form", ["plain", "pie", "arm64", "arm64-pie"])
def test_calls_as_the_program_reads_them(form: str, tmp_path: Path) -> None:
    path = built(form, "1.27")
    plan, found = sampled(path)
    assert called_by_goabi(found, path, plan.arch, tmp_path) == ["mcall", "no"] * len(found.stops)


def test_more_places_than_the_list_has(tmp_path: Path) -> None:
    """Those that may be many are left out: yields."""
    source = tmp_path / "yields"
    source.mkdir()
    calls = "\n".join(f"func f{n}() {{ for i := 0; i < {n}; i++ {{ runtime.Gosched() }} }}" for n in range(2, 60))
    uses = "\n".join(f"f{n}()" for n in range(2, 60))
    (source / "main.go").write_text(f'package main\nimport "runtime"\n{calls}\nfunc main() {{\n{uses}\n}}\n')
    (source / "go.mod").write_text("module yields\ngo 1.21\n")
    _, found = sampled(toolchains.build("1.22", source))  # which inlines Gosched
    assert len(found.stops) == STOP_LIMIT
    assert found.other_place is StopPlace.YIELD
    kinds = Counter(place for _, place in found.stops)
    assert (kinds[StopPlace.PARK], kinds[StopPlace.SYSCALL], kinds[StopPlace.PREEMPT]) == (1, 1, 2)


def test_stripped_is_no_different(tmp_path: Path) -> None:
    for form, version in (("plain", "1.21"), ("pie", "1.27"), ("arm64", "1.24")):
        origin = built(form, version)
        bare = tmp_path / "bare"
        bare.write_bytes(without_sections(origin.read_bytes()))
        assert make_plan(str(bare)).sampled == make_plan(str(origin)).sampled


@pytest.mark.parametrize("version", ["1.21", "1.22", "1.24", "1.27"])
def test_profile(version: str) -> None:
    """A profile may make the compiler copy record, or gopark: the first is found out, the second does no harm."""
    path = pgo.build_pgo(version)
    lines = disassembly(path, "amd64")
    plan = make_plan(str(path))
    if behind_calls(lines["casgstatus"], RECORD):
        assert behind_calls(lines["execute"], RECORD)
        assert plan.sampled is not None
        parks = [vaddr for vaddr, place in plan.sampled.stops if place is StopPlace.PARK]
        names = {name for name in lines for vaddr in behind_calls(lines[name], "mcall") if vaddr in parks}
        assert names == {"gopark", "chansend", "chanrecv"}
    else:
        assert plan.sampled is None
        assert plan.sampled_obstacle == f"the compiler copied runtime.{RECORD} into runtime.casgstatus"
        assert plan.levels == (FULL_LEVEL,)
        with pytest.raises(NotTraceable, match=r"the sampled level is not possible: the compiler copied"):
            plan.at_sampled_level()


def test_profiles_have_both_effects() -> None:
    """Else the test above would be half a test."""
    possible = {version: make_plan(str(pgo.build_pgo(version))).sampled is not None for version in ("1.24", "1.27")}
    assert possible == {"1.24": True, "1.27": False}


@pytest.mark.parametrize("form", ["plain", "stripped", "arm64"])
def test_before_1_20(form: str) -> None:
    plan = make_plan(str(built(form, "1.19")))
    assert plan.sampled is None
    assert plan.sampled_obstacle.startswith("up to Go 1.19 the compiler copies ")


def forged(path: Path, function: str, old: bytes, new: bytes) -> Path:
    """The program with each ``old`` in a function's code replaced by ``new``."""
    origin = built("plain", "1.27")
    with Binary.open(origin) as binary:
        named = f"runtime.{function}"
        found = Pclntab.find(binary).functions_named([named])[named]
        start = binary.file_offset(found.vaddr)
    image = bytearray(origin.read_bytes())
    code = bytes(image[start : start + found.size])
    assert old in code
    image[start : start + found.size] = code.replace(old, new)
    path.write_bytes(image)
    return path


def call_of(name: str, caller: str) -> tuple[bytes, int]:
    """The bytes of the call of record in a function of the plain program, and its address."""
    lines = disassembly(built("plain", "1.27"), "amd64")
    (behind,) = behind_calls(lines[caller], name)
    with Binary.open(built("plain", "1.27")) as binary:
        return binary.read(behind - 5, 5), behind - 5


def test_a_call_that_is_none(tmp_path: Path) -> None:
    """casgstatus names the histogram and doesn't hand it to record."""
    code, _ = call_of(RECORD, "casgstatus")
    plan = make_plan(str(forged(tmp_path / "forged", "casgstatus", code, b"\x0f\x1f\x44\x00\x00")))
    assert plan.sampled is None
    assert plan.sampled_obstacle == f"the compiler copied runtime.{RECORD} into runtime.casgstatus"


def test_stops_that_are_not_recorded_there(tmp_path: Path) -> None:
    lines = disassembly(built("plain", "1.27"), "amd64")["startTheWorldWithSema"]
    path = tmp_path / "forged"
    path.write_bytes(built("plain", "1.27").read_bytes())
    with Binary.open(path) as binary:
        offsets = [binary.file_offset(behind - 5) for behind in behind_calls(lines, RECORD)]
    image = bytearray(path.read_bytes())
    for offset in offsets:
        image[offset : offset + 5] = b"\x0f\x1f\x44\x00\x00"
    path.write_bytes(image)
    found = make_plan(str(path)).sampled
    assert found is not None
    (unseen,) = found.unseen
    assert "(stopping_gc, stopping_other, stopped_gc, stopped_other)" in unseen
    assert set(found.histograms) == {Duration.RUN}  # the beginning of a stop is of no use without its end


@pytest.mark.parametrize("form", ["plain", "pie", "arm64"])
def test_the_record_of_a_process(form: str) -> None:
    plan, found = sampled(built(form, "1.27"))
    bias = 0x5555_0000_0000
    assert target.sampler_of(plan, bias) is None  # it has other probes
    at_level = plan.at_sampled_level()
    assert [probe.kind for probe in at_level.probes] == [ProbeKind.RECORD]
    assert (at_level.probes[0].vaddr, at_level.mode) == (found.site.vaddr, "record")
    sampler = target.sampler_of(at_level, bias)
    assert sampler is not None
    assert list(sampler.histograms) == [bias + found.histograms[d] for d in sorted(found.histograms)]
    listed = [(stop - bias, place) for stop, place in zip(sampler.stops, sampler.places, strict=True) if stop]
    assert listed == list(found.stops)
    assert (sampler.mcall - bias, sampler.other_place) == (found.mcall_vaddr, found.other_place)
    assert at_level.layout is not None
    offsets = at_level.layout.offsets
    assert (sampler.g_m, sampler.m_curg) == (offsets["g.m"], offsets["m.curg"])
    assert (sampler.g_status, sampler.g_pc) == (offsets["g.atomicstatus"], offsets["g.sched.pc"])
