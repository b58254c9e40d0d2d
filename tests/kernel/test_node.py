"""tracefs, capabilities and the check of the node, against this kernel.

What would disturb others (unmounting tracefs, dropping capabilities) happens in a child with a mount
namespace and capabilities of its own.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schedtrace import tracefs, uprobe_pmu
from schedtrace.check import check_node

WITHOUT_ADMIN = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
WITHOUT_MOUNT = (
    *("unshare", "--mount", "sh", "-c"),
    'umount -a -t tracefs,debugfs; umount /sys/kernel/tracing /sys/kernel/debug 2>/dev/null; exec "$@"',
    "sh",
)
CHECK = """
import json
from schedtrace.check import check_node
report = check_node()
print(json.dumps([report.exit_code, *report.findings], default=vars))
"""
MOUNT_TWICE = """
from schedtrace.tracefs import ensure_mounted, missing_tracepoints
assert ensure_mounted() == ensure_mounted() == "/sys/kernel/tracing"
with open("/proc/self/mounts") as mounts:
    assert [line.split()[1] for line in mounts if line.split()[2] == "tracefs"] == ["/sys/kernel/tracing"]
assert missing_tracepoints("/sys/kernel/tracing") == ()
print("mounted")
"""
MOUNT_REFUSED = """
from schedtrace.errors import PermissionDenied
from schedtrace.tracefs import ensure_mounted
try:
    ensure_mounted()
except PermissionDenied as error:
    print(error)
"""


def python(script: str, *prefix: str) -> str:
    result = subprocess.run(
        [*prefix, sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def findings(*prefix: str) -> tuple[int, dict[str, dict[str, str]]]:
    exit_code, *found = json.loads(python(CHECK, *prefix))
    return exit_code, {finding["name"]: finding for finding in found}


@pytest.fixture
def tracing() -> str:
    return tracefs.ensure_mounted()


def test_tracefs_is_mounted_when_it_is_missing_and_only_then() -> None:
    assert python(MOUNT_TWICE, *WITHOUT_MOUNT) == "mounted"


def test_mounting_tracefs_needs_sys_admin_and_says_so() -> None:
    assert python(MOUNT_REFUSED, *WITHOUT_MOUNT, *WITHOUT_ADMIN) == (
        "tracefs is not mounted, and mounting it needs CAP_SYS_ADMIN; let the node's root do it once:"
        " mount -t tracefs tracefs /sys/kernel/tracing"
    )


@pytest.mark.usefixtures("tracing")
def test_this_node_can_run_schedtrace() -> None:
    report = check_node()
    assert report.exit_code == 0
    assert not [finding for finding in report.findings if finding.status != "ok" and finding.name != "leftovers"]
    assert uprobe_pmu.refusal() == 0


def test_check_says_that_tracefs_will_be_mounted() -> None:
    exit_code, found = findings(*WITHOUT_MOUNT)
    assert exit_code == 0
    assert found["tracefs"]["detail"] == "not mounted; attaching mounts it at /sys/kernel/tracing"


@pytest.mark.usefixtures("tracing")
def test_check_knows_the_other_way_to_uprobes() -> None:
    ask = "from schedtrace import uprobe_multi, uprobe_pmu; print(uprobe_multi.refusal(), uprobe_pmu.refusal())"
    no_links, refusal = map(int, python(ask, *WITHOUT_ADMIN).split())
    exit_code, found = findings(*WITHOUT_ADMIN)
    assert exit_code == 0
    assert found["uprobes"]["status"] == "ok"
    # older kernels let CAP_PERFMON use the PMU, newer ones don't
    assert refusal in (0, errno.EACCES)
    way = "BPF links" if not no_links else "uprobe_events" if refusal else "the perf uprobe PMU"
    assert way in found["uprobes"]["detail"]


def test_check_without_a_way_to_anything() -> None:
    exit_code, found = findings(*WITHOUT_MOUNT, *WITHOUT_ADMIN)
    assert exit_code == 77
    assert found["tracefs"]["status"] == "missing"


def test_lines_of_dead_sessions_go_and_those_in_use_stay(tracing: str, tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    program = tmp_path / "program"
    program.write_bytes(bytes(4096))
    stem = f"uprobes/p_schedtrace_{program.stat().st_ino:x}"
    dead, used, ours = f"{stem}_0_bcc_{child.pid}", f"{stem}_10_bcc_{child.pid}", f"{stem}_20_other"
    events = Path(tracing, "uprobe_events")

    def listed() -> set[str]:
        lines = [line.split()[0].removeprefix("p:") for line in events.read_text().splitlines()]
        return {name for name in lines if name.startswith(stem)}

    descriptor = os.open(events, os.O_WRONLY | os.O_APPEND)
    for offset, name in ((0, dead), (0x10, used), (0x20, ours)):
        os.write(descriptor, f"p:{name} {program}:{offset:#x}\n".encode())
    os.close(descriptor)
    enable = Path(tracing, "events", used, "enable")
    enable.write_text("1")
    try:
        names = [name for name in tracefs.read_dead_lines(tracing) if name.startswith(stem)]
        assert set(names) == {dead, used}
        assert tracefs.remove_lines(tracing, names) == 1
        assert listed() == {used, ours}
    finally:
        enable.write_text("0")
        tracefs.remove_lines(tracing, [dead, used, ours])
    assert listed() == set()
