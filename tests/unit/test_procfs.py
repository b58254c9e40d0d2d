"""procfs against the real kernel: this process, children made for the purpose, kernel threads."""

import ctypes
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schedtrace.errors import NotTraceable
from schedtrace.proc_formats import MappedFile, Mapping, mapped_files, parse_maps, parse_schedstat, parse_stat
from schedtrace.procfs import open_process, read_schedstat

NO_SUCH_PID = 4_194_304  # one above the highest value pid_max can have (PID_MAX_LIMIT, 64-bit)
NOBODY = 65534


@contextmanager
def running(*command: str | Path, **options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that has executed ``command``: Popen returns only after exec."""
    child = subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=options or None
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def await_true(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def as_nobody(pid: int) -> str:
    """What open_process says about ``pid`` to a process of user nobody without capabilities."""
    script = (
        "import os, sys\n"
        f"os.getuid() or (os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY}))\n"
        "from schedtrace.errors import SchedtraceError\n"
        "from schedtrace.procfs import open_process\n"
        "try:\n"
        f"    open_process({pid})\n"
        "except SchedtraceError as error:\n"
        "    print(error.exit_code, error)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()


def kernel_thread() -> int:
    """PID of kthreadd, or 0 in a PID namespace that doesn't show it."""
    try:
        return 2 if Path("/proc/2/comm").read_text() == "kthreadd\n" else 0
    except FileNotFoundError:
        return 0


def test_this_process() -> None:
    with open_process(os.getpid()) as process:
        executable = Path(sys.executable).resolve()
        assert process.pid == process.container_pid == os.getpid()
        assert process.exe == str(executable)
        assert process.name == executable.name
        assert (process.identity.device, process.identity.inode) == (
            executable.stat().st_dev,
            executable.stat().st_ino,
        )
        assert not process.identity.deleted
        assert process.uid == os.geteuid()
        assert process.cmdline == tuple(Path("/proc/self/cmdline").read_text().split("\0")[:-1])
        assert f"pid:[{process.namespaces.pid}]" == str(Path("/proc/self/ns/pid").readlink())
        assert f"mnt:[{process.namespaces.mnt}]" == str(Path("/proc/self/ns/mnt").readlink())
        assert f"user:[{process.namespaces.user}]" == str(Path("/proc/self/ns/user").readlink())
        assert process.still_same()
        assert not process.exited()
        assert process.environment() == {
            key: value
            for key, _, value in (
                entry.partition("=")
                for entry in Path("/proc/self/environ").read_text().split("\0")
                if "=" in entry
            )
        }


def test_start_time_is_the_time_of_the_fork() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with running("/bin/cat") as child, open_process(child.pid) as process:
        after = time.clock_gettime(time.CLOCK_BOOTTIME)
        ticks = os.sysconf("SC_CLK_TCK")
        assert before - 1 / ticks <= process.start_time_ticks / ticks <= after


def test_threads_cpu_time_and_descriptors_are_read_anew() -> None:
    with open_process(os.getpid()) as process:
        threads, descriptors, cpu = process.thread_ids(), process.open_fd_count(), process.cpu_seconds()
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        descriptors_made = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
        started = time.process_time()
        while time.process_time() - started < 0.1:
            pass
        assert set(process.thread_ids()) - set(threads) == {thread.native_id}
        assert process.open_fd_count() - descriptors == 3
        assert process.open_fd_count() == len(list(Path("/proc/self/fd").iterdir())) - 1  # listing takes one
        assert process.thread_count() == len(process.thread_ids())
        assert 0.08 <= process.cpu_seconds() - cpu <= 2
        stop.set()
        thread.join()
        for descriptor in descriptors_made:
            os.close(descriptor)
        await_true(lambda: thread.native_id not in process.thread_ids())


def test_schedstat_of_every_thread() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with open_process(os.getpid()) as process:
        before = process.schedstats()
        started = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
        while time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - started < 0.05:
            pass
        used_ns = (time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - started) * 1e9
        after = process.schedstats()
    stop.set()
    thread.join()
    assert {threading.get_native_id(), thread.native_id} <= set(before) & set(after)
    ran_ns = after[threading.get_native_id()].run_ns - before[threading.get_native_id()].run_ns
    assert ran_ns == pytest.approx(used_ns, rel=0.2)
    assert thread.native_id is not None
    assert after[thread.native_id].run_ns - before[thread.native_id].run_ns < ran_ns / 2
    assert read_schedstat(os.getpid(), NO_SUCH_PID) is None


def test_exit_is_noticed_before_and_after_reaping() -> None:
    with running("/bin/cat") as child, open_process(child.pid) as process:
        assert not process.wait(0)
        assert process.still_same()
        child.kill()
        assert process.wait(10)
        assert process.exited()
        assert not process.still_same()
        assert process.mappings() == ()  # a zombie has no memory
        child.wait()
        assert process.exited()
        assert not process.still_same()
        with pytest.raises(NotTraceable, match=rf"^process {child.pid} \(cat\) has exited$"):
            process.thread_ids()
        with pytest.raises(NotTraceable, match="has exited"):
            process.load_bias()
        process.close()
        process.close()


def test_exec_of_another_program_is_noticed() -> None:
    with running("/bin/sh", "-c", "read line; exec cat") as child, open_process(child.pid) as process:
        assert process.still_same()
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.flush()
        await_true(lambda: not process.still_same())
        assert not process.exited()
        with pytest.raises(NotTraceable, match="has executed another program"):
            process.load_bias()
        with open_process(child.pid) as now:
            assert now.name == "cat"
            assert now.start_time_ticks == process.start_time_ticks


def test_exec_of_the_same_program_is_noticed() -> None:
    assert Path("/proc/sys/kernel/randomize_va_space").read_text().strip() != "0"
    shell = Path("/bin/sh").resolve()
    with (
        running(shell, "-c", f"read line; exec {shell} -c 'read line'") as child,
        open_process(child.pid) as process,
    ):
        assert child.stdin is not None
        child.stdin.write(b"go\n")
        child.stdin.flush()
        await_true(lambda: not process.still_same())
        assert not process.exited()
        with open_process(child.pid) as now:
            assert now.identity == process.identity
            assert now.cmdline != process.cmdline


def test_deleted_and_replaced_executables(tmp_path: Path) -> None:
    program = tmp_path / "a program\nwith (odd) name (deleted)"
    shutil.copy("/bin/cat", program)
    with running(program) as child, open_process(child.pid) as before:
        assert before.exe == str(program)
        assert before.name == program.name
        assert not before.identity.deleted
        program.unlink()
        with open_process(child.pid) as process:
            assert process.exe == str(program)
            assert process.name == program.name
            assert process.identity.deleted
            assert process.identity == before.identity
            assert before.still_same()
            assert Path(process.exe_path).read_bytes() == Path("/bin/cat").read_bytes()
            own = [m for m in process.mappings() if m.inode == process.identity.inode]
            assert {m.path for m in own} == {str(program)}
            assert all(m.deleted for m in own)
            assert all(file.path != str(program) for file in process.shared_objects())
        shutil.copy("/bin/true", program)
        with open_process(child.pid) as process:
            assert process.identity == before.identity
            assert process.identity.deleted


def test_load_bias_is_that_of_the_lowest_mapping() -> None:
    with running("/bin/cat") as child, open_process(child.pid) as process:
        header = Path("/bin/cat").read_bytes()[:4096]
        assert header[16:18] == b"\3\0", "Debian's cat is position independent"
        program_headers = struct.unpack_from("<Q", header, 32)[0]
        size, count = struct.unpack_from("<HH", header, 54)
        loads = [
            struct.unpack_from("<QQ", header, program_headers + i * size + 8)
            for i in range(count)
            if struct.unpack_from("<I", header, program_headers + i * size)[0] == 1
        ]
        first_offset, first_vaddr = loads[0]
        assert first_offset == 0
        lowest = min(m.start for m in process.mappings() if m.path == process.exe)
        assert process.load_bias() == lowest - first_vaddr
        assert process.load_bias() % 4096 == 0


def test_shared_objects_are_the_mapped_libraries() -> None:
    import _ctypes

    library = Path(_ctypes.__file__)
    with open_process(os.getpid()) as process:
        shared = {file.path: file for file in process.shared_objects()}
        assert process.exe not in shared
        assert (shared[str(library)].device, shared[str(library)].inode) == (
            library.stat().st_dev,
            library.stat().st_ino,
        )
        assert shared[str(library)].file_offset == 0
        address = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
        libc = next(file for path, file in shared.items() if "libc.so" in path or "libc-" in path)
        assert address is not None
        assert any(
            m.start <= address < m.end and m.inode == libc.inode and m.executable for m in process.mappings()
        )


def test_maps_lines() -> None:
    text = (
        b"00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/dbus-daemon\n"
        b"00651000-00652000 r--p 00051000 08:02 173521      /usr/bin/dbus-daemon\n"
        b"00e03000-00e24000 rw-p 00000000 00:00 0           [heap]\n"
        b"35b1800000-35b1820000 rw-s 00001000 fd:101 135522 /lib/with  two spaces/a\\012b (deleted)\n"
        b"c000000000-c000400000 rw-p 00000000 00:00 0                              [anon: Go: heap]\n"
        b"7f0000000000-7f0000001000 r-xp 00002000 00:31 9 /memfd:jit (deleted)\n"
        b"7fff0000-7fff1000 ---p 00000000 00:00 0 \n"
    )
    mappings = parse_maps(text)
    assert mappings[0] == Mapping(
        0x400000, 0x452000, "r-xp", 0, os.makedev(8, 2), 173521, "/usr/bin/dbus-daemon", deleted=False
    )
    assert mappings[3] == Mapping(
        0x35B1800000,
        0x35B1820000,
        "rw-s",
        0x1000,
        os.makedev(0xFD, 0x101),
        135522,
        "/lib/with  two spaces/a\nb",
        deleted=True,
    )
    assert [m.path for m in mappings[4:]] == ["[anon: Go: heap]", "/memfd:jit", ""]
    assert mapped_files(mappings) == (
        MappedFile(
            "/usr/bin/dbus-daemon", os.makedev(8, 2), 173521, deleted=False, start=0x400000, file_offset=0
        ),
        MappedFile(
            "/memfd:jit", os.makedev(0, 0x31), 9, deleted=True, start=0x7F0000000000, file_offset=0x2000
        ),
    )


def test_stat_survives_a_hostile_command_name() -> None:
    comm = b"a) S 1 (\n) R"
    numbers = [str(n).encode() for n in range(4, 53)]
    numbers[5] = b"2129984"  # field 9 as kthreadd has it, PF_KTHREAD among the flags
    stat = parse_stat(b"7 (" + comm + b") Z " + b" ".join(numbers) + b"\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert (stat.comm, stat.state, stat.is_kernel_thread) == (comm.decode(), "Z", True)
    assert (stat.thread_count, stat.start_time_ticks, stat.image) == (20, 22, (26, 28))
    assert stat.cpu_seconds == (14 + 15) / ticks


def test_schedstat_may_be_empty() -> None:
    assert parse_schedstat(b"") is None
    stat = parse_schedstat(b"3021 77 4\n")
    assert stat is not None
    assert (stat.run_ns, stat.wait_ns, stat.timeslices) == (3021, 77, 4)


def test_refused_no_such_process() -> None:
    for pid in (NO_SUCH_PID, 0, -1, 2**31, 2**70):
        with pytest.raises(NotTraceable) as error:
            open_process(pid)
        assert str(error.value) == (
            f"there is no process {pid}: `schedtrace list` shows the Go processes of this node"
        )


@pytest.mark.skipif(not kernel_thread(), reason="this PID namespace shows no kernel threads")
def test_refused_kernel_thread() -> None:
    pid = kernel_thread()
    refusal = f"PID {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()}) is a kernel thread, not a program"
    with pytest.raises(NotTraceable) as error:
        open_process(pid)
    assert str(error.value) == refusal
    assert as_nobody(pid) == f"3 {refusal}"


def test_refused_zombie() -> None:
    with running("/bin/true") as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(NotTraceable) as error:
            open_process(child.pid)
    assert str(error.value) == (
        f"process {child.pid} (true) has exited: a zombie until its parent {os.getpid()} reaps it"
    )


def test_refused_thread() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with pytest.raises(NotTraceable) as error:
        open_process(thread.native_id or 0)
    stop.set()
    thread.join()
    comm = Path("/proc/self/comm").read_text().strip()
    assert (
        str(error.value) == f"{thread.native_id} is a thread of process {os.getpid()} ({comm}): give that PID"
    )


def test_refused_without_the_right() -> None:
    """Out of reach without CAP_SYS_PTRACE even for its own user is a process that made itself undumpable; so
    this asks the same whether root runs it, whose looking child becomes nobody, or anybody else."""
    pr_set_dumpable = 4
    undumpable = f"import ctypes; ctypes.CDLL(None).prctl({pr_set_dumpable}, 0); print(flush=True); input()"
    with running(sys.executable, "-c", undumpable) as child:
        assert child.stdout is not None
        child.stdout.readline()
        comm = Path(f"/proc/{child.pid}/comm").read_text().strip()
        assert as_nobody(child.pid) == (
            f"77 process {child.pid} ({comm}) of user {os.getuid()}: looking into it needs CAP_SYS_PTRACE;"
            " run as root or grant that capability"
        )


def test_refused_no_such_process_without_rights() -> None:
    assert as_nobody(NO_SUCH_PID).startswith(f"3 there is no process {NO_SUCH_PID}:")


def test_a_process_that_exits_at_any_moment_is_either_opened_or_gone() -> None:
    answers = set()
    for _ in range(200):
        child = subprocess.Popen(["/bin/true"])
        answers.add(answer(child.pid).partition("has exited")[1])
        child.wait()
    assert answers <= {"", "has exited"}


def answer(pid: int) -> str:
    """What open_process says: nothing if it opens the process, which then must be ``true``."""
    try:
        process = open_process(pid)
    except NotTraceable as error:
        return str(error)
    with process:
        return "" if process.name == "true" else f"opened {process.name}"


def test_no_descriptor_is_left_behind() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    open_process(os.getpid()).close()
    with running("/bin/true") as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(NotTraceable):
            open_process(child.pid)
    with pytest.raises(NotTraceable):
        open_process(NO_SUCH_PID)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_pid_of_a_reaped_process_is_not_another_one() -> None:
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    with open_process(child.pid) as process:
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert process.exited()
    with pytest.raises(NotTraceable, match=f"there is no process {child.pid}"):
        open_process(child.pid)
