"""``python -m graphrl``: the same as the ``graphrl`` command."""

import sys

from graphrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
