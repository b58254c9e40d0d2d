"""Where tests that need the kernel run, and that nothing can be left out where they must.

Without the right to load BPF, tests/kernel, tests/e2e and tests/cgroup2 are skipped with the reason. With CI=true or
SCHEDTRACE_REQUIRE_KERNEL=1 every skip, of whatever test and for whatever reason, is a failure, and so is a
run of one of them in which no test of it passed.
"""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tools import kernel_access

NEED_KERNEL = tuple(Path(__file__).parent / name for name in ("kernel", "e2e", "cgroup2"))
_MISSING = kernel_access.missing()
_REQUIRED = kernel_access.required()
_passed = pytest.StashKey[set[Path]]()


def _folder_of(item: pytest.Item) -> Path | None:
    """The one of NEED_KERNEL that a test is in."""
    return next((folder for folder in NEED_KERNEL if folder in item.path.parents), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _MISSING:
        for item in items:
            if _folder_of(item):
                item.add_marker(pytest.mark.skip(reason=_MISSING))


def _no_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if _REQUIRED and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"left out where nothing may be: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _no_skip(report)
    if report.when == "call" and report.passed and (folder := _folder_of(item)):
        item.config.stash.setdefault(_passed, set()).add(folder)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _no_skip(report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _REQUIRED or session.config.option.collectonly:
        return
    asked = [Path(argument.split("::")[0]).resolve() for argument in session.config.args]
    for folder in NEED_KERNEL:
        if folder in asked and folder not in session.config.stash.get(_passed, set()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            sys.stderr.write(f"\nno test of tests/{folder.name} passed, and they may not be left out here\n")
