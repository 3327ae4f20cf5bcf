"""What a run logs of its attention is what `lacuna inspect` sees in its checkpoint, and no more."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lacuna.config import load_config
from lacuna.data import build_validation, run_tokenizer
from lacuna.data.micro_batches import BatchSizes
from lacuna.formats.opening import load_any_model
from lacuna.rollout import inspection
from lacuna.rollout.inspection import inspect_model
from lacuna.train.looks import ROWS
from runs import curve, refused, rows, together, train, write_model
from tiny import random_model, tiny_config

KINDS = ("sdpa", "softpick", "scaled_softmax")
SHORT = ("--training.steps", 4, "--checkpoint.interval", 2)


def looking(world: Path, steps: int = 2) -> tuple[object, ...]:
    held_out = ("--validation.dataset", world / "validation.jsonl")
    return (*SHORT, *held_out, "--metrics.attention", steps)


def looks_of(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in rows(folder) if "attention_sparsity" in row}


def inspected(folder: Path, step: int) -> list[Any]:
    """What is seen in the checkpoint of a step, with the first held-out rows."""
    config = load_config(str(folder / "config.toml"), ())
    tokenizer = run_tokenizer(config.model, None)
    batches = build_validation(config, tokenizer, BatchSizes(4, 1, 4), 0)()
    columns = [batch.columns for batch in batches]
    read = [
        row[real]
        for one in columns
        for row, real in zip(one["input_ids"], one["real"], strict=True)
        if real.sum() > 1
    ]
    model, _ = load_any_model(str(folder / "checkpoint" / f"step-{step}"), "cpu")
    return inspect_model(model, read[:ROWS])


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_inspect_sees_in_the_checkpoint_of_the_step(
    kind: str, world: Path, tmp_path: Path
) -> None:
    train(world, tmp_path, "--model.attention", kind, *looking(world))
    told = looks_of(tmp_path)
    assert [*told] == [2, 4]
    for step, row in told.items():
        layers = inspected(tmp_path, step)
        for place, layer in enumerate(layers):
            near = pytest.approx(layer.first, rel=1e-4)
            assert row[f"attention_first_of_heads_{place}"] == near
            assert row[f"attention_sinks_0.3_{place}"] == layer.sinks[1]
            assert row[f"attention_sinks_0.2_{place}"] == layer.sinks[0]
            assert row[f"attention_sparsity_{place}"] == pytest.approx(layer.sparsity, abs=1e-3)
            assert row[f"hidden_kurtosis_{place}"] == pytest.approx(layer.kurtosis, rel=1e-4)
            assert row[f"hidden_largest_{place}"] == pytest.approx(layer.largest, rel=1e-4)
        assert row["hidden_largest"] == max(row["hidden_largest_0"], row["hidden_largest_1"])
        mean = (row["attention_sparsity_0"] + row["attention_sparsity_1"]) / 2
        assert row["attention_sparsity"] == pytest.approx(mean)
        assert (row["attention_sparsity"] > 0.1) == (kind == "softpick")
    assert told[2] != told[4]


def test_training_is_the_same_to_the_bit_with_it(world: Path, tmp_path: Path) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    slow = ("--activation_checkpoint.mode", "full", "--training.gradient_accumulation_steps", 2)
    held_out = (*SHORT, "--validation.dataset", world / "validation.jsonl", *slow)
    said = together(
        lambda: train(world, plain, *held_out),
        lambda: train(world, watched, *held_out, "--metrics.attention", 1),
    )[1]
    assert curve(watched) == curve(plain)
    assert [*looks_of(watched)] == [1, 2, 3, 4]
    assert "kurtosis" in said
    assert looks_of(plain) == {}


@pytest.mark.slow
def test_ranks_share_the_rows_and_find_the_same(world: Path, tmp_path: Path) -> None:
    alone, sharded, many = (tmp_path / name for name in ("alone", "sharded", "many"))
    own = ("--model.attention", "softpick", *looking(world))
    two = ("--cpus", 2, "--training.batch_size", 2)
    three = ("--cpus", 3, "--training.batch_size", 4, "--training.global_batch_size", 12)
    train(world, alone, *own)
    together(lambda: train(world, sharded, *own, *two), lambda: train(world, many, *own, *three))
    for folder, step in ((sharded, 2), (sharded, 4)):
        for name, number in looks_of(alone)[step].items():
            assert looks_of(folder)[step][name] == pytest.approx(number, rel=1e-3, abs=1e-4), name
    # Another batch trains otherwise, but it reads the same rows.
    layers = inspected(many, 2)
    row = looks_of(many)[2]
    for place, layer in enumerate(layers):
        assert row[f"attention_first_of_heads_{place}"] == pytest.approx(layer.first, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "validation.dataset"),
        (("--parallelism.tensor_parallel_degree", 2), "parallelism.tensor_parallel_degree"),
        (("--parallelism.context_parallel_degree", 2), "parallelism.context_parallel_degree"),
        (("--parallelism.pipeline_parallel_degree", 2), "parallelism.pipeline_parallel_degree"),
        (("--job.task", "reward"), "job.task"),
        (("--job.task", "grpo"), "job.task"),
    ],
)
def test_where_it_cannot_be_seen_it_is_refused(
    words: tuple[object, ...], named: str, world: Path
) -> None:
    held_out = ("--validation.dataset", world / "validation.jsonl") if words else ()
    said = refused("train", world / "run.toml", "--metrics.attention", 2, *held_out, *words)
    assert f"metrics.attention, {named}: " in said


@pytest.mark.parametrize("kind", ["mamba", "falcon"])
def test_a_model_that_shows_all_or_nothing_is_refused_before_it_runs(
    kind: str, world: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    tokens = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    tiny_config(kind, **tokens).save_pretrained(folder)
    words = ("--model.config", folder, "--data.document_mask", "false")
    told = ("train", world / "run.toml", *words, *looking(world))
    said = refused(*told, "--job.dump_folder", tmp_path / "run", "--dry-run")
    assert "metrics.attention: " in said and "does not show the attention of one layer" in said


def test_heads_in_one_layer_do_not_wait_for_those_in_others() -> None:
    """Weights of attention are as large as the square of the text: no two are there at once."""
    alive: list[int] = []
    before = inspection._of_weights

    def watch(weights: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))
        references.append(weakref.ref(weights))
        return before(weights)

    references: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "_of_weights", watch)
        inspection.inspect_model(random_model(tiny_config("llama"), "eager"), [torch.arange(12)])
    assert alive == [0, 0]
