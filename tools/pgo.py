"""Profile-guided builds: what makes the Go compiler inline the runtime's own functions into their callers.

A program with a ``default.pgo`` is compiled with its runtime (Go 1.21 and later), and a profile of a
program that spends its time in the scheduler makes the compiler inline ``casgstatus`` where goroutines
park, are readied and run. The recipe: profile the ping-pong workload, build it again with that profile, and
look at the code whether it worked.

Inlined does not mean that no call is left: ``park_m`` has two, and the one that is seldom reached (the park
that is taken back) stays a call.
"""

import re
import subprocess
from pathlib import Path

from tools import toolchains
from tools.toolchains import ToolchainError

PINGPONG = Path(__file__).parents[1] / "tests/golang/pingpong"
ROUND_TRIPS = 5_000_000  # about 3 seconds, 250 samples
PROFILES = 3  # a profile is a sample: one may miss what the next one has
INLINED_INTO = ("runtime.execute", "runtime.ready", "runtime.park_m")
# The one 32-bit compare-and-swap that casgstatus does on g.atomicstatus, which is 144 or 152 bytes into g.
_STATUS_CAS = re.compile(r"\block cmpxchg %(?:e[a-z]+|r\d+d),0x9[08]\(%r\w+\)")


def changes_status_inline(program: Path, function: str) -> bool:
    """Whether ``function`` itself swaps a goroutine's status, by objdump; needs the symbol table."""
    text = toolchains.run(
        ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={function}", program],
        what=f"disassemble {function} in {program.name}",
    )
    if f"<{function}>:" not in text:
        raise ToolchainError(f"{program}: no function {function}")
    return bool(_STATUS_CAS.search(text))


def build_pgo(version: str, *, strip: bool = False) -> Path:
    """The ping-pong workload with casgstatus inlined into :data:`INLINED_INTO` by a profile of itself.

    Raises ToolchainError if no profile has that effect.
    """
    return _build(toolchains.release(version), scheduler_profile(version), strip=strip)


def scheduler_profile(version: str) -> Path:
    """The profile that has that effect, on any program: it is the runtime that it changes."""
    full = toolchains.release(version)
    # The plain program's folder is named after all it was made of: when that changes, so does the profile.
    plain = toolchains.build(full, PINGPONG)
    folder = toolchains.cache_dir() / "pgo" / plain.parent.name
    return toolchains.made_once(folder, lambda path: _profile(full, plain, path)) / "default.pgo"


def _build(version: str, profile: Path, *, strip: bool) -> Path:
    return toolchains.build(version, PINGPONG, out_name="pingpong-pgo", pgo=profile, strip=strip)


def _inlined(program: Path) -> bool:
    return all(changes_status_inline(program, function) for function in INLINED_INTO)


def _profile(version: str, plain: Path, folder: Path) -> None:
    profile = folder / "default.pgo"
    for _ in range(PROFILES):
        # One P: every handing over goes through park_m, schedule and execute, none through an idle P's
        # search.
        command: list[str | Path] = [plain, f"-n={ROUND_TRIPS}", "-procs=1", f"-cpuprofile={profile}"]
        done = subprocess.run(command, input=b"go\nexit\n", capture_output=True, timeout=300, check=False)
        if done.returncode:
            raise ToolchainError(f"profile {plain}: exit status {done.returncode}: {done.stderr.decode()}")
        if _inlined(_build(version, profile, strip=False)):
            return
    raise ToolchainError(f"Go {version}: none of {PROFILES} profiles made the compiler inline casgstatus")
