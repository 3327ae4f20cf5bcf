"""Losses are the papers' formulas, a reference is what training begins with, a run resumes."""

import math
import random
from pathlib import Path

import pytest
import torch

from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.contradictions import contradictions_of
from lacuna.config.machine import CheckpointConfig
from lacuna.config.objectives import PreferenceConfig
from lacuna.objective.preference import Preference, odds_ratio_losses, preference_sums
from lacuna.objective.reference import reference_kind
from runs import curve, rows, train, weights, write_model, write_pairs
from tiny import tokenizer_of_words

LOGPROBS = torch.tensor([-3.0, -5.0, -2.0, -1.5])
COLUMNS = {
    "chosen": torch.tensor([1.0, 0.0, 1.0, 0.0]),
    "tokens": torch.tensor([2.0, 4.0, 1.0, 3.0]),
    "reference": torch.tensor([-4.0, -4.5, -1.0, -2.5]),
}
WORTH = [(1.0, -0.5), (-1.0, 1.0)]
MEANS = [(-1.5, -1.25), (-2.0, -0.5)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sums(columns: dict[str, torch.Tensor] | None = None, **settings: object) -> dict[str, float]:
    found = preference_sums(LOGPROBS, COLUMNS | (columns or {}), PreferenceConfig(**settings))
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"beta": 0.5}, sum(-math.log(sigmoid(0.5 * (c - r))) for c, r in WORTH)),
        (
            {"beta": 0.5, "label_smoothing": 0.2},
            sum(
                -0.8 * math.log(sigmoid(0.5 * (c - r))) - 0.2 * math.log(sigmoid(-0.5 * (c - r)))
                for c, r in WORTH
            ),
        ),
        ({"loss": "hinge", "beta": 0.5}, sum(max(0, 1 - 0.5 * (c - r)) for c, r in WORTH)),
        (
            {"loss": "ipo", "beta": 0.25},
            sum((c - r - 2) ** 2 for c, r in ((0.5, -0.125), (-1.0, 1 / 3))),
        ),
        (
            {"loss": "simpo", "beta": 2.0, "margin": 1.0},
            sum(-math.log(sigmoid(2 * (c - r) - 1)) for c, r in MEANS),
        ),
    ],
    ids=["dpo", "smoothed", "hinge", "ipo", "simpo"],
)
def test_losses_of_pairs_are_the_formulas(settings: dict, wanted: float) -> None:
    assert sums(**settings)["loss"] == pytest.approx(wanted, rel=1e-6)


def test_orpo_learns_the_chosen_text_and_the_odds() -> None:
    columns = {"prompt_logprobs": torch.tensor([-1.0, -9.0, -2.0, -9.0])}
    columns["pairs_per_token"] = torch.full((4,), 0.125)
    log_odds = [[m - math.log1p(-math.exp(m)) for m in pair] for pair in MEANS]
    wanted = (4 + 4) * 0.125 - 0.5 * sum(math.log(sigmoid(c - r)) for c, r in log_odds)
    assert sums(columns, loss="orpo", beta=0.5)["loss"] == pytest.approx(wanted, rel=1e-6)


def test_orpo_learns_nothing_more_from_an_answer_that_is_certain() -> None:
    chosen, rejected = torch.tensor([0.0, -1.0], requires_grad=True), torch.tensor([-1.0, 0.0])
    losses = odds_ratio_losses(chosen, rejected)
    losses.sum().backward()
    assert losses.isfinite().all() and chosen.grad.isfinite().all()
    assert losses[0] < 1e-6 and chosen.grad[1] < -0.9


def test_kto_leaves_out_what_its_divergence_is_made_of() -> None:
    columns = {"mismatched": torch.tensor([0.0, 1.0, 0.0, 1.0])}
    columns |= {"chosen": torch.tensor([1.0, 1.0, 0.0, 0.0]), "divergence": torch.full((4,), 0.3)}
    found = sums(columns, loss="kto", beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)
    wanted = 1.5 * (1 - sigmoid(0.5 * 0.7)) + 0.5 * (1 - sigmoid(0.5 * 1.3))
    assert found["loss"] == pytest.approx(wanted, rel=1e-6)
    assert (found["chosen"], found["reward_chosen"], found["reward_rejected"]) == (1, 0.5, -0.5)


def test_rewards_and_accuracy_are_told_per_pair() -> None:
    objective = Preference()
    objective.check(Config(preference=PreferenceConfig(beta=0.5)), tokenizer_of_words())
    row = objective.report(sums(beta=0.5), {"pairs": 2.0})
    assert (row["reward_chosen"], row["reward_rejected"]) == (0.0, 0.125)
    assert (row["reward_margin"], row["reward_accuracy"]) == (-0.125, 0.5)


def test_the_reference_is_what_training_begins_with(tmp_path: Path) -> None:
    def kind(reference: str = "auto", loss: str = "sigmoid", **sections: dict) -> str | None:
        return reference_kind(
            PreferenceConfig(loss=loss, reference=reference),
            LoraConfig(**sections.get("lora", {})),
            CheckpointConfig(**sections.get("checkpoint", {})),
            str(tmp_path),
        )

    assert kind() == "copy"
    assert kind(lora={"rank": 2}) == "base"
    assert kind(lora={"rank": 2, "modules": ("norm",)}) == "copy"
    assert kind(loss="orpo") is None
    with pytest.raises(UserError, match=r"lora.rank is 0"):
        kind("base")
    start = {"initial_load_path": "elsewhere/step-5"}
    for sections in ({}, {"lora": {"rank": 2}}):
        with pytest.raises(UserError, match=r"set it to cached"):
            kind(checkpoint=start, **sections)
    assert kind("cached", checkpoint=start) == "cached"
    (tmp_path / "checkpoint" / "step-0").mkdir(parents=True)
    with pytest.raises(UserError, match="step-0"):
        kind()


@pytest.mark.parametrize(
    ("sections", "other"),
    [
        ({"data": {"tokenization": "online"}}, "data.tokenization"),
        ({"data": {"streaming": True}}, "data.streaming"),
        (
            {
                "packing": {"long_examples": "drop"},
                "training": {"seq_len": 64},
                "curriculum": {"stages": ({"from_step": 2, "seq_len": 128},)},
            },
            "curriculum.stages",
        ),
    ],
)
def test_what_cannot_be_read_before_training_is_not_cached(sections: dict, other: str) -> None:
    def problems(reference: str) -> list[str]:
        config = Config(preference={"reference": reference}, **sections)
        return [one for one in contradictions_of(config) if other in one]

    assert not problems("auto")
    assert problems("cached")[0].startswith("preference.reference")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    return write_pairs(file, random.Random(0), 60)


def flags(pairs: Path, reference: str) -> list[object]:
    return [
        *("--job.task", "preference", "--preference.reference", reference),
        *("--data.dataset", pairs, "--training.seq_len", 256, "--training.batch_size", 2),
        *("--chat.template", "chatml", "--model.new_tokens", "<|im_start|>,<|im_end|>"),
        *("--lr_scheduler.decay_type", "constant"),
    ]


@pytest.mark.parametrize("reference", ["cached", pytest.param("copy", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_to_the_bit(
    reference: str, world: Path, pairs: Path, tmp_path: Path
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(world, straight, *flags(pairs, reference))
    train(world, resumed, *flags(pairs, reference), "--training.steps", 4)
    train(world, resumed, *flags(pairs, reference))
    rows = curve(straight, "loss", "reward_margin", "reward_accuracy")
    assert rows == curve(resumed, "loss", "reward_margin", "reward_accuracy")
    (_, loss, margin, _), *_, (_, _, last_margin, accuracy) = rows
    assert loss == pytest.approx(math.log(2), rel=1e-6) and margin == pytest.approx(0, abs=1e-6)
    assert last_margin > 0.1 and accuracy > 0.9
    assert weights(straight) == weights(resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference", "more"),
    [
        ("cached", ()),
        ("copy", ()),
        ("base", ("--lora.rank", 4, "--cpus", 2, "--parallelism.pipeline_parallel_degree", 2)),
    ],
)
def test_nothing_is_preferred_before_anything_is_learnt(
    reference: str, more: tuple[object, ...], world: Path, pairs: Path, tmp_path: Path
) -> None:
    """Compiled layers round in other places where no backward pass is to come."""
    compiled = ("--compile.enable", "true", "--training.mixed_precision_param", "bfloat16")
    held_out = ("--validation.dataset", pairs, "--validation.freq", 2)
    own = (*flags(pairs, reference), *more, *compiled, *held_out)
    train(world, tmp_path, *own, "--training.steps", 2)
    _, loss, margin = curve(tmp_path, "loss", "reward_margin")[0]
    assert loss == pytest.approx(math.log(2), abs=1e-7) and margin == 0
    before = rows(tmp_path)[0]
    assert before["val_loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert before["val_reward_margin"] == 0


@pytest.mark.slow
def test_a_resumed_run_is_measured_from_the_adapter_that_it_began_with(
    world: Path, pairs: Path, tmp_path: Path
) -> None:
    learning = [*flags(pairs, "copy"), "--lora.rank", 4, "--optimizer.lr", 0.02]
    train(world, tmp_path / "first", *learning)
    learning += ["--lora.adapter", tmp_path / "first" / "hf" / "adapter"]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(world, straight, *learning)
    train(world, resumed, *learning, "--training.steps", 4)
    train(world, resumed, *learning)
    rows = curve(straight, "loss", "reward_margin")
    assert rows[0][1] == pytest.approx(math.log(2), rel=1e-6)
    assert rows == curve(resumed, "loss", "reward_margin")
    assert weights(straight) == weights(resumed)


def test_a_run_that_began_without_a_cached_reference_gets_none(
    world: Path, pairs: Path, tmp_path: Path
) -> None:
    train(world, tmp_path / "run", *flags(pairs, "copy"), "--training.steps", 4)
    message = train(world, tmp_path / "run", *flags(pairs, "cached"), status=2)
    assert "this run began without one" in message


def test_a_run_of_another_task_is_not_gone_on_with(
    world: Path, pairs: Path, tmp_path: Path
) -> None:
    train(world, tmp_path / "run", "--training.steps", 1)
    message = train(world, tmp_path / "run", *flags(pairs, "copy"), status=2)
    assert "job.task (was 'pretrain', is 'preference')" in message


def test_dropout_is_no_part_of_what_is_compared(world: Path, pairs: Path, tmp_path: Path) -> None:
    own = [*flags(pairs, "base"), "--lora.rank", 4, "--training.steps", 3]
    train(world, tmp_path / "without", *own)
    model = write_model(tmp_path / "model", attention_dropout=0.5)
    said = train(world, tmp_path / "with", *own, "--model.config", model)
    assert "dropout of 0.5 is left out" in said
    found = curve(tmp_path / "without", "loss", "reward_margin")
    assert curve(tmp_path / "with", "loss", "reward_margin") == found


@pytest.mark.slow
def test_adapters_keep_the_dropout_that_is_asked_for(
    world: Path, pairs: Path, tmp_path: Path
) -> None:
    own = [*flags(pairs, "base"), "--lora.rank", 4, "--training.steps", 3]
    train(world, tmp_path / "without", *own)
    train(world, tmp_path / "asked", *own, "--lora.dropout", 0.5)
    found = [curve(tmp_path / name, "loss", "reward_margin") for name in ("without", "asked")]
    assert found[0] != found[1]
