"""Preference and distillation train the same in every layout: three steps beside those of one process."""

from pathlib import Path

import pytest

from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.sections import LoraConfig
from lacuna.parallel.mesh import Layout
from layouts import Case, pipelined
from tasks import Task, steps_of
from tiny import random_model, tiny_config, tokenizer_of_words

ADAPTERS = {"lora": LoraConfig(rank=2, alpha=4.0)}
LAYOUTS = {
    "accumulation": Case(Layout(), 4),
    "dp_shard": Case(Layout(dp_shard=2), 2),
    "tp": Case(Layout(tp=2), 2),
    "tp, whole loss": Case(Layout(tp=2), 2, parallelism={"disable_loss_parallel": True}),
    "cp": Case(Layout(cp=2), 2),
    "pp": pipelined(Layout(pp=2), 4),
    "pp, zero bubble": pipelined(Layout(pp=2), 4, "InterleavedZeroBubble"),
    "cp x tp": Case(Layout(cp=2, tp=2), 2),
    "cp x pp": pipelined(Layout(cp=2, pp=2), 4),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), 1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("teacher"), 2, num_hidden_layers=4, hidden_size=64)


def saved(folder: Path, seed: int, **changes: int) -> Path:
    random_model(tiny_config("llama", **changes), seed=seed).save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    return folder


def preference(loss: str, reference: str = "auto", **changes: object) -> Task:
    settings = PreferenceConfig(loss=loss, reference=reference, beta=0.5)
    return Task("preference", preference=settings, changes=changes)


def check(model: Path, task: Task) -> None:
    cases = [(case, task) for case in (Case(Layout()), *LAYOUTS.values())]
    alone, *others = steps_of(model, cases)
    assert isinstance(alone, list), alone
    assert len({loss for loss, _ in alone}) == 3, "nothing is learnt"
    for name, other in zip(LAYOUTS, others, strict=True):
        assert isinstance(other, list), (name, other)
        for (loss, norm), (own_loss, own_norm) in zip(other, alone, strict=True):
            assert loss == pytest.approx(own_loss, rel=2e-6), name
            assert norm == pytest.approx(own_norm, rel=2e-6), name


PREFERENCES = {
    "dpo": preference("sigmoid"),
    "dpo, cached": preference("sigmoid", "cached"),
    "dpo, adapters": preference("sigmoid", **ADAPTERS),
    "ipo": preference("ipo"),
    "hinge": preference("hinge"),
    "orpo": preference("orpo"),
    "simpo": preference("simpo"),
    "kto": preference("kto"),
    "kto, adapters": preference("kto", **ADAPTERS),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in PREFERENCES if name != "dpo"]


@pytest.mark.parametrize("name", ["dpo", *SLOW])
def test_preferences_are_learnt_the_same_in_every_layout(name: str, model: Path) -> None:
    check(model, PREFERENCES[name])


@pytest.mark.parametrize(
    "divergence",
    ["forward_kl", *(pytest.param(n, marks=pytest.mark.slow) for n in ("reverse_kl", "jsd"))],
)
def test_a_teacher_teaches_the_same_in_every_layout(
    divergence: str, model: Path, teacher: Path
) -> None:
    settings = DistillationConfig(teacher=str(teacher), divergence=divergence, alpha=0.7)
    check(model, Task("distill", distillation=settings))
