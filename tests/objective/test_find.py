"""The loop uses an objective's columns, counts and report, and its state on a resume."""

from pathlib import Path

import pytest

from lacuna.config.task import PARTS, TASKS
from lacuna.objective.find import Objective, find_objective
from runs import curve, lacuna, train

OWN = '''
from dataclasses import replace

import torch

from lacuna.model.loss import TokenLoss
from lacuna.objective.language_modelling import LanguageModelling, cross_entropy


def weighted(logits, columns):
    """Every other token counts twice, as a column of this objective's own says."""
    labels = columns["labels"]
    nats = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    return {"loss": (nats * columns["weight"]).sum()}


class Weighted(LanguageModelling):
    denominator = "weight"
    loss = TokenLoss(weighted)
    steps = 0

    def annotate(self, policy, batches, loss):
        self.steps += 1
        return [self.with_weights(batch) for batch in batches]

    def with_weights(self, batch):
        labels = batch.columns["labels"]
        weight = 1.0 + torch.arange(labels.numel()).view_as(labels) % 2
        total = (weight * (labels != -100)).sum().item()
        columns = batch.columns | {"weight": weight}
        return replace(batch, columns=columns, counts=batch.counts | {"weight": total})

    def report(self, sums, counts):
        return {"loss": sums["loss"] / counts["weight"], "steps_seen": self.steps}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
'''


def test_columns_counts_report_and_state_are_the_objectives_own(
    world: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    flags = ("--job.task", "own:Weighted", "--lr_scheduler.decay_type", "constant")
    straight, resumed, halves = (tmp_path / name for name in ("straight", "resumed", "halves"))
    train(world, straight, *flags, cwd=tmp_path)
    train(world, resumed, *flags, "--training.steps", 4, cwd=tmp_path)
    train(world, resumed, *flags, cwd=tmp_path)
    train(
        world, halves, *flags, "--cpus", 2, "--parallelism.context_parallel_degree", 2, cwd=tmp_path
    )
    assert [seen for _, _, seen in curve(straight, "loss", "steps_seen")] == list(range(1, 9))
    assert curve(resumed, "loss", "steps_seen") == curve(straight, "loss", "steps_seen")
    for (step, ours), (_, theirs) in zip(
        curve(halves, "loss"), curve(straight, "loss"), strict=True
    ):
        assert abs(ours / theirs - 1) < 1e-5, step


def test_a_denominator_that_is_no_count_is_named_with_those_that_are(
    world: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN.replace('denominator = "weight"', 'denominator = "wait"'))
    flags = ("--job.task", "own:Weighted", "--job.dump_folder", tmp_path / "run")
    told = lacuna("train", world / "run.toml", *flags, cwd=tmp_path, status=2)
    said = " ".join(told.split())
    assert "own:Weighted divides the loss by 'wait'" in said and "trained_tokens" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("task", TASKS)
def test_a_task_of_ours_trains_on_what_the_settings_take_it_to(task: str) -> None:
    assert find_objective(task).trains_on == TASKS[task]


def test_distillation_on_prompts_has_an_objective_of_its_own() -> None:
    assert find_objective("distill", "prompts").trains_on == "prompts"
    assert find_objective("distill", "conversations").trains_on == "texts"


def test_the_settings_ask_for_all_that_the_loop_does() -> None:
    methods = {name for name in vars(Objective) if not name.startswith("_")}
    assert methods | Objective.__annotations__.keys() == {*PARTS}
