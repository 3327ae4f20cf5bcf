"""`lacuna bloat` counts the package by folder."""

import re
import subprocess

from runs import lacuna, start


def test_the_total_is_the_sum_of_the_folders() -> None:
    *folders, total = lacuna("bloat").splitlines()
    counts = {name: int(count.replace(",", "")) for name, count in (line.split() for line in folders)}
    assert {".", "commands", "config", "data", "train"} <= counts.keys()
    found = re.fullmatch(r"total +([\d,]+) of 5,760", total)
    assert found and int(found[1].replace(",", "")) == sum(counts.values())


def test_a_reader_that_has_seen_enough_is_no_error_worth_a_traceback() -> None:
    process = start("bloat", stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()
