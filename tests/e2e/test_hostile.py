"""Containers that mean harm: none ends the agent, makes it touch another's program, or gets another's labels.

Each test has a victim, an honest pod, whose counts must be exact and whose labels nobody else's must be.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.agent_process import Agent, Labels, agent, confined
from tests.e2e.containerd import Containerd, kill_and_remove_cgroup
from tests.e2e.duet import N, parks
from tests.e2e.kubelet import TOKEN_VARIABLE, ContainerSpec, Kubelet, Pod, make_cgroup, wait_for
from tests.target_text import TargetText
from tests.workload import Workload, binary
from tools import toolchains

HOSTILE, HONEST = "e2e-hostile", "e2e-honest"
VICTIM = (HONEST, "victim", "app", "duet")
PROGRAMS = Path(__file__).parent / "programs"
FAILURES = "schedtrace_attach_failures_total"
# Fields of the 64-bit ELF header, and of a section header.
E_SHOFF, E_SHNUM, E_SHSTRNDX, SECTION_SIZE = 0x28, 0x3C, 0x3E, 64
SH_TYPE, SH_OFFSET, SH_SIZE = 4, 24, 32
ODD_NAMES = (
    'quote"} 1\nschedtrace_forged_total{pod="victim',
    "back\\slash\\n",
    "esc\x1b[31mred\x07",
    "newline\n2026-01-01T00:00:00.000Z info    forged: a line of the log",
    "schedtrace_goroutine_transitions_total",
    "l" * 255,
    " ",
)


@dataclass(frozen=True)
class Scene:
    """The victim, and an agent that watches it and whatever a test adds."""

    kubelet: Kubelet
    agent: Agent
    victim: Pod
    duet_image: str

    def make_image(self, name: str, files: dict[str, Path]) -> str:
        """An image of programs; the first is what runs."""
        image = f"localhost/{name}:1"
        self.kubelet.containerd.make_image(image, files, [next(iter(files))])
        return image

    def check(self) -> None:
        """The agent goes on, and nobody has the victim's labels but the victim."""
        assert self.agent.process.poll() is None, self.agent.log()
        assert self.agent.fetch("/healthz")[0] == 200
        scrape = self.agent.scrape()
        # It has done its work once, and has one process.
        assert parks(scrape, VICTIM) == 2 * N
        pids = self.victim["app"].pids
        threads = sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)
        assert scrape.value("schedtrace_threads", VICTIM) == threads
        for line in self.agent.log().splitlines():
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (info|warning|error) ", line), line
            assert line.isprintable(), line

    def await_failure(self, before: float) -> None:
        """A process has been refused."""
        wait_for(lambda: self.agent.scrape().total(FAILURES) > before, f"a refusal\n{self.agent.log()}", 30)


@pytest.fixture(scope="module")
def scene(kubelet: Kubelet, duet_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("hostile")
    spec = ContainerSpec("app", duet_image, ("-n", str(N)))
    with (
        kubelet.pod(HONEST, "victim", [spec]) as victim,
        agent(folder, "--log-root", kubelet.log_root, command=confined(kubelet.token)) as watching,
    ):
        victim["app"].talk.expect("ready")
        watching.await_process(VICTIM)
        victim["app"].talk.say("go")
        victim["app"].talk.expect("done")
        yield Scene(kubelet, watching, victim, duet_image)


def claiming_go(content: bytes) -> Callable[[Path], None]:
    """Makes a C program with a .go.buildinfo of that content."""

    def make(path: Path) -> None:
        flags = ("-static", f"-DCONTENT={','.join(map(str, content))}")
        shutil.copy(toolchains.compile_c(PROGRAMS / "claims_go.c", flags=flags), path)

    return make


def changed_sections(change: Callable[[bytearray, int, int], None]) -> Callable[[Path], None]:
    """Makes a duet whose section headers (offset in the file, number) are changed; the kernel doesn't read them."""

    def make(path: Path) -> None:
        data = bytearray(binary("duet").read_bytes())
        change(data, struct.unpack_from("<Q", data, E_SHOFF)[0], struct.unpack_from("<H", data, E_SHNUM)[0])
        path.write_bytes(data)

    return make


def every_section(field: int, value: int) -> Callable[[bytearray, int, int], None]:
    def change(data: bytearray, offset: int, number: int) -> None:
        for i in range(1, number):
            struct.pack_into("<Q", data, offset + i * SECTION_SIZE + field, value)

    return change


def most_sections(data: bytearray, _offset: int, _number: int) -> None:
    struct.pack_into("<H", data, E_SHNUM, 0xFFFF)
    struct.pack_into("<H", data, E_SHSTRNDX, 0xFFFE)


def sections_elsewhere(data: bytearray, _offset: int, _number: int) -> None:
    struct.pack_into("<Q", data, E_SHOFF, 2**63 - 1)


MAGIC = b"\xff Go buildinf:"
CLAIMS: dict[str, Callable[[Path], None]] = {
    "magic alone": claiming_go(MAGIC + b"\x08\x02" + bytes(16)),
    "a version and no runtime": claiming_go(MAGIC + b"\x08\x02" + bytes(16) + b"\x08go1.27.3\x00"),
    "a version without end": claiming_go(MAGIC + b"\x08\x02" + bytes(16) + b"\xff" * 9 + b"\x7f" + b"go1.27.3"),
    "a version of control characters": claiming_go(MAGIC + b"\x08\x02" + bytes(16) + b"\x0cgo1.27\n\x1b[2J\x00"),
}
WHOLE: dict[str, Callable[[Path], None]] = {
    "sections of 2^62 bytes": changed_sections(every_section(SH_SIZE, 1 << 62)),
    "sections beyond the file": changed_sections(every_section(SH_OFFSET, 1 << 62)),
    "sections at its start": changed_sections(every_section(SH_OFFSET, 0)),
    "65535 sections": changed_sections(most_sections),
    "a section table at 2^63": changed_sections(sections_elsewhere),
}
FORMS = CLAIMS | WHOLE


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.replace(" ", "-"))
def test_executable_that_misleads(scene: Scene, tmp_path: Path, form: str) -> None:
    """It is refused, with a reason, or watched rightly: some of these are whole Go programs all the same."""
    path = tmp_path / "program"
    FORMS[form](path)
    path.chmod(0o755)
    before = scene.agent.scrape().total(FAILURES)
    owner = (HOSTILE, "misleads", "app", "program")
    stage = toolchains.compile_c(PROGRAMS / "stage.c", flags=("-static",))
    image = f"localhost/misleads-{list(FORMS).index(form)}:1"
    scene.kubelet.containerd.make_image(image, {"/stage": stage, "/program": path}, ["/stage", "/program"])
    with scene.kubelet.pod(HOSTILE, "misleads", [ContainerSpec("app", image, ("-n", str(N)))]) as pod:

        def decided() -> bool:
            scrape = scene.agent.scrape()
            return scrape.total(FAILURES) > before or scrape.total("schedtrace_threads", owner) > 0

        if form in WHOLE:
            wait_for(decided, f"a decision on {form}", 30)
        else:
            time.sleep(2)  # what isn't Go at a second look is passed over without a word
            assert owner not in scene.agent.scrape().owners()
        if scene.agent.scrape().total("schedtrace_threads", owner):
            pod["app"].talk.expect("ready")
            first = parks(scene.agent.scrape(), owner)
            pod["app"].talk.say("go")
            pod["app"].talk.expect("done")
            assert parks(scene.agent.scrape(), owner) - first == 2 * N
        assert pod["app"].pids, "the target has been harmed"
        scene.check()


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_name_that_misleads(scene: Scene, name: str) -> None:
    image = scene.make_image(f"odd-{ODD_NAMES.index(name)}", {f"/{name}": binary("duet")})
    before = scene.agent.scrape().owners()
    spec = ContainerSpec("app", image, ("-n", "10", "-exit", "0", "-before", "600s"), talks=False)
    with scene.kubelet.pod(HOSTILE, "odd", [spec]):
        found = wait_for(lambda: scene.agent.scrape().owners() - before or None, f"its series\n{scene.agent.log()}", 30)
        (owner,) = found
        assert owner[:3] == (HOSTILE, "odd", "app")
        assert owner[3].isprintable()
        assert "schedtrace_forged_total" not in {key for key, _ in scene.agent.scrape().samples}
        done = subprocess.run(
            [toolchains.program("prometheus").with_name("promtool"), "check", "metrics"],
            input=scene.agent.scrape().text,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        scene.check()


def test_links_that_claim_another_pods_name(scene: Scene) -> None:
    """The names of the victim for the container's id, with the victim's UID, its own, and none."""
    spec = ContainerSpec("app", scene.duet_image, ("-n", str(N)))
    links = []
    with scene.kubelet.pod(HOSTILE, "liar", [spec]) as pod:
        own = (HOSTILE, "liar", "app", "duet")
        pod["app"].talk.expect("ready")
        scene.agent.await_process(own)
        for uid in (scene.victim.uid, pod.uid, "0" * 32):
            for container in ("app", "../app", "a b"):
                link = scene.kubelet.log_root / "containers" / f"victim_{HONEST}_{container[-3:]}-{pod['app'].id}.log"
                link.unlink(missing_ok=True)
                link.symlink_to(f"/var/log/pods/{HONEST}_victim_{uid}/{container}/0.log")
                links.append(link)
                time.sleep(0.3)
                scene.check()
        pod["app"].talk.say("go")
        pod["app"].talk.expect("done")
        scene.check()
    for link in links:
        link.unlink(missing_ok=True)


def test_cgroup_below_its_own_with_another_containers_path(scene: Scene) -> None:
    """What a container with a writable cgroup can do: make cgroups inside its own that are called like the victim's."""
    spec = ContainerSpec("app", scene.duet_image, ("-n", str(N)))
    with scene.kubelet.pod(HOSTILE, "nester", [spec]) as pod:
        pod["app"].talk.expect("ready")
        (pid,) = pod["app"].pids
        below = f"{pod['app'].cgroup}/kubepods/burstable/pod{scene.victim.uid}/{scene.victim['app'].id}"
        make_cgroup(below, None)
        try:
            Path("/sys/fs/cgroup/cpu", below.lstrip("/"), "cgroup.procs").write_text(str(pid))
            Path("/sys/fs/cgroup/unified", below.lstrip("/"), "cgroup.procs").write_text(str(pid))
            assert scene.victim["app"].id in Path(f"/proc/{pid}/cgroup").read_text()
            owner = (HOSTILE, "nester", "app", "duet")
            scene.agent.await_process(owner)
            time.sleep(2)  # it is followed to its new cgroup
            scene.agent.await_process(owner)
            before = parks(scene.agent.scrape(), owner)
            pod["app"].talk.say("go")
            pod["app"].talk.expect("done")
            assert parks(scene.agent.scrape(), owner) - before == 2 * N
            scene.check()
        finally:
            Path(f"/sys/fs/cgroup/cpu{pod['app'].cgroup}", "cgroup.procs").write_text(str(pid))
            Path(f"/sys/fs/cgroup/unified{pod['app'].cgroup}", "cgroup.procs").write_text(str(pid))
            kill_and_remove_cgroup(below.lstrip("/"))


def test_link_in_the_place_of_the_executable(
    containerd: Containerd, kubelet: Kubelet, stage: Path, tmp_path: Path
) -> None:
    """The program's name leads to a program of the node's: the agent must probe what runs, not what has its name."""
    image = "localhost/replaced:1"
    containerd.make_image(
        image, {"/program": binary("duet", "1.26"), "/stage": stage}, ["/stage", "/program"], comment="its own inode"
    )
    other = tmp_path / "program"
    shutil.copy(binary("duet", "1.26"), other)
    spec = ContainerSpec("app", image, ("-n", str(N)))
    with (
        Workload(other, "-n", N, env={TOKEN_VARIABLE: "not ours"}) as bystander,
        kubelet.pod(HOSTILE, "replaced", [spec]) as pod,
    ):
        pod["app"].talk.expect("ready")
        (pid,) = pod["app"].pids
        inside = Path(f"/proc/{pid}/root/program")
        inside.unlink()
        inside.symlink_to(f"/proc/{bystander.pid}/exe")
        owner = (HOSTILE, "replaced", "app", "program")
        with agent(tmp_path, "--log-root", kubelet.log_root, command=confined(kubelet.token)) as watching:
            before = watching.await_process(owner)
            assert TargetText.of(pid, other).breakpoints()
            assert TargetText.of(bystander.pid, other).breakpoints() == set()
            pod["app"].talk.say("go")
            pod["app"].talk.expect("done")
            assert parks(watching.scrape(), owner) - parks(before, owner) == 2 * N


def test_processes_that_vanish_while_they_are_looked_at(scene: Scene, tmp_path: Path) -> None:
    """Hundreds of Go programs of which each lives for a moment, and the like that are killed at once."""
    program = tmp_path / "passing"
    shutil.copy(binary("duet"), program)
    for number in range(150):
        with subprocess.Popen(
            [program, "-n", "1", "-exit", "0"],
            env={TOKEN_VARIABLE: scene.kubelet.token},
            stdout=subprocess.DEVNULL,
        ) as process:
            if number % 3:
                time.sleep(0.001 * (number % 17))
                process.kill()
    scene.check()
    owner: Labels = ("", "", "", "passing")
    wait_for(lambda: scene.agent.scrape().total("schedtrace_threads", owner) == 0, "their end", 10)


def test_the_victim_is_exact_after_all(scene: Scene) -> None:
    scene.check()
