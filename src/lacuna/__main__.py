"""`python -m lacuna`: the command line, for launchers that start modules."""

import sys

from lacuna.cli import main

if __name__ == "__main__":
    sys.exit(main())
