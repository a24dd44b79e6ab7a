"""`python -m pararnn` is the command `pararnn`."""

import sys

from pararnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
