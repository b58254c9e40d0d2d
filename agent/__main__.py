"""``python -m schedtrace``."""

import sys

from schedtrace.cli import main

sys.exit(main())
