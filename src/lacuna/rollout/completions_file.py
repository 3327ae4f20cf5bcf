"""The files of a run folder that have its completions."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from lacuna.rollout.groups import Group

# How a row of the run folder begins.
_STEP = re.compile(rb'\{"step": (-?\d+)')


class CompletionsFile:
    """A file of a run folder that has every completion, with its reward and the step."""

    def __init__(self, folder: str, name: str = "completions.jsonl") -> None:
        self.path = Path(folder, name)

    def go_on(self, step: int) -> None:
        """Drops the rows of later steps: a run that goes on after this one makes them anew."""
        if not self.path.exists():
            return
        kept = 0
        # As bytes: a completion may hold characters that end a line of text.
        with open(self.path, "rb") as file:
            for line in file:
                told = _STEP.match(line)
                # The last line is cut off where a run was killed.
                if not line.endswith(b"\n") or (told and int(told[1]) > step):
                    break
                kept += len(line)
        os.truncate(self.path, kept)

    def write(self, groups: Sequence[Group], step: int, leave_out: Sequence[str] = ()) -> None:
        """Adds the completions that a step begins with; what is not known of them is left out."""
        written = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes one for each row
        with open(self.path, "a", encoding="utf-8") as file:
            for group in groups:
                for row in group.rows(step):
                    for name in leave_out:
                        del row[name]
                    file.write(written(row) + "\n")
