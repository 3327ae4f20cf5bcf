"""`python -m lacuna`: the command line, for launchers that start modules."""

from lacuna.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
