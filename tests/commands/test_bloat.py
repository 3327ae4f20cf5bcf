"""`lacuna bloat` counts the package by folder."""

import re

from runs import lacuna


def test_the_total_is_the_sum_of_the_folders() -> None:
    *folders, total = lacuna("bloat").splitlines()
    counts = {name: int(count.replace(",", "")) for name, count in (line.split() for line in folders)}
    assert {".", "commands", "config", "data", "train"} <= counts.keys()
    found = re.fullmatch(r"total +([\d,]+) of 5,000", total)
    assert found and int(found[1].replace(",", "")) == sum(counts.values())
