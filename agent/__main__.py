"""``python -m schedtrace``, and what the command ``schedtrace`` runs."""

import signal
import sys


def main() -> int:
    """Run the command line and return the exit code."""
    # Python would answer an interrupt in the middle of an import with a traceback: until there is anything to be ended
    # in order, it ends the process.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from schedtrace import cli

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
