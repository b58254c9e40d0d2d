"""Accounts outlive processes and cgroups, and end one scrape after their last owner."""

from pathlib import Path

from schedtrace.accounts import MOST_NAMES, Accounts, Owner
from schedtrace.series import Labels, SeriesTotals, TargetInfo

WEB = Labels("shop", "web-1", "app", "server")
INFO = TargetInfo("go1.27.3", "full", "symtab")


def _shown(accounts: Accounts, alive: set[Labels]) -> dict[Labels, SeriesTotals]:
    return {labels: account.totals for labels, account in accounts.for_scrape(alive)}


def _totals(transitions: int) -> SeriesTotals:
    return SeriesTotals(transitions={("runnable", "running"): transitions})


def test_counters_survive_a_restart_of_the_container(tmp_path: Path) -> None:
    pod = tmp_path / "pod"
    (pod / "first").mkdir(parents=True)
    accounts = Accounts()
    accounts.open(WEB, Owner(str(pod / "first"), str(pod)), INFO)
    assert _shown(accounts, {WEB}) == {WEB: SeriesTotals()}
    accounts.pay_in(WEB, _totals(7))
    (pod / "first").rmdir()
    for _ in range(3):  # between two runs nothing of it lives but the pod
        assert _shown(accounts, set()) == {WEB: _totals(7)}
    (pod / "second").mkdir()
    accounts.open(WEB, Owner(str(pod / "second"), str(pod)), INFO)
    accounts.pay_in(WEB, _totals(5))
    assert _shown(accounts, set()) == {WEB: _totals(12)}


def test_an_account_is_shown_once_more_after_its_pod(tmp_path: Path) -> None:
    pod = tmp_path / "pod"
    (pod / "container").mkdir(parents=True)
    accounts = Accounts()
    accounts.open(WEB, Owner(str(pod / "container"), str(pod)), INFO)
    accounts.pay_in(WEB, _totals(3))
    (pod / "container").rmdir()
    pod.rmdir()
    assert _shown(accounts, set()) == {WEB: _totals(3)}
    assert _shown(accounts, set()) == {}


def test_a_process_of_the_host_keeps_its_account_itself() -> None:
    accounts = Accounts()
    accounts.open(WEB, Owner("", ""), INFO)
    assert _shown(accounts, {WEB}) == {WEB: SeriesTotals()}
    accounts.pay_in(WEB, _totals(1))
    assert _shown(accounts, set()) == {WEB: _totals(1)}
    assert _shown(accounts, set()) == {}


def test_one_that_comes_back_in_time_goes_on() -> None:
    accounts = Accounts()
    accounts.open(WEB, Owner("", ""), INFO)
    accounts.pay_in(WEB, _totals(1))
    assert _shown(accounts, set()) == {WEB: _totals(1)}
    accounts.open(WEB, Owner("", ""), INFO)
    accounts.pay_in(WEB, _totals(1))
    assert _shown(accounts, {WEB}) == {WEB: _totals(2)}


def test_throttled_time_of_cgroups_that_are_gone_stays(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    counters: dict[str, int] = {}
    accounts = Accounts()
    accounts.open(WEB, Owner(str(first), str(tmp_path)), INFO)
    account = next(account for _, account in accounts.for_scrape({WEB}))
    assert account.refresh_throttling(counters.get) is None  # never known
    counters[str(first)] = 500
    assert account.refresh_throttling(counters.get) == 500
    first.rmdir()
    del counters[str(first)]
    assert account.refresh_throttling(counters.get) == 500
    second.mkdir()
    counters[str(second)] = 30
    accounts.open(WEB, Owner(str(second), str(tmp_path)), INFO)
    assert account.refresh_throttling(counters.get) == 530


def test_a_counter_that_can_not_be_read_now_does_not_go_back(tmp_path: Path) -> None:
    counters = {str(tmp_path): 500}
    accounts = Accounts()
    accounts.open(WEB, Owner(str(tmp_path), str(tmp_path)), INFO)
    account = next(account for _, account in accounts.for_scrape({WEB}))
    assert account.refresh_throttling(counters.get) == 500
    counters.clear()
    assert account.refresh_throttling(counters.get) == 500


def test_a_container_can_not_have_names_without_end() -> None:
    accounts = Accounts()
    for i in range(MOST_NAMES):
        labels = Labels("shop", "web-1", "app", f"copy-{i}")
        assert accounts.has_room_for(labels)
        accounts.open(labels, Owner("", ""), INFO)
    assert not accounts.has_room_for(Labels("shop", "web-1", "app", "one-more"))
    assert accounts.has_room_for(Labels("shop", "web-1", "app", "copy-7"))
    assert accounts.has_room_for(Labels("shop", "web-1", "sidecar", "copy-7"))
