"""A chat template that writes the date is told the day that the run began, also on later days."""

import json
import os
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from lacuna.cli import main
from lacuna.data import template
from runs import RUN, environment, weights, write_model

DATED = (
    "{{ strftime_now('%d %b %Y') + eos_token }}"
    "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model")
    (folder / "chat.jinja").write_text(DATED)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    lines = [
        json.dumps({"messages": talk[:1] + [talk[1] | {"content": f"Yes {n}"}]}) for n in range(40)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    text = RUN + '[job]\ntask = "sft"\n[chat]\ntemplate = "{world}/chat.jinja"\n'
    (folder / "run.toml").write_text(text.format(world=folder))
    return folder


def train_on(day: str, *words: object) -> None:
    """Runs `lacuna train` on a day; it may leave its logging and its groups of ranks behind."""
    os.environ.update(environment())
    template.today = lambda: day
    sys.exit(main(["train", *map(str, words)]))


def trained_on(day: str, world: Path, run: Path, *flags: object) -> bytes:
    """The final weights of a run that begins, or goes on, on a day."""
    words = (day, world / "run.toml", "--job.dump_folder", run, "--cpus", 1, *flags)
    process = get_context("fork").Process(target=train_on, args=words)
    process.start()
    process.join()
    assert process.exitcode == 0
    return weights(run)


@pytest.mark.slow
@pytest.mark.parametrize("tokenization", ["cache", "online"])
def test_a_run_that_goes_on_on_another_day_trains_on_the_same_texts(
    tokenization: str, world: Path, tmp_path: Path
) -> None:
    flags = ("--data.tokenization", tokenization, "--lr_scheduler.decay_type", "constant")
    steps = ("--training.steps", 4)
    straight = trained_on("2026-01-30", world, tmp_path / "straight", *flags, *steps)
    trained_on("2026-01-30", world, tmp_path / "stopped", *flags, "--training.steps", 2)
    resumed = trained_on("2027-12-08", world, tmp_path / "stopped", *flags, *steps)
    later = trained_on("2027-12-08", world, tmp_path / "later", *flags, *steps)
    assert resumed == straight != later
