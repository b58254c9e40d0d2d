"""The recipe for profile-guided builds has the effect it is for, and a plain build doesn't have it."""

import pytest

from tests.workload import binary
from tools import pgo, toolchains


@pytest.mark.parametrize("version", ["1.22", "1.24", "1.27"])
def test_profile_inlines_the_status_change(version: str) -> None:
    plain, guided = binary("pingpong", version), pgo.build_pgo(version)
    for function in pgo.INLINED_INTO:
        assert pgo.changes_status_inline(guided, function)
        assert not pgo.changes_status_inline(plain, function)
    assert pgo.changes_status_inline(plain, "runtime.casgstatus")


def test_stripped_guided_build_has_no_symbols() -> None:
    for strip in (False, True):
        listing = toolchains.run(["objdump", "-t", pgo.build_pgo("1.27", strip=strip)], what="list symbols")
        assert ("runtime.park_m" in listing) is not strip
