"""Entry point of `python -m hybridasync.engine`."""

import sys

from hybridasync.engine.server import main

if __name__ == "__main__":
    sys.exit(main())
