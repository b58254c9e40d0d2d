"""The code page that calibration puts its probes on: what it does at its sites, for both architectures."""

import ctypes
import platform

import capstone
import pytest

from schedtrace import calibrate

AMD64 = (calibrate._amd64(), capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64))
ARM64 = (calibrate._arm64(), capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM))


def _instructions(code: calibrate._Code, disassembler: capstone.Cs) -> dict[int, str]:
    found = {i.address: f"{i.mnemonic} {i.op_str}".strip() for i in disassembler.disasm(code.text, 0)}
    last = max(found)
    assert found[last] == "ret"
    assert len(code.text) - last == (1 if disassembler.arch == capstone.CS_ARCH_X86 else 4)
    return found


def test_sites_of_amd64() -> None:
    found = _instructions(*AMD64)
    addresses = list(found)
    assert [found[site] for site in AMD64[0].emulated] == ["push rbp"] * 3
    assert [found[site] for site in AMD64[0].stepped] == ["pop rbp"] * 3
    before = [addresses[addresses.index(site) - 3 : addresses.index(site)] for site in AMD64[0].emulated]
    assert [[found[address] for address in three] for three in before] == [
        ["mov rax, rdi", f"mov ebx, {old}", f"mov ecx, {new}"] for old, new in ((2, 4), (4, 1), (1, 2))
    ]
    assert [found[address] for address in addresses[-4:]] == ["jne 0xc", "pop r14", "pop rbx", "ret"]
    assert [found[address] for address in addresses[:3]] == ["push rbx", "push r14", "mov r14, rdi"]
    assert found[12] == "mov rax, rdi"


def test_sites_of_arm64() -> None:
    found = _instructions(*ARM64)
    assert [found[site] for site in ARM64[0].emulated] == [f"b #{site + 4:#x}" for site in ARM64[0].emulated]
    assert [found[site] for site in ARM64[0].stepped] == ["mov x7, x7"] * 3
    assert [(found[site - 8], found[site - 4]) for site in ARM64[0].emulated] == [
        (f"mov w1, #{old}", f"mov w2, #{new}") for old, new in ((2, 4), (4, 1), (1, 2))
    ]
    assert [found[address] for address in list(found)[-3:]] == ["b.ne #0x14", "ldr x28, [sp], #0x10", "ret"]
    assert [found[address] for address in list(found)[:2]] == ["str x28, [sp, #-0x10]!", "mov x28, x0"]
    assert found[20] == "mov w1, #2"


@pytest.mark.parametrize("loops", [1, 1000])
def test_the_code_runs_and_returns(loops: int) -> None:
    assert platform.machine() in ("x86_64", "aarch64")
    goroutines = ctypes.create_string_buffer(4 * 64)
    before = goroutines.raw
    with calibrate.CodePage() as page:
        page.pass_sites(loops)
        page.pass_sites(loops, goroutines, 64)
    assert goroutines.raw == before


def test_the_record_names_the_sites_at_run_time() -> None:
    with calibrate.CodePage() as page:
        record = page.target(page.emulated, calibrate.FUNCTIONS)
    addresses = list(record.sites)
    assert [address % 4096 for address in addresses[:3]] == list(page.emulated)
    assert not any(addresses[3:])
    assert list(record.kinds)[:4] == [*calibrate.FUNCTIONS, 0]
