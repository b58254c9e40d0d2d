"""The command line: parses, wires the stages, prints errors on one line, sets exit codes. Nothing imports it.

Commands import what they need when they run: ``--help``, and ``inspect`` on a laptop, load no more than they use.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import click

from schedtrace.errors import NodeUnsupported, SchedtraceError
from schedtrace.parameters import MOST_SECONDS, Examples, Seconds, Size, When, share
from schedtrace.progress import Progress

if TYPE_CHECKING:
    from schedtrace.condition import Condition
    from schedtrace.listings import Listing

USAGE_ERROR = 2
INTERRUPTED = 130
CLOSED_PIPE = 141
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/json.md).")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="schedtrace")
def schedtrace() -> None:
    """Watch the goroutines of a running Go program from outside, and see where their time goes."""


@schedtrace.command(
    cls=Examples,
    examples=[
        ("attach 1234", "watch until Ctrl-C or the target's end"),
        ("attach 1234 --duration 10", "for ten seconds, then the summary"),
        ("attach 1234 --duration 10 --json", "the same for a program to read"),
        ("attach 1234 --syscalls", "also time in system calls (costs two more hits a call)"),
        ("attach 1234 --level sampled", "only what the runtime itself samples: far cheaper"),
    ],
)
@click.argument("pid", type=click.IntRange(min=1))
@click.option(
    "--duration", type=Seconds(min=0, min_open=True), help="Seconds to watch; without, until Ctrl-C."
)
@click.option(
    "--interval",
    type=Seconds(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two updates.",
)
@click.option(
    "--level",
    type=click.Choice(["sampled", "full"]),
    default="full",
    show_default=True,
    help="Follow every goroutine, or see only what the runtime itself measures: about every eighth wait to run.",
)
@click.option("--syscalls", is_flag=True, help="Also see system calls, where that costs extra hits.")
@click.option(
    "--max-goroutines",
    type=click.IntRange(min=1, max=1 << 24),
    default=1 << 17,
    show_default=True,
    help="How many goroutines can be followed at once (about 200 bytes of kernel memory each).",
)
@_json_option
def attach(
    pid: int,
    duration: float | None,
    interval: float,
    level: str,
    syscalls: bool,
    max_goroutines: int,
    as_json: bool,
) -> None:
    """Watch every change of state of the goroutines of process PID, or a sample."""
    from schedtrace import live

    if syscalls and level != "full":
        raise click.UsageError("--syscalls needs --level full: the sampled level doesn't follow goroutines")

    live.attach(
        pid,
        duration_seconds=duration,
        interval_seconds=interval,
        level=level,
        syscalls=syscalls,
        max_goroutines=max_goroutines,
        as_json=as_json,
    )


@schedtrace.command(
    cls=Examples,
    examples=[
        ("record 1234 -o x.rec --duration 10", "everything of ten seconds"),
        ("record 1234 5678 -o x.rec --ring 30", "until Ctrl-C, and then the last half minute"),
        ("record 1234 -o x.rec --when 'latency>50ms'", "what came before each wait to run of over 50 ms"),
    ],
)
@click.argument("pids", metavar="PID...", type=click.IntRange(min=1), nargs=-1, required=True)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="File to write.")
@click.option(
    "--duration", type=Seconds(min=0, min_open=True), help="Seconds to record; without, until Ctrl-C."
)
@click.option("--max-size", type=Size(), help="End when the file has so many bytes (100M).")
@click.option("--ring", type=Seconds(min=0.1, max=3600), help="Keep only the last so many seconds (and 256 MiB).")
@click.option("--when", type=When(), help="Write the seconds kept (5 without --ring) when a goroutine waits so long.")
@click.option(
    "--when-pause",
    type=Seconds(min=0.1, max=86400),
    help="At most once in so many seconds; without, in as many as are kept.",
)
@click.option("--syscalls", is_flag=True, help="As for attach.")
@click.option("--max-goroutines", type=click.IntRange(min=1, max=1 << 24), default=1 << 17, show_default=True)
@_json_option
def record(
    pids: tuple[int, ...],
    output: str,
    duration: float | None,
    max_size: int | None,
    ring: float | None,
    when: Condition | None,
    when_pause: float | None,
    syscalls: bool,
    max_goroutines: int,
    as_json: bool,
) -> None:
    """Write every change of state of the goroutines of processes to a file (docs/recording.md)."""
    from schedtrace import record_command
    from schedtrace.record import NO_LIMIT, Options
    from schedtrace.recording import MOST_TARGETS

    if len(set(pids)) < len(pids):
        raise click.UsageError("a process can be recorded only once")
    if len(pids) > MOST_TARGETS:
        raise click.UsageError(f"more than {MOST_TARGETS} processes in one recording")
    options = Options(output, duration or 0.0, max_size or NO_LIMIT, ring or 0.0, when, when_pause or 0.0, syscalls)
    record_command.record(pids, options, max_goroutines=max_goroutines, as_json=as_json)


@schedtrace.command(
    cls=Examples,
    examples=[
        ("report x.rec", "what attach would have said"),
        ("report x.rec --from 2.5 --to 3", "of half a second of it"),
        ("report x.rec --function 'main.*'", "of the goroutines that began with these functions"),
    ],
)
@click.argument("file")
@click.option("--from", "since", type=Seconds(min=0, max=MOST_SECONDS), help="Seconds from the recording's start.")
@click.option("--to", "until", type=Seconds(min=0, max=MOST_SECONDS), help="Seconds from the recording's start.")
@click.option("--goroutine", type=click.IntRange(min=1, max=(1 << 63) - 1), help="Only the goroutine with this id.")
@click.option("--function", default="", metavar="PATTERN", help="Only goroutines that began with such a function.")
@click.option("--pid", type=click.IntRange(min=1), help="Of several processes, only this one.")
@_json_option
def report(
    file: str,
    since: float | None,
    until: float | None,
    goroutine: int | None,
    function: str,
    pid: int | None,
    as_json: bool,
) -> None:
    """Show what a recording says: the report of attach. Needs neither root nor BCC."""
    from schedtrace import record_command
    from schedtrace.recorded import Selection

    if until is not None and until <= (since or 0.0):
        raise click.UsageError("--to comes before --from")
    selection = Selection(since or 0.0, inf if until is None else until, goroutine, function, pid)
    record_command.report(file, selection, as_json=as_json)


@schedtrace.command(
    cls=Examples,
    examples=[
        ("export x.rec --format html -o x.html", "one page to look at and pass on"),
        ("export x.rec --format perfetto -o x.pftrace", "a timeline, for https://ui.perfetto.dev"),
        ("export x.rec --format chrome -o x.json", "the same for older viewers"),
        ("export x.rec --format csv | grep main.worker", "a row for each transition"),
    ],
)
@click.argument("file")
@click.option(
    "--format",
    "form",
    type=click.Choice(["perfetto", "chrome", "csv", "html"]),
    required=True,
    help="What to make of it.",
)
@click.option("-o", "--output", default="-", metavar="OUT", help="File to write; without, standard output.")
def export(file: str, form: str, output: str) -> None:
    """Make of a recording what other programs show (docs/export.md). Needs neither root nor BCC."""
    from schedtrace import export_command

    export_command.export(file, form, output)


@schedtrace.command(
    cls=Examples,
    examples=[
        ("inspect 1234", "what would be probed in a running process"),
        ("inspect ./server", "the same for a file, on any machine"),
    ],
)
@click.argument("target", metavar="PID|FILE")
@click.option("--syscalls", is_flag=True, help="As for attach.")
@_json_option
def inspect(target: str, syscalls: bool, as_json: bool) -> None:
    """Show which probes a binary would get, why, and what can't be seen. Loads nothing."""
    from schedtrace.attach import plan_of
    from schedtrace.listings import inspect_listing

    with Progress("reading the binary"):
        plan = plan_of(target, syscalls=syscalls)
    _print(inspect_listing(plan), as_json)


@schedtrace.command(
    name="list",
    cls=Examples,
    examples=[
        ("list", "all Go processes of this node"),
        ("list --agent 127.0.0.1:9755", "and what the agent there does with them"),
    ],
)
@click.option("--agent", "address", metavar="ADDRESS", help="Also show what the agent at HOST:PORT does.")
@_json_option
def list_(address: str | None, as_json: bool) -> None:
    """Show the Go processes of this node: version, CPU limit, throttling, and how much can be seen of each."""
    from schedtrace.agent_client import ask_agent
    from schedtrace.discovery import scan
    from schedtrace.listings import list_listing

    with Progress("looking at the processes"):
        watched = ask_agent(address) if address else None
        found = scan()
    _print(list_listing(found, watched), as_json)


@schedtrace.command(cls=Examples, examples=[("check", "and what to do about what is missing")])
@_json_option
def check(as_json: bool) -> int:
    """Find out whether this node can run schedtrace: kernel, capabilities, tracefs, BCC."""
    from schedtrace.check import check_node
    from schedtrace.listings import check_listing

    with Progress("trying what the node can do"):
        report = check_node()
    _print(check_listing(report), as_json)
    return report.exit_code


@schedtrace.command(
    cls=Examples,
    examples=[
        ("agent", "every Go process of this node, at 127.0.0.1:9755/metrics"),
        ("agent --listen 0.0.0.0:9755", "for a Prometheus elsewhere"),
        ("agent --select shop --select 'pay/api-*'", "only a namespace, and some pods of another"),
        ("agent --select shop/cart-1 --max-overhead none", "every transition of one pod, all the time"),
    ],
)
@click.option("--listen", default="127.0.0.1:9755", show_default=True, help="Address to serve metrics at: HOST:PORT.")
@click.option(
    "--select",
    multiple=True,
    metavar="GLOBS",
    help="Watch only NAMESPACE/POD/CONTAINER/PROCESS; parts left out match all. May be given several times.",
)
@click.option(
    "--log-root",
    default="/var/log",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Where the node's /var/log is, whose folder containers/ names pods.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--max-series",
    type=click.IntRange(min=1),
    default=60_000,
    show_default=True,
    help="At most so many series about targets; what doesn't fit is left out and counted.",
)
@click.option(
    "--max-targets",
    type=click.IntRange(min=1, max=1 << 14),
    default=512,
    show_default=True,
    help="At most so many processes at once (about 20 kB of kernel memory each and CPU).",
)
@click.option("--max-goroutines", type=click.IntRange(min=1, max=1 << 24), default=1 << 17, show_default=True)
@click.option(
    "--max-overhead",
    callback=share,
    metavar="PERCENT",
    default="1",
    show_default=True,
    help="What watching may cost a process, of the CPU time it uses itself: it is watched in windows. 'none': always.",
)
@click.option(
    "--level",
    type=click.Choice(["passive", "sampled", "full"]),
    default="full",
    show_default=True,
    help="The most that may be done: nothing that needs probes, seeing what the runtime samples, or every goroutine.",
)
@click.option("--tls-certificate", type=click.Path(dir_okay=False), help="Serve over TLS: certificate (PEM).")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="Its private key (PEM).")
@click.option("--tls-client-ca", type=click.Path(dir_okay=False), help="Serve only clients with certificates of it.")
def agent(
    listen: str,
    select: tuple[str, ...],
    log_root: str,
    log_format: str,
    max_series: int,
    max_targets: int,
    max_goroutines: int,
    max_overhead: float | None,
    level: str,
    tls_certificate: str | None,
    tls_key: str | None,
    tls_client_ca: str | None,
) -> None:
    """Watch every Go process of this node and serve totals per pod to Prometheus."""
    from schedtrace.agent import Options, run
    from schedtrace.tls import TlsFiles
    from schedtrace.web import parse_address

    try:
        address = parse_address(listen)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from None
    if bool(tls_certificate) != bool(tls_key) or (tls_client_ca and not tls_certificate):
        raise click.UsageError("--tls-certificate and --tls-key go together, and --tls-client-ca with them")
    tls = TlsFiles(tls_certificate, tls_key, tls_client_ca or "") if tls_certificate and tls_key else None
    run(
        Options(
            listen=address,
            select=select,
            log_root=log_root,
            log_json=log_format == "json",
            max_series=max_series,
            max_targets=max_targets,
            max_goroutines=max_goroutines,
            max_overhead=max_overhead,
            level=level,
            tls=tls,
        )
    )


def _print(listing: Listing, as_json: bool) -> None:
    if as_json:
        json.dump(listing.json, sys.stdout)
        print()
    else:
        from rich.console import Console

        Console(highlight=False).print(listing.text, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Every error becomes one line on standard error."""
    exit_code = _run(arguments)
    if arguments is None:  # this process does nothing else
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python prints a traceback if it is interrupted as it ends
    return exit_code


def _run(arguments: Sequence[str] | None) -> int:
    _open_standard_streams()
    if not os.environ.get("TERM") and os.isatty(1):
        os.environ["TERM"] = "dumb"  # nobody knows what it understands
    # numpy would start a thread a CPU for linear algebra, which is never done: a third of the time of its import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        result = schedtrace.main(arguments, prog_name="schedtrace", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE_ERROR
    except click.ClickException as error:
        return _refuse(_usage_error(error))
    except SchedtraceError as error:
        return _refuse(error)
    except (ImportError, MemoryError) as error:
        return _refuse(NodeUnsupported(f"too little memory, or not all of schedtrace is installed: {error}"))
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:  # click and rich make the second of the first
        if isinstance(error, SystemExit) and not error.code:
            return 0  # click has written a shell's completion
        _write_no_more()
        return CLOSED_PIPE
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        _write_no_more()
        return _refuse(SchedtraceError(f"the output can't be written: {error.strerror}"))
    return result if isinstance(result, int) else 0


def _refuse(error: SchedtraceError) -> int:
    with suppress(OSError):  # the terminal may be gone
        print(f"schedtrace: {error}", file=sys.stderr)
    return error.exit_code


def _usage_error(error: click.ClickException) -> SchedtraceError:
    where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "schedtrace"
    refusal = SchedtraceError(f"{error.format_message().rstrip('.')} (see {where} --help)")
    refusal.exit_code = USAGE_ERROR
    return refusal


def _open_standard_streams() -> None:
    """Where standard streams were closed, put /dev/null in their place: a file opened later would get their number, and
    be written to in their stead by BCC's library."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _write_no_more() -> None:
    """Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
