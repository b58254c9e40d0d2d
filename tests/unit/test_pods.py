"""Names of pods from folders laid out as the kubelet lays them out, and as someone hostile would."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedtrace.cgroups import Cgroup, Membership
from schedtrace.pods import Owner, PodIndex

UID = "0f6a3c7e-5f0d-4c1e-9b3a-2d8e7f6a5b4c"
OTHER_UID = "77777777-5f0d-4c1e-9b3a-2d8e7f6a5b4c"
HASH = "ce1eeab6" + "0" * 24
CONTAINER = "4ab7" * 16
OTHER = "9e01" * 16
SLICE = "pod" + UID.replace("-", "_") + ".slice"
PATH = f"/kubepods/burstable/pod{UID}/{CONTAINER}"
NAMED = Owner("shop", "cart-5d9f-x2x", "server", UID, CONTAINER)
FIVE_SECONDS_NS = 5_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """A node's /var/log, and the index over it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "containers"
        self.folder.mkdir()
        self.clock = Clock()
        self.index = PodIndex(str(root), self.clock)

    def link(
        self,
        container_id: str = CONTAINER,
        namespace: str = "shop",
        pod: str = "cart-5d9f-x2x",
        container: str = "server",
        uid: str = UID,
        target: str | None = None,
    ) -> Path:
        """What the kubelet makes when it has started a container."""
        stem = f"{pod}_{namespace}_{container}-{container_id}"[:251]
        link = self.folder / f"{stem}.log"
        link.symlink_to(target or f"/var/log/pods/{namespace}_{pod}_{uid}/{container}/0.log")
        return link

    def later(self, seconds: float = 1.0) -> None:
        self.clock.now += seconds

    def aged(self) -> None:
        """The folder's last change lies some time back."""
        changed_ns = self.folder.stat().st_mtime_ns - FIVE_SECONDS_NS
        os.utime(self.folder, ns=(changed_ns, changed_ns))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        PATH,
        f"/kubepods/pod{UID}/{CONTAINER}",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-{SLICE}/cri-containerd-{CONTAINER}.scope",
        f"/kubepods.slice/kubepods-{SLICE}/cri-containerd-{CONTAINER}.scope",
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-{SLICE}/crio-{CONTAINER}.scope/container",
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-{SLICE}/docker-{CONTAINER}.scope",
        f"/system.slice/containerd.service/kubepods-burstable-{SLICE}:cri-containerd:{CONTAINER}",
        f"/docker/{OTHER}/kubelet/kubepods/besteffort/pod{UID}/{CONTAINER}",
        f"/system.slice/docker-{OTHER}.scope/kubelet.slice/kubelet-{SLICE}/cri-containerd-{CONTAINER}.scope",
        f"/../../pod{UID}/{CONTAINER}",
        f"{PATH}/made/by/the/container",
    ],
)
def test_every_form_of_cgroup_path_finds_its_link(path: str, node: Node) -> None:
    node.link()
    node.link(OTHER, "kube-system", "dns", "dns", OTHER_UID)
    assert node.index.owner_of(path) == NAMED


def test_static_pods_have_a_hash_for_a_uid(node: Node) -> None:
    node.link(namespace="kube-system", pod="etcd-node1.example", container="etcd", uid=HASH)
    owner = node.index.owner_of(f"/kubepods/burstable/pod{HASH}/{CONTAINER}")
    assert owner == Owner("kube-system", "etcd-node1.example", "etcd", HASH, CONTAINER)


def test_containers_of_one_pod_and_pods_of_one_name(node: Node) -> None:
    """A pod made anew under its name has another UID; the links of the one before may still be there."""
    ids = [f"{n}" * 64 for n in range(3)]
    node.link(ids[0], container="server", uid=UID)
    node.link(ids[1], container="sidecar", uid=UID)
    node.link(ids[2], container="server", uid=OTHER_UID)
    owners = [
        node.index.owner_of(f"/kubepods/pod{uid}/{container_id}")
        for container_id, uid in zip(ids, (UID, UID, OTHER_UID), strict=True)
    ]
    assert [(o.namespace, o.pod, o.container, o.pod_uid) for o in owners] == [
        ("shop", "cart-5d9f-x2x", "server", UID),
        ("shop", "cart-5d9f-x2x", "sidecar", UID),
        ("shop", "cart-5d9f-x2x", "server", OTHER_UID),
    ]


def test_the_log_folder_can_be_elsewhere_and_rotated_further(node: Node) -> None:
    node.link(target=f"/mnt/disk1/pods/shop_cart-5d9f-x2x_{UID}/server/17.log")
    assert node.index.owner_of(PATH) == NAMED


def test_without_pod_cgroups_the_link_says_the_uid(node: Node) -> None:
    node.link()
    assert node.index.owner_of(f"/k8s.io/{CONTAINER}") == NAMED
    assert node.index.owner_of(f"/docker/{OTHER}/made/{CONTAINER}").pod == ""


def test_a_link_that_comes_late_is_found_soon(node: Node) -> None:
    waiting = Owner("", "", CONTAINER[:12], UID, CONTAINER, pending=True)
    assert node.index.owner_of(PATH) == waiting
    node.link()
    node.later(0.1)
    assert node.index.owner_of(PATH) == waiting
    node.later(0.1)
    assert node.index.owner_of(PATH) == NAMED


def test_a_link_that_comes_late_is_found_at_once_by_who_cannot_ask_again(node: Node) -> None:
    assert node.index.owner_of(PATH).pending
    node.link()
    assert node.index.owner_of(PATH).pending
    assert node.index.owner_of(PATH, fresh=True) == NAMED


def test_an_unchanged_folder_is_not_read_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    listings: list[str] = []
    scandir: Callable[[str], object] = os.scandir

    def counted(path: str) -> object:
        listings.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    node.aged()
    for _ in range(5):
        node.index.owner_of(PATH)
        node.later()
    assert listings == [str(node.folder)]
    node.link()
    node.aged()
    assert node.index.owner_of(PATH) == NAMED
    assert len(listings) == 2


def test_two_changes_within_one_tick_of_the_clock_are_both_seen(node: Node) -> None:
    node.index.owner_of(PATH)
    before = node.folder.stat()
    node.link()
    os.utime(node.folder, ns=(before.st_mtime_ns, before.st_mtime_ns))
    node.later()
    assert node.index.owner_of(PATH) == NAMED


def test_names_stay_when_the_link_goes(node: Node) -> None:
    """The last counts of a container are read when the kubelet may have removed it."""
    link = node.link()
    assert node.index.owner_of(PATH) == NAMED
    link.unlink()
    node.later()
    assert node.index.owner_of(PATH) == NAMED


@pytest.mark.parametrize(
    ("path", "container"),
    [
        (f"/docker/{CONTAINER}", CONTAINER[:12]),
        (f"/system.slice/docker-{CONTAINER}.scope", CONTAINER[:12]),
        (f"/machine.slice/libpod-{CONTAINER}.scope/container", CONTAINER[:12]),
        (f"/user.slice/user-7.slice/user@7.service/user.slice/libpod-{CONTAINER}.scope", CONTAINER[:12]),
        ("/system.slice/nginx.service", "nginx.service"),
        ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
        ("/system.slice/containerd.service/inner.service", "containerd.service"),
        ("/user.slice/user-7.slice/user@7.service/app.slice/nginx.service", "user@7.service"),
        ("/user.slice/user-7.slice/session-3.scope", ""),
        ("/../../../system.slice/nginx.service", "nginx.service"),
        ("/services/nginx.services", ""),
        ("/", ""),
    ],
)
def test_outside_kubernetes(path: str, container: str, node: Node) -> None:
    owner = node.index.owner_of(path)
    assert (owner.namespace, owner.pod, owner.container) == ("", "", container)
    assert not owner.pending
    assert not owner.problem


def test_a_pod_without_a_container_has_no_names(node: Node) -> None:
    assert node.index.owner_of(f"/kubepods/pod{UID}") == Owner("", "", "", UID)


def test_a_process_is_where_its_cpu_cgroup_is(node: Node) -> None:
    node.link()
    cpu = Cgroup("cpu,cpuacct", PATH, 5, ())
    elsewhere = Cgroup("cgroup2", f"/docker/{OTHER}", 6, ())
    outside = Cgroup("cpu,cpuacct", "/", 1, ())
    assert node.index.owner_of_process(Membership((elsewhere, cpu))) == NAMED
    assert node.index.owner_of_process(Membership((outside, elsewhere))).container == OTHER[:12]
    assert node.index.owner_of_process(Membership((outside,))) == Owner("", "", "")
    assert node.index.owner_of_process(Membership(())) == Owner("", "", "")


def test_names_that_the_kubelet_had_to_cut(node: Node) -> None:
    namespace, pod = "n" * 60, "p" * 120
    node.link(namespace=namespace, pod=pod)
    node.link(OTHER, namespace=namespace, pod=pod, container="sidecar")
    (link, _) = sorted(node.folder.iterdir())
    assert len(link.name) == 255
    assert node.index.owner_of(f"/kubepods/pod{OTHER_UID}/{CONTAINER}").pending
    assert node.index.owner_of(PATH) == Owner(namespace, pod, "server", UID, CONTAINER)
    assert node.index.owner_of(f"/kubepods/pod{UID}/{OTHER}").container == "sidecar"


def test_a_name_cut_down_to_nothing_of_the_id_is_nobodys(node: Node) -> None:
    node.link(namespace="n" * 60, pod="p" * 185)
    assert node.index.owner_of(PATH).pending


# What follows is hostile: whoever can write into the folder, choose a name, or make cgroups.


def test_two_links_for_one_container_are_both_refused(node: Node) -> None:
    """Somebody in the container asks for the names of another pod, in its own pod's UID."""
    node.link()
    assert node.index.owner_of(PATH) == NAMED
    forged = node.link(namespace="bank", pod="vault", container="vault")
    node.later()
    owner = node.index.owner_of(PATH)
    assert (owner.namespace, owner.pod, owner.container, owner.pending) == ("", "", CONTAINER[:12], True)
    assert owner.problem.startswith("2 log links claim one container, such as 'cart-5d9f-x2x_shop_server-4ab7")
    assert forged.name in owner.problem
    forged.unlink()
    node.later()
    assert node.index.owner_of(PATH) == NAMED


def test_a_link_of_another_pod_does_not_take_a_container_over(node: Node) -> None:
    node.link()
    node.link(namespace="evil", pod="evil", container="evil", uid=OTHER_UID)
    assert node.index.owner_of(PATH) == NAMED


@pytest.mark.parametrize(
    "target",
    [
        "/etc/shadow",
        "/proc/1/environ",
        "..",
        f"/var/log/pods/shop_cart-5d9f-x2x_{OTHER_UID}/server/0.log",
        f"/var/log/pods/bank_vault_{UID}/server/0.log",
        f"/var/log/pods/shop_cart-5d9f-x2x_{UID}/other/0.log",
        f"/var/log/pods/shop_cart-5d9f-x2x_{UID}/server/0.log/x",
        f"/var/log/pods/shop_cart-5d9f-x2x_{UID}/server/0.log\n",
        f"/a\n/shop_cart-5d9f-x2x_{UID}/server/0.log",
        f"/var/log/pods/shop_cart-5d9f-x2x_{UID}/server/.log",
        f"/var/log/pods/shop_cart-5d9f-x2x_{UID}/server/٣.log",
        "/" + "../" * 1300 + "x",
    ],
)
def test_a_target_that_does_not_fit_is_refused_and_never_opened(target: str, node: Node) -> None:
    link = node.link(target=target)
    owner = node.index.owner_of(PATH)
    assert (owner.namespace, owner.pod, owner.container) == ("", "", CONTAINER[:12])
    assert owner.problem == f"log link {link.name!r} doesn't fit its own target or the pod of that container's cgroup"


def test_a_file_is_no_link(node: Node) -> None:
    (node.folder / f"cart-5d9f-x2x_shop_server-{CONTAINER}.log").write_text("")
    (node.folder / f"x-{OTHER}.log").mkdir()
    assert node.index.owner_of(PATH).pending
    assert node.index.owner_of(f"/kubepods/pod{UID}/{OTHER}").pending


@pytest.mark.parametrize(
    ("namespace", "pod", "container"),
    [("Shop", "cart", "server"), ("shop", 'ca"rt', "server"), ("shop", "cart\n", "server"), ("shop", "cart", "a.b")],
)
def test_names_that_kubernetes_would_not_take(namespace: str, pod: str, container: str, node: Node) -> None:
    node.link(namespace=namespace, pod=pod, container=container)
    owner = node.index.owner_of(PATH)
    assert (owner.namespace, owner.pod, owner.pending) == ("", "", True)
    assert owner.problem.isprintable()


def test_a_container_that_makes_cgroups_stays_in_its_pod(node: Node) -> None:
    node.link()
    forged = f"/kubepods/besteffort/pod{OTHER_UID}/{OTHER}/kubepods/burstable/pod{UID}/{CONTAINER}"
    owner = node.index.owner_of(forged)
    assert (owner.pod_uid, owner.container, owner.pending) == (OTHER_UID, OTHER[:12], True)
    node.link(OTHER, "evil", "evil", "evil", OTHER_UID)
    node.later()
    assert node.index.owner_of(forged) == Owner("evil", "evil", "evil", OTHER_UID, OTHER)


def test_the_same_container_in_a_second_place_is_not_believed(node: Node) -> None:
    """Outside Kubernetes a container may hold a whole node, as in kind, but not a container of this one."""
    node.link()
    inside = f"/docker/{OTHER}{PATH}"
    assert node.index.owner_of(inside) == NAMED  # could be: nothing says that it isn't a node
    assert node.index.owner_of(PATH) == NAMED
    owner = node.index.owner_of(inside)
    assert (owner.pod, owner.container, owner.pending) == ("", CONTAINER[:12], False)
    assert owner.problem == f"the id of the container in cgroup {PATH!r} is also in {inside!r}"
    assert node.index.owner_of(PATH) == NAMED


def test_a_user_of_the_host_cannot_make_a_pod(node: Node) -> None:
    node.link()
    path = f"/user.slice/user-7.slice/user@7.service/app.slice/kubepods-{SLICE}/cri-containerd-{CONTAINER}.scope"
    assert node.index.owner_of(path) == Owner("", "", CONTAINER[:12], UID, CONTAINER)


def test_a_heap_of_links_for_one_container_is_refused_unread(node: Node) -> None:
    for number in range(9):
        node.link(pod=f"cart-{number}")
    owner = node.index.owner_of(PATH)
    assert owner.pod == ""
    assert owner.problem.startswith("9 log links claim one container, such as 'cart-0_shop_server-")


def test_a_folder_without_end_is_read_to_a_bound(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedtrace.pods._MOST_ENTRIES", 3)
    for number in range(5):
        (node.folder / f"{number}").touch()
    owner = node.index.owner_of(PATH)
    assert owner.problem == node.index.problem == f"{node.folder} holds more than 3 entries: the others are not read"


def test_no_folder_is_said_of_pods_only(tmp_path: Path) -> None:
    clock = Clock()
    index = PodIndex(str(tmp_path / "none"), clock)
    owner = index.owner_of(PATH)
    assert owner.pending
    assert owner.problem == (
        f"the kubelet's links in {tmp_path}/none/containers can't be read (No such file or directory): pods have no"
        " names; make the node's /var/log/containers readable there"
    )
    assert index.owner_of(f"/docker/{OTHER}").problem == ""
    (tmp_path / "none").mkdir()
    Node(tmp_path / "none").link()
    clock.now += 1
    assert index.owner_of(PATH) == NAMED


def test_what_is_remembered_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedtrace.pods._MOST_REMEMBERED", 4)
    for number in range(9):
        container_id = f"{number}" * 64
        node.link(container_id)
        node.later()
        assert node.index.owner_of(f"/kubepods/pod{UID}/{container_id}").pod == "cart-5d9f-x2x"
    assert len(node.index._known) == 4


_odd_text = st.text(
    st.one_of(st.sampled_from("_-./pod0aé\n\"'\\ "), st.characters(exclude_characters="\0", codec="utf-8")), max_size=80
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=_odd_text.map(lambda text: text.replace("/", "")), target=_odd_text.filter(bool), path=_odd_text)
def test_noise_never_becomes_a_name(name: str, target: str, path: str, node: Node) -> None:
    link = node.folder / f"{name[:60]}_{random.randrange(1 << 60)}-{CONTAINER}.log"
    link.symlink_to(target)
    try:
        node.later()
        for each in (PATH, f"{path}/pod{UID}/{CONTAINER}", path):
            owner = node.index.owner_of(each)
            assert (owner.namespace, owner.pod) == ("", "")
            assert owner.problem.isprintable()
    finally:
        link.unlink()
