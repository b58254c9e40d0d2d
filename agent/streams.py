"""What the standard streams lead to."""

from __future__ import annotations

import os


def is_plain(descriptor: int) -> bool:
    """Is it no terminal, or one that understands no control sequences?"""
    return os.environ.get("TERM", "").lower() in ("", "dumb", "unknown") or not os.isatty(descriptor)


def is_ours(descriptor: int) -> bool:
    """Does the terminal belong to this process's job, rather than to a shell that runs it in the background?"""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return True  # it is not the one that controls this session: nobody shares it
