"""One file per command; each has `run(arguments) -> exit status`."""
