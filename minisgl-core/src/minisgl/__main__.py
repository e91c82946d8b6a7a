"""``python -m minisgl``: the same as the command ``minisgl``."""

import sys

from minisgl.cli import main

if __name__ == "__main__":
    sys.exit(main())
