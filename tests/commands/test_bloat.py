"""`lacuna bloat` counts the package by room and extension."""

import re
import subprocess

import pytest

from lacuna.commands.bloat import EXTENSIONS, statements
from runs import lacuna, start_anew

SOURCE = '''"""What it is for,
in two lines."""

import os  # why

# a comment
VALUE = (
    1,
)
"""What VALUE is."""
...


def shown() -> None:
    """A docstring."""
    if VALUE: print(VALUE); print(os)
'''


@pytest.mark.slow
def test_the_core_is_the_sum_of_its_rooms_and_extensions_are_apart() -> None:
    lines = [
        re.fullmatch(r"(\S+) +([\d,]+)( .*)?", line) for line in lacuna("bloat").splitlines()[:-1]
    ]
    found = {line[1]: int(line[2].replace(",", "")) for line in lines}
    rooms = {name: count for name, count in found.items() if name not in {"core", *EXTENSIONS}}
    assert {".", "commands", "config", "data", "train"} <= rooms.keys()
    assert found["core"] == sum(rooms.values())
    assert all(found[name] > 0 for name in EXTENSIONS)


def test_statements_are_counted_however_they_are_laid_out() -> None:
    # import, assignment, the dots below its documentation, def, if and two calls
    assert statements(SOURCE) == 7


def test_a_reader_that_has_seen_enough_is_no_error_worth_a_traceback() -> None:
    process = start_anew("bloat", stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()
