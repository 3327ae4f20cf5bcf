"""Tasks other than pretraining train in every layout as in one process: steps beside its own.

The layouts and tasks are those of the table of parity, and the losses that it leaves out.
"""

import json
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
from tasks import STEPS, Task, steps_of

SOME_CASES = {
    layout: TASK_CASES[layout]
    for layout in (
        "accumulation 4",
        "dp_shard 2, ZeRO-3",
        "cp 2, all-gather",
        "pp 2, InterleavedZeroBubble",
        "cp 2 × tp 2",
    )
}
"""The layouts of tests that are not slow."""
FEW_CASES = {
    layout: TASK_CASES[layout] for layout in ("pp 2, InterleavedZeroBubble", "cp 2 × tp 2")
}
"""The layouts of losses that the table of parity leaves out."""

OF_WHOLE_MODELS = {name: case for name, case in TASK_CASES.items() if case.layout.pp == 1}
OTHER_ARCHITECTURES = [name for name in TASK_ARCHITECTURES if name != "llama"]


@pytest.fixture(scope="module", params=TASK_ARCHITECTURES)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model and its teacher."""
    return write_models(request.param, tmp_path_factory.mktemp(request.param))


def preference(loss: str, reference: str = "auto", **changes: object) -> Task:
    settings = PreferenceConfig(loss=loss, reference=reference, beta=0.5)
    return Task("preference", preference=settings, changes=changes)


def parts_of(
    tasks: dict[str, Task], whole: str, cases: dict[str, Case]
) -> dict[str, dict[str, Case]]:
    """The layouts of each task: one task has all, the others every second one, in turn."""
    others = [name for name in tasks if name != whole]
    parts = {name: dict([*cases.items()][at % 2 :: 2]) for at, name in enumerate(others)}
    return parts | {whole: cases}


IN_TABLE = parts_of(tasks_taught_by(Path()), "DPO", TASK_CASES)
BY_REWARDS = parts_of(tasks_by_rewards(), "GRPO", OF_WHOLE_MODELS)


def check(model: Path, task: Task, cases: dict[str, Case]) -> None:
    """Fails where a layout comes to other losses or gradients than one process."""
    alone, *others = steps_of(model, [(case, task) for case in (Case(), *cases.values())])
    assert isinstance(alone, list), alone
    assert len({loss for loss, _ in alone}) == STEPS, "nothing is learnt"
    # A loss by rewards is what is left of good and bad completions, which may be near 0.
    rounding = EXACT * max(abs(loss) for loss, _ in alone)
    for name, other in zip(cases, others, strict=True):
        assert isinstance(other, list), (name, other)
        for (loss, norm), (own_loss, own_norm) in zip(other, alone, strict=True):
            assert loss == pytest.approx(own_loss, rel=EXACT, abs=rounding), name
            assert norm == pytest.approx(own_norm, rel=EXACT), name


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
def test_pairs_train_the_same_in_some_layouts(models: tuple[Path, Path]) -> None:
    model, teacher = models
    check(model, tasks_taught_by(teacher)["DPO"], SOME_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
@pytest.mark.parametrize("name", IN_TABLE)
def test_tasks_train_the_same_in_every_layout(name: str, models: tuple[Path, Path]) -> None:
    model, teacher = models
    check(model, tasks_taught_by(teacher)[name], IN_TABLE[name])


@pytest.mark.slow
@pytest.mark.parametrize("models", OTHER_ARCHITECTURES, indirect=True)
def test_pairs_train_the_same_in_every_layout_of_other_models(models: tuple[Path, Path]) -> None:
    model, teacher = models
    check(model, tasks_taught_by(teacher)["DPO"], TASK_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
@pytest.mark.parametrize("name", BY_REWARDS)
def test_completions_are_learnt_the_same_in_every_layout(
    name: str, models: tuple[Path, Path]
) -> None:
    check(models[0], tasks_by_rewards()[name], BY_REWARDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("models", OTHER_ARCHITECTURES, indirect=True)
def test_completions_are_learnt_the_same_in_every_layout_of_other_models(
    models: tuple[Path, Path],
) -> None:
    check(models[0], tasks_by_rewards()["GSPO"], BY_REWARDS["GSPO"])


OTHER_PREFERENCES = {
    "dpo, cached": preference("sigmoid", "cached"),
    "orpo": preference("orpo"),
    "simpo": preference("simpo"),
    "kto": preference("kto"),
    "kto, adapters": preference("kto", **ADAPTERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
@pytest.mark.parametrize("name", OTHER_PREFERENCES)
def test_other_preferences_are_learnt_the_same(name: str, models: tuple[Path, Path]) -> None:
    check(models[0], OTHER_PREFERENCES[name], FEW_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_a_teacher_teaches_the_same(divergence: str, models: tuple[Path, Path]) -> None:
    model, teacher = models
    settings = DistillationConfig(teacher=str(teacher), divergence=divergence, alpha=0.7)
    check(model, Task("distill", distillation=settings), FEW_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("models", ["llama"], indirect=True)
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_what_a_teacher_said_teaches_the_same(
    divergence: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / DESCRIPTION).write_text(json.dumps({"format": FORMAT, "teacher": "", "files": {}}))
    settings = DistillationConfig(teacher_logprobs=str(tmp_path), divergence=divergence, alpha=0.7)
    check(models[0], Task("distill", distillation=settings), FEW_CASES)
