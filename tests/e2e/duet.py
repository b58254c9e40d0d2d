"""What the duet (tests/golang/duet) does by construction, read from a scrape."""

from tests.e2e.agent_process import Labels, Scrape

N = 20_011
"""Round trips in these tests. Each of its two messages is one wait and one wake-up."""
STARTUP = 12
"""How often goroutines wait at most while a Go program starts: main for two of the runtime's, and those for work."""
TRANSITIONS = "schedtrace_goroutine_transitions_total"
LOST = "schedtrace_lost_total"
_WAITS = "schedtrace_goroutine_wait_seconds_count"


def parks(scrape: Scrape, owner: Labels) -> float:
    """Waits for channels, and those that are known to be left out since they began before the agent looked."""
    channels = sum(scrape.total(_WAITS, owner, reason=f"chan {what}") for what in ("send", "receive"))
    return channels + scrape.total(LOST, owner, reason="interval_began_before_window")
