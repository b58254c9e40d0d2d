"""Who may import whom, read from the sources; ruff's banned imports are the quicker half of it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "agent"
SYMBOLS = ROOT / "symbols"
SOURCES = sorted([*AGENT.rglob("*.py"), *SYMBOLS.rglob("*.py")])
# Modules that only compute: fed and read by others, so that they can be tested with plain values.
_PURE = {
    *("events", "heap_goal", "histogram", "lives", "runtime_histogram", "runtime_state", "series", "window", "verdict"),
}
PURE = sorted(_PURE & {path.stem for path in AGENT.glob("*.py")})
# What a module can import that does no I/O.
PURE_MAY_IMPORT = {
    *("__future__", "abc", "bisect", "collections", "collections.abc", "dataclasses", "enum", "fractions"),
    *("functools", "itertools", "math", "numpy", "operator", "statistics", "types", "typing"),
    *("schedtrace.abi", "schedtrace.event_abi", "schedtrace.errors"),
    *(f"schedtrace.{name}" for name in PURE),
}


def imported_modules(source: str, *, package: str) -> Iterator[str]:
    """Dotted names of the modules a source imports, wherever in it the statement is.

    Of ``from a import b`` that is "a"; of ``from schedtrace import b`` it is "schedtrace.b", since there b
    is a module. ``package`` resolves relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "schedtrace":
                yield from (f"schedtrace.{alias.name}" for alias in node.names)
            else:
                yield module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("__import__", "import_module")):
            yield ast.literal_eval(node.args[0])


def imports_of(path: Path) -> set[str]:
    package = "schedtrace.symbols" if SYMBOLS in path.parents else "schedtrace"
    return set(imported_modules(path.read_text(), package=package))


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def importers(module: str) -> set[str]:
    """Sources, as paths from the root, that import that module or anything inside it."""
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(within(name, module) for name in imports_of(path))
    }


def test_the_reader_of_imports_sees_every_form() -> None:
    source = """
import a.b as c
from d import e
from schedtrace import procfs
def f():
    from . import g
    from .h import i
    import importlib
    importlib.import_module("j.k")
"""
    assert set(imported_modules(source, package="schedtrace")) == {
        *("a.b", "d", "schedtrace.procfs", "schedtrace.g", "schedtrace.h", "importlib", "j.k")
    }


def test_sources_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in SOURCES}
    assert {"agent/errors.py", "agent/histogram.py", "symbols/binary.py"} <= names
    assert PURE


def test_only_compilation_imports_bcc() -> None:
    assert importers("bcc") == {"agent/compilation.py"}


@pytest.mark.parametrize("library", ["elftools", "capstone"])
def test_only_symbols_reads_executables_with_libraries(library: str) -> None:
    assert {Path(name).parts[0] for name in importers(library)} == {"symbols"}


def test_only_plans_call_symbols() -> None:
    callers = {name for name in importers("schedtrace.symbols") if name.startswith("agent/")}
    assert callers <= {f"agent/{name}plan.py" for name in ("", "runtime_", "sampled_", "stops_")}


def test_symbols_knows_nothing_of_the_agent_but_its_errors() -> None:
    for path in SYMBOLS.rglob("*.py"):
        ours = {name for name in imports_of(path) if within(name, "schedtrace")}
        assert not {name for name in ours if not within(name, "schedtrace.symbols")} - {
            "schedtrace.errors"
        }, path


def test_nothing_imports_the_command_line() -> None:
    assert importers("schedtrace.cli") <= {"agent/__main__.py"}


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_nothing_that_does_io(name: str) -> None:
    assert imports_of(AGENT / f"{name}.py") <= PURE_MAY_IMPORT


def test_every_module_can_be_imported_without_bcc() -> None:
    names = [
        ".".join([package, *path.relative_to(folder).with_suffix("").parts])
        for package, folder in (("schedtrace", AGENT), ("schedtrace.symbols", SYMBOLS))
        for path in folder.rglob("*.py")
        if path.stem not in ("__init__", "__main__")
    ]
    # None in sys.modules makes the import of that name fail as if it were not installed.
    program = (
        "import sys, importlib; sys.modules['bcc'] = None; [importlib.import_module(n) for n in sys.argv[1:]]"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
