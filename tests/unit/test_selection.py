"""Globs over namespace, pod, container and process."""

import pytest

from schedtrace.selection import BadSelection, Selection
from schedtrace.series import Labels

API = Labels("pay", "api-7d9f", "app", "server")
HOST = Labels("", "", "", "containerd")


@pytest.mark.parametrize(
    ("patterns", "api", "host"),
    [
        ((), True, True),
        (("*",), True, True),
        (("pay",), True, False),
        (("pay/api-*",), True, False),
        (("pay/api-*/sidecar",), False, False),
        (("shop", "*/*/*/server"), True, False),
        (("*/*/*/containerd",), False, True),
        (("PAY",), False, False),
        (("p?y/*/[ab]pp",), True, False),
    ],
)
def test_patterns(patterns: tuple[str, ...], api: bool, host: bool) -> None:
    selection = Selection.parse(patterns)
    assert (API in selection, HOST in selection) == (api, host)


def test_everything() -> None:
    assert Selection.parse(()).everything
    assert Selection.parse(("pay", "*")).everything
    assert not Selection.parse(("pay",)).everything


@pytest.mark.parametrize("text", ["", "a//b", "/a", "a/b/c/d/e"])
def test_what_can_not_be_understood(text: str) -> None:
    with pytest.raises(BadSelection) as refused:
        Selection.parse((text,))
    assert refused.value.exit_code == 2
