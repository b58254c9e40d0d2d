"""Damaged ELF files by the thousand, and what reads them: nothing but a SchedtraceError may come of it.

``python -m tests.unit.mutations --count 100000`` runs that many and prints, as JSON, what went wrong and
what it cost. A number names its input: ``--only 4711`` runs input 4711 alone, ``--keep FILE`` writes it
down.

:data:`STEPS` and :data:`SLOW_STEPS` are what is done with the files; more of the program is run over them by
adding to these.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from schedtrace.errors import SchedtraceError
from schedtrace.plan import make_plan
from schedtrace.symbols.binary import Binary
from schedtrace.symbols.buildinfo import read_buildinfo
from schedtrace.symbols.pclntab import Pclntab
from schedtrace.symbols.symtab import Symtab
from tests.runtime_plans import make_runtime_plan
from tests.unit.elfwriter import ARM64, PT_LOAD, go_program
from tests.unit.forms import built, without_sections

SECTIONS = (".symtab", ".strtab", ".shstrtab", ".dynamic", ".rela", ".rela.dyn", ".go.buildinfo", ".note.gnu.build-id")
MAX_SECONDS = 1.0  # of CPU time for one input
HANG_SECONDS = 60  # of wall time, after which the whole run is given up with a traceback
NAMES = ["runtime.casgstatus", "runtime.execute", "runtime.newproc", "main.main", "runtime.waitReasonStrings", "x"]


def _symbols(binary: Binary) -> None:
    symtab = Symtab.read(binary)
    if symtab is not None:
        symtab.functions_named(NAMES)
        symtab.data_named(NAMES)
        for _ in zip(range(100), symtab.function_names(), strict=False):
            pass


def _functions(binary: Binary) -> None:
    table = Pclntab.find(binary)
    found = table.functions_named(NAMES)
    for function in found.values():
        with contextlib.suppress(SchedtraceError):
            binary.read(function.vaddr, function.size)
            binary.vaddr_at(binary.file_offset(function.vaddr))
        table.name_at(function.vaddr + 1)
    for _ in zip(range(100), table, strict=False):
        pass
    for segment in binary.segments:
        table.function_at(segment.vaddr + segment.memory_size // 2)


def _pointers(binary: Binary) -> None:
    for segment in binary.segments:
        binary.pointer(segment.vaddr)
        binary.pointers(segment.vaddr, min(segment.file_size // 8, 1000))


def _plan(binary: Binary) -> None:
    make_plan(binary.path, stops=True)


def _runtime_plan(binary: Binary) -> None:
    make_runtime_plan(binary.path)


Step = Callable[[Binary], object]
STEPS: list[Step] = [read_buildinfo, _symbols, _functions, _pointers]
# Takes twenty times as long as all of the above, so it is done with every tenth file only.
SLOW_STEPS: list[Step] = [_plan, _runtime_plan]
SLOW_EVERY = 10


def examine(path: Path, steps: Sequence[Step]) -> bool:
    """Runs every step over the file; whether none of them refused it. Anything but a SchedtraceError comes
    through."""
    try:
        binary = Binary.open(path)
    except SchedtraceError as error:
        str(error)
        return False
    accepted = True
    with binary:
        for step in steps:
            try:
                step(binary)
            except SchedtraceError as error:
                str(error)
                accepted = False
    return accepted


@dataclass(frozen=True)
class Seed:
    """A sound file, and the byte ranges of it that mean something to the readers."""

    name: str
    image: bytes
    ranges: tuple[range, ...]


def _seed(name: str, image: bytes) -> Seed:
    program_headers, section_headers = struct.unpack_from("<QQ", image, 32)
    program_count, _, section_count = struct.unpack_from("<HHH", image, 56)
    ranges = [range(64), range(program_headers, program_headers + 56 * program_count)]
    ranges.append(range(section_headers, section_headers + 64 * section_count))
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(image)
        with Binary.open(file.name) as binary:
            named = [section for name, section in binary.sections.items() if name in SECTIONS]
            ranges += [range(s.file_offset, s.file_offset + min(s.size, 1024)) for s in named]
            with contextlib.suppress(SchedtraceError):
                table = Pclntab.find(binary)
                start = binary.file_offset(table.vaddr)
                (functab,) = struct.unpack_from("<Q", image, start + (56 if table.oldest_minor == 16 else 64))
                ranges += [range(start, start + 72), range(start + 72, start + 4096)]
                functab_size = 8 * table.function_count
                ranges += [range(start + functab, start + functab + functab_size + 4096)]
                if table.moduledata is not None:
                    moduledata = binary.file_offset(table.moduledata.vaddr)
                    ranges.append(range(moduledata, moduledata + 192))
    information = image.find(b"\xff Go buildinf:")
    if information >= 0:
        ranges.append(range(information, information + 128))
    bounded = (range(r.start, min(r.stop, len(image))) for r in ranges)
    return Seed(name, image, tuple(r for r in bounded if r))


def seeds() -> list[Seed]:
    """Made-up files of every format, small, and some that toolchains made."""
    found = []
    for form, version in (("1.16", "go1.17.1"), ("1.18", "go1.19.8"), ("1.20", "go1.27.3")):
        for position_independent in (False, True):
            for named in (False, True):
                program = go_program(form, version=version, position_independent=position_independent,
                                     named_sections=named, symbols=named, build_info=named,
                                     text_in_header=not named, machine=62 if named else ARM64)  # fmt: skip
                name = f"made {form}{' PIE' if position_independent else ''}{' named' if named else ''}"
                found.append(_seed(name, program.elf.to_bytes(with_sections=named)))
    for form, version in (("plain", "1.27"), ("pie", "1.24"), ("cgo-pie", "1.19"), ("arm64", "1.21")):
        image = built(form, version).read_bytes()
        found += [_seed(f"{form} {version}", image), _seed(f"bare {form} {version}", without_sections(image))]
    return [*found, _seed("ls", Path("/bin/ls").read_bytes())]


@dataclass(frozen=True)
class Mutation:
    """Changes to a file's bytes, by offset, and then its new length in bytes (a longer file ends in a
    hole)."""

    patches: tuple[tuple[int, bytes], ...]
    length: int


def mutation(seed: Seed, number: int) -> Mutation:
    """The mutation of that number; always the same one."""
    chance = random.Random(f"{seed.name} {number}")
    patches: dict[int, bytes] = {}
    length = len(seed.image)
    kind = chance.random()
    if kind < 0.08:
        length = chance.choice([chance.randrange(length), chance.choice(seed.ranges).start, length - 1])
    elif kind < 0.12:
        length += chance.choice([1, 4096, 1 << 20, 64 << 20])
        if chance.random() < 0.5:
            patches.update(_grown_segment(seed, length))
    if kind >= 0.06:
        for _ in range(chance.choice([1, 1, 1, 2, 3, 5, 12])):
            offset, patch = _patch(seed, chance)
            patches[offset] = patch
    return Mutation(tuple(patches.items()), length)


def _grown_segment(seed: Seed, length: int) -> dict[int, bytes]:
    """The last segment in the file reaches to its new end."""
    (start,) = struct.unpack_from("<Q", seed.image, 32)
    (count,) = struct.unpack_from("<H", seed.image, 56)
    loaded = [p for p in range(start, start + 56 * count, 56) if seed.image[p] == PT_LOAD]
    place = max(loaded, key=lambda p: struct.unpack_from("<Q", seed.image, p + 8))
    (offset,) = struct.unpack_from("<Q", seed.image, place + 8)
    return {place + 32: struct.pack("<QQ", length - offset, length - offset + 4096)}


def _patch(seed: Seed, chance: random.Random) -> tuple[int, bytes]:
    image = seed.image
    where = chance.choice(seed.ranges) if chance.random() < 0.95 else range(len(image))
    width = chance.choice([1, 2, 4, 8, 8])
    offset = chance.choice(where)
    if chance.random() < 0.9:
        offset -= (offset - where.start) % width
    offset = min(offset, len(image) - width)
    old = int.from_bytes(image[offset : offset + width], "little")
    limit = 1 << 8 * width
    elsewhere = chance.choice(chance.choice(seed.ranges))
    other = int.from_bytes(image[elsewhere : elsewhere + width], "little")
    flipped = old ^ 1 << chance.randrange(8 * width)
    extremes = [0, 1, 8, limit - 1, limit // 2, limit // 2 - 1, 64 << 20, 0xFFFFFFF0]
    of_the_file = [len(image), len(image) - 1, len(image) - old, other]
    new = chance.choice([*extremes, *of_the_file, old + 1, old - 1, old * 2, flipped, chance.randrange(limit)])
    return offset, (new % limit).to_bytes(width, "little")


@contextlib.contextmanager
def applied(seed: Seed, change: Mutation, path: Path) -> Iterator[None]:
    """``path``, a copy of the seed's image, changed for as long as the block runs."""
    with path.open("r+b", buffering=0) as file:
        for offset, patch in change.patches:
            os.pwrite(file.fileno(), patch, offset)
        file.truncate(change.length)
        try:
            yield
        finally:
            kept = min(change.length, len(seed.image))
            file.truncate(kept)
            os.pwrite(file.fileno(), seed.image[kept:], kept)
            for offset, patch in change.patches:
                os.pwrite(file.fileno(), seed.image[offset : offset + len(patch)], offset)


@dataclass
class Outcome:
    """What a run of many inputs came to."""

    count: int = 0
    accepted: int = 0  # by every step
    slowest_seconds: float = 0.0
    slowest: str = ""
    total_seconds: float = 0.0
    peak_mib: float = 0.0
    failures: list[str] = field(default_factory=list)


def run(numbers: range, *, keep: Path | None = None) -> Outcome:
    """Runs those inputs. Number n is a mutation of seed n modulo their count."""
    outcome = Outcome()
    all_seeds = seeds()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(index) for index in range(len(all_seeds))]
        for path, seed in zip(paths, all_seeds, strict=True):
            path.write_bytes(seed.image)
            if not examine(path, STEPS) and seed.name != "ls":
                outcome.failures.append(f"{seed.name}, unchanged: refused")
        for number in numbers:
            seed, path = all_seeds[number % len(all_seeds)], paths[number % len(all_seeds)]
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            with applied(seed, mutation(seed, number), path):
                if keep is not None:
                    keep.write_bytes(path.read_bytes())
                _one(number, seed, path, outcome)
            faulthandler.cancel_dump_traceback_later()
    outcome.total_seconds = round(time.monotonic() - started, 1)
    # Not getrusage's ru_maxrss, which a child has from the process that started it.
    status = Path("/proc/self/status").read_text()
    outcome.peak_mib = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return outcome


def _one(number: int, seed: Seed, path: Path, outcome: Outcome) -> None:
    started = time.process_time()
    try:
        outcome.accepted += examine(path, [*STEPS, *(SLOW_STEPS if number % SLOW_EVERY == 0 else [])])
    except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
        outcome.failures.append(f"input {number} ({seed.name}): {traceback.format_exc()}")
    seconds = time.process_time() - started
    outcome.count += 1
    if seconds > outcome.slowest_seconds:
        outcome.slowest_seconds, outcome.slowest = seconds, f"input {number} ({seed.name})"
    if seconds > MAX_SECONDS:
        outcome.failures.append(f"input {number} ({seed.name}): {seconds:.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.unit.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=5000, help="inputs to run (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (%(default)s)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this one alone")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="with --only: write the input there")
    options = parser.parse_args()
    first, count = (options.only, 1) if options.only is not None else (options.first, options.count)
    outcome = run(range(first, first + count), keep=options.keep if count == 1 else None)
    sys.stdout.write(json.dumps(asdict(outcome), indent=1) + "\n")
    return bool(outcome.failures)


if __name__ == "__main__":
    sys.exit(main())
