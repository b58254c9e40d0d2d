"""Where tests may not be left out, none can be: the rules of tests/conftest.py, on tests made for that."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPS = {
    "in the test": "import pytest\ndef test_it():\n    pytest.skip('no reason')\n",
    "by a mark": "import pytest\n@pytest.mark.skip\ndef test_it():\n    pass\n",
    "of the module": "import pytest\npytest.skip('no reason', allow_module_level=True)\n",
    "for a missing module": "import pytest\npytest.importorskip('no_such_module')\n",
    "by unittest": "import unittest as u\n@u.skip('no reason')\nclass T(u.TestCase):\n    def test_it(self): ...\n",
}


def run(folder: Path, *arguments: str, required: bool) -> subprocess.CompletedProcess[str]:
    """pytest on the copy of our conftest.py in that folder."""
    shutil.copy(ROOT / "tests/conftest.py", folder / "conftest.py")
    env = {key: value for key, value in os.environ.items() if key not in ("CI", "SCHEDTRACE_REQUIRE_KERNEL")}
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({"CI": "true"} if required else {})
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        folder,
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("source", SKIPS.values(), ids=SKIPS.keys())
def test_skip_is_a_failure_where_it_may_not_be(source: str, tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(source + "\ndef test_other():\n    pass\n")
    allowed = run(tmp_path, required=False)
    assert allowed.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), allowed.stdout
    assert "1 skipped" in allowed.stdout
    forbidden = run(tmp_path, required=True)
    assert forbidden.returncode in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED), forbidden.stdout
    assert "left out where nothing may be" in forbidden.stdout


@pytest.mark.parametrize("arguments", [["kernel"], ["kernel", "-k", "no_such_test"], ["unit", "kernel"]])
def test_kernel_tests_must_have_run(arguments: list[str], tmp_path: Path) -> None:
    for name in ("unit", "kernel"):
        (tmp_path / name).mkdir()
    (tmp_path / "unit/test_unit.py").write_text("def test_unit():\n    pass\n")
    done = run(tmp_path, *arguments, required=True)
    assert done.returncode != 0
    assert "no test of tests/kernel passed" in done.stderr
    assert run(tmp_path, "unit", required=True).returncode == 0
