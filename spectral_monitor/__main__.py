"""``python -m spectral_monitor``: the command ``spectral-monitor``."""

import sys

from spectral_monitor.cli import main

if __name__ == "__main__":
    sys.exit(main())
