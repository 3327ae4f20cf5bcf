"""One file per command, whose docstring begins with usage and purpose; `run(words)` may return an exit status."""
