"""Whose a cgroup is: namespace, pod and container, without the Kubernetes API and without a runtime's socket.

Two sources meet. The cgroup path is the kernel's word: it gives the container id and nearly always the pod's UID. The
names come from links that the kubelet makes for every container that it has started (kubernetes/kubernetes,
pkg/kubelet/kuberuntime/legacy.go):

    /var/log/containers/<pod>_<namespace>_<container>-<container id>.log
        -> /var/log/pods/<namespace>_<pod>_<pod uid>/<container>/<restarts>.log

A link counts only if its name is exactly what its target and the container id of the cgroup path make together, and if
it names the pod UID of that path. Links are read as text (readlink) and never followed. If two links fit one container,
neither is taken.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from schedtrace.cgroups import ContainerRef, Membership, container_of

SHORT_ID = 12
"""How many digits of a container id stand for it in a label, as in the container runtimes' own listings."""

_DNS_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_DNS_SUBDOMAIN = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_LINK_TARGET = re.compile(
    rf"(?:.*/)?(?P<namespace>{_DNS_LABEL})_(?P<pod>{_DNS_SUBDOMAIN})_(?P<uid>[0-9a-f-]{{32,36}})"
    rf"/(?P<container>{_DNS_LABEL})/[0-9]{{1,10}}\.log"
)
_LINK_NAME = re.compile(r".*-([0-9a-f]{64})\.log")
_SUFFIX = ".log"
# The kubelet cuts longer names (without the suffix), and the container id stands at the end.
_LONGEST_STEM = 255 - len(_SUFFIX)
_LEAST_OF_ID = 12

# systemd runs one manager per logged-in user: below it, cgroups have whatever names that user likes.
_USER_MANAGER = re.compile(r"/user@[0-9]+\.service(?:/|$)")
_SERVICE = re.compile(r"(?:^|/)([^/]+\.service)(?=/|$)")

_LOOK_AGAIN_SECONDS = 0.2
# A directory changed twice within one tick of the kernel's clock shows one time of change: a listing made that soon
# after a change may lack the second one.
_SETTLED_NS = 1_000_000_000
_MOST_ENTRIES = 1 << 14
_MOST_LINKS = 8  # of one container; the kubelet makes one
_MOST_REMEMBERED = 1 << 12


@dataclass(frozen=True)
class Owner:
    """Whose a cgroup is.

    For a container of Kubernetes ``namespace``, ``pod`` and ``container`` are the names. Without Kubernetes, or while
    the names aren't known, the first two are empty and ``container`` is the first 12 digits of the container id; for a
    process of the host it is its systemd service, or empty. ``pending``: the names may still come, ask again.
    ``problem``: why names that were offered, or could be expected, were not taken; one line, else empty.
    """

    namespace: str
    pod: str
    container: str
    pod_uid: str = ""
    container_id: str = ""
    pending: bool = False
    problem: str = ""


@dataclass(frozen=True)
class _Known:
    owner: Owner
    place: str
    nested: bool


class PodIndex:
    """The kubelet's links, read again when their folder has changed: at most five times a second, when someone asks.

    ``log_root`` is where the node's /var/log can be read; only its folder "containers" is. Not for use by several
    threads at once.
    """

    def __init__(self, log_root: str = "/var/log", clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = os.path.join(log_root, "containers")  # noqa: PTH118 (Path would drop what is odd in it)
        self._clock = clock
        self._looked: float | None = None
        self._changed_ns = -1
        self._links: dict[str, list[str]] = {}
        self._cut_links: list[str] = []
        self._known: dict[str, _Known] = {}
        self.problem = ""
        """Why the folder can't be read, or not to its end; empty if it can."""

    def owner_of_process(self, membership: Membership, *, fresh: bool = False) -> Owner:
        """Whose a process is, by the first of its cgroups that belongs to a container: the one that stands for it
        (:attr:`Membership.main`), then the others. ``fresh`` as for :meth:`owner_of`."""
        main = membership.main
        paths = [cgroup.path for cgroup in ([main] if main else []) + list(membership.cgroups)]
        in_container = (path for path in paths if container_of(path).container_id)
        return self.owner_of(next(in_container, paths[0] if paths else "/"), fresh=fresh)

    def owner_of(self, path: str, *, fresh: bool = False) -> Owner:
        """Whose the cgroup with this path is. The answer stays after the kubelet has removed the link. ``fresh``: don't
        go by links that were read a moment ago, for whoever can't ask again."""
        ref = container_of(path)
        if not ref.container_id:
            service = None if ref.pod_uid else _SERVICE.search(path)
            return Owner("", "", service[1] if service else "", ref.pod_uid)
        if _USER_MANAGER.search(ref.place):
            return _unnamed(ref)
        if fresh and ref.container_id not in self._known:
            self._looked = None
        self._look()
        known = self._known.get(ref.container_id)
        if known is not None and known.place != ref.place and not (known.nested and not ref.nested):
            return _unnamed(ref, problem=f"the id of the container in cgroup {known.place!r} is also in {path!r}")
        start_of_id = f"-{ref.container_id[:_LEAST_OF_ID]}"
        cut_links = [name for name in self._cut_links if start_of_id in name]
        links = self._links.get(ref.container_id, []) + cut_links
        claims = {name: claim for name in links[:_MOST_LINKS] if (claim := self._claim(ref, name)) is not None}
        if len(claims) > 1 or len(links) > _MOST_LINKS:
            self._known.pop(ref.container_id, None)
            some = " and ".join(map(repr, sorted(claims or links)[:2]))
            return _unnamed(ref, pending=True, problem=f"{len(links)} log links claim one container, such as {some}")
        if claims:
            owner = next(iter(claims.values()))
            self._remember(ref, owner)
            return owner
        return known.owner if known else self._nameless(ref, links)

    def _nameless(self, ref: ContainerRef, links: list[str]) -> Owner:
        """The owner without a link that fits; ``links`` bear the id and don't."""
        if links:
            problem = f"log link {min(links)!r} doesn't fit its own target or the pod of that container's cgroup"
            return _unnamed(ref, pending=True, problem=problem)
        # Only the kubelet makes pods, and it will make the link; for other containers nobody does.
        return _unnamed(ref, pending=bool(ref.pod_uid), problem=self.problem if ref.pod_uid else "")

    def _claim(self, ref: ContainerRef, name: str) -> Owner | None:
        """What a link says, if all that it says agrees with itself and with the cgroup path."""
        try:
            target = os.readlink(os.path.join(self._folder, name))  # noqa: PTH115, PTH118 (text, not a path)
        except OSError:
            return None  # no link, or it has gone
        match = _LINK_TARGET.fullmatch(target)
        if match is None:
            return None
        namespace, pod, uid, container = match.group("namespace", "pod", "uid", "container")
        # Where containers aren't in pods' cgroups (the kubelet with --cgroups-per-qos=false) there is no UID to
        # compare, but there they aren't inside another container either.
        if uid != ref.pod_uid and (ref.pod_uid or ref.nested):
            return None
        if _link_name(namespace, pod, container, ref.container_id) != name:
            return None
        return Owner(namespace, pod, container, uid, ref.container_id)

    def _remember(self, ref: ContainerRef, owner: Owner) -> None:
        if ref.container_id not in self._known and len(self._known) >= _MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[ref.container_id] = _Known(owner, ref.place, ref.nested)

    def _look(self) -> None:
        now = self._clock()
        if self._looked is not None and now - self._looked < _LOOK_AGAIN_SECONDS:
            return
        self._looked = now
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns  # noqa: PTH116
            if changed_ns != self._changed_ns:
                settled = time.time_ns() - changed_ns > _SETTLED_NS
                self._read_folder()
                self._changed_ns = changed_ns if settled else -1
        except OSError as error:
            self._links, self._cut_links, self._changed_ns = {}, [], -1
            self.problem = (
                f"the kubelet's links in {self._folder} can't be read ({error.strerror}): pods have no names; make the"
                " node's /var/log/containers readable there"
            )

    def _read_folder(self) -> None:
        links: dict[str, list[str]] = {}
        cut_links = []
        self.problem = ""
        with os.scandir(self._folder) as entries:
            for count, entry in enumerate(entries):
                if count == _MOST_ENTRIES:
                    self.problem = f"{self._folder} holds more than {_MOST_ENTRIES} entries: the others are not read"
                    break
                match = _LINK_NAME.fullmatch(entry.name)
                if match:
                    links.setdefault(match[1], []).append(entry.name)
                elif len(entry.name) == _LONGEST_STEM + len(_SUFFIX) and entry.name.endswith(_SUFFIX):
                    cut_links.append(entry.name)
        self._links, self._cut_links = links, cut_links


def _link_name(namespace: str, pod: str, container: str, container_id: str) -> str | None:
    """The name that the kubelet gives the link; None if too little of the id is left in it to know whose it is."""
    names = f"{pod}_{namespace}_{container}-"
    if len(names) + _LEAST_OF_ID > _LONGEST_STEM:
        return None
    return f"{names}{container_id}"[:_LONGEST_STEM] + _SUFFIX


def _unnamed(ref: ContainerRef, *, pending: bool = False, problem: str = "") -> Owner:
    container = ref.container_id[:SHORT_ID]
    return Owner("", "", container, ref.pod_uid, ref.container_id, pending=pending, problem=problem)
