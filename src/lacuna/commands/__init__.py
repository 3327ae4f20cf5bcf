"""One file per command.

The file's docstring begins with the command's usage and purpose. Its `run(words)` runs the command
and may return an exit status.
"""
