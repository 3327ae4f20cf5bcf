"""Tasks other than pretraining train in every layout as in one process: steps beside its own.

The layouts and tasks are those of the table of parity, and the losses that it leaves out. Tasks are
tried in the same processes, which begin slowly.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.data.teacher import DESCRIPTION, FORMAT
from layouts import Case
from parity import (
    ADAPTERS,
    EXACT,
    TASK_ARCHITECTURES,
    TASK_CASES,
    tasks_by_rewards,
    tasks_taught_by,
    write_models,
)
from tasks import STEPS, Losses, Task, Trained, four_layers, results_of
from tiny import tiny_config

SHARED = {"cp 2 × tp 2": TASK_CASES["cp 2 × tp 2"]}
STAGED = {"pp 2, InterleavedZeroBubble": TASK_CASES["pp 2, InterleavedZeroBubble"]}
"""The layouts of losses that the table of parity leaves out: each is computed on parts of sequences
and of the vocabulary, and every second one on a pipeline's last stage, which is told the same."""

OF_WHOLE_MODELS = {name: case for name, case in TASK_CASES.items() if case.layout.pp == 1}
OTHER_ARCHITECTURES = [name for name in TASK_ARCHITECTURES if name != "llama"]

TasksOf = Callable[[Path], dict[str, Task]]
"""Tells the tasks by their names, given the folder of a teacher."""
Models = dict[bool, tuple[Path, Path]]
"""A model and its teacher, by whether they have enough layers for pipelines."""


@pytest.fixture(scope="module", params=TASK_ARCHITECTURES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp(request.param)
    return {
        False: write_models(request.param, folder / "two", tiny_config),
        True: write_models(request.param, folder / "four", four_layers),
    }


def preference(loss: str, reference: str = "auto", **changes: object) -> Task:
    settings = PreferenceConfig(loss=loss, reference=reference, beta=0.5)
    return Task("preference", preference=settings, changes=changes)


def parts_of(
    tasks: dict[str, Task], whole: str, cases: dict[str, Case]
) -> dict[str, dict[str, Case]]:
    """The layouts of each task: one task has all, the others every third one, in turn."""
    others = [name for name in tasks if name != whole]
    parts = {name: dict([*cases.items()][at % 3 :: 3]) for at, name in enumerate(others)}
    return parts | {whole: cases}


IN_TABLE = parts_of(tasks_taught_by(Path()), "DPO", TASK_CASES)
BY_REWARDS = parts_of(tasks_by_rewards(), "GRPO", OF_WHOLE_MODELS)


def check(models: Models, tasks_of: TasksOf, parts: dict[str, dict[str, Case]]) -> None:
    """Fails where a layout comes to other losses or gradients than one process."""
    trained: dict[tuple[str, str, bool], Trained] = {}
    for depth, (model, teacher) in models.items():
        tasks = tasks_of(teacher)
        for name, cases in parts.items():
            of_depth = {one: case for one, case in cases.items() if (case.layout.pp > 1) == depth}
            for layout, case in {"alone": Case(), **of_depth}.items() if of_depth else ():
                trained[name, layout, depth] = model, case, tasks[name]
    found = dict(zip(trained, results_of([*trained.values()]), strict=True))
    wrong = []
    for (name, layout, depth), losses in found.items():
        try:
            compare(losses, found[name, "alone", depth], f"{name}, {layout}")
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)


def compare(other: Losses | str, alone: Losses | str, name: str) -> None:
    assert isinstance(alone, list), (name, alone)
    assert len({loss for loss, _ in alone}) == STEPS, f"{name}: nothing is learnt"
    assert isinstance(other, list), (name, other)
    # A loss by rewards is what is left of good and bad completions, which may be near 0.
    rounding = EXACT * max(abs(loss) for loss, _ in alone)
    for (loss, norm), (own_loss, own_norm) in zip(other, alone, strict=True):
        assert loss == pytest.approx(own_loss, rel=EXACT, abs=rounding), name
        assert norm == pytest.approx(own_norm, rel=EXACT), name


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
def test_tasks_train_the_same_in_every_layout(models: Models) -> None:
    check(models, tasks_taught_by, IN_TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
def test_completions_are_learnt_the_same_in_every_layout(models: Models) -> None:
    check(models, lambda _: tasks_by_rewards(), BY_REWARDS)


@pytest.mark.slow
@pytest.mark.parametrize("models", OTHER_ARCHITECTURES, indirect=True)
def test_tasks_train_the_same_in_every_layout_of_other_models(models: Models) -> None:
    by_rewards = dict([*OF_WHOLE_MODELS.items()][1::2])
    others = {name: case for name, case in TASK_CASES.items() if name not in by_rewards}
    parts = {"DPO": others, "GSPO": by_rewards}
    check(models, lambda teacher: tasks_taught_by(teacher) | tasks_by_rewards(), parts)


def other_tasks(teacher: Path, said: Path) -> dict[str, Task]:
    """Losses that the table of parity leaves out, and what a teacher said instead of a teacher."""
    tasks = {
        "dpo, cached": preference("sigmoid", "cached"),
        "orpo": preference("orpo"),
        "simpo": preference("simpo"),
        "kto": preference("kto"),
        "kto, adapters": preference("kto", **ADAPTERS),
    }
    for divergence in ("reverse_kl", "jsd"):
        own = DistillationConfig(teacher=str(teacher), divergence=divergence, alpha=0.7)
        tasks[divergence] = Task("distill", distillation=own)
    for divergence in ("forward_kl", "jsd"):
        own = DistillationConfig(teacher_logprobs=str(said), divergence=divergence, alpha=0.7)
        tasks[f"{divergence}, said"] = Task("distill", distillation=own)
    return tasks


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
def test_other_losses_are_learnt_the_same(models: Models, tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text(json.dumps({"format": FORMAT, "teacher": "", "files": {}}))
    names = other_tasks(Path(), Path())
    parts = {name: SHARED | (STAGED if at % 2 else {}) for at, name in enumerate(names)}
    check(models, lambda teacher: other_tasks(teacher, tmp_path), parts)
