"""Validation comes when it should, measures what it says, and can end a run."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reference import loss_of, rows_of, texts_of
from runs import curve, rows, steps, together, train

PROMPTS = ("the cat", "then a dog")


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Folder and output of a run that is validated, and of one that does not get better."""
    folder = tmp_path_factory.mktemp("validated")
    held_out = (
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
    )
    flags = {
        "validated": (
            "--validation.freq",
            3,
            "--validation.prompts",
            *PROMPTS,
            "--validation.temperature",
            0,
        ),
        "hopeless": ("--optimizer.lr", 0, "--validation.freq", 2, "--validation.patience", 2),
    }
    outputs = together(
        *(lambda name=name: train(world, folder / name, *held_out, *flags[name]) for name in flags)
    )
    again = train(world, folder / "hopeless", *held_out, *flags["hopeless"])
    return {
        "validated": (folder / "validated", outputs[0]),
        "hopeless": (folder / "hopeless", outputs[1]),
        "again": (folder / "hopeless", again),
    }


def validations(folder: Path) -> list[dict]:
    return [row for row in rows(folder) if "val_loss" in row]


def test_validation_is_before_the_first_step_at_every_interval_and_at_the_end(
    runs: dict[str, tuple[Path, str]],
) -> None:
    folder, _ = runs["validated"]
    assert [row["step"] for row in validations(folder)] == [0, 3, 6, 8]
    assert {frozenset(row) for row in validations(folder)} == {
        frozenset(("step", "val_loss", "val_bits_per_byte", "val_token_accuracy"))
    }
    losses = [row["val_loss"] for row in validations(folder)]
    assert losses == sorted(losses, reverse=True)


def test_the_last_loss_is_what_transformers_says_of_the_exported_model(
    runs: dict[str, tuple[Path, str]], world: Path
) -> None:
    folder, _ = runs["validated"]
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    texts = texts_of(world / "validation.jsonl")
    pieces = list(rows_of(texts, AutoTokenizer.from_pretrained(folder / "hf"), 32))
    with torch.no_grad():
        loss = loss_of(model, pieces).item()
        right = [
            torch.equal(likeliest, target)
            for tokens, targets in (piece for row in pieces for piece in row if piece[1])
            for likeliest, target in zip(
                model(torch.tensor([tokens])).logits[0].argmax(-1),
                torch.tensor(targets),
                strict=False,
            )
        ]
    last = validations(folder)[-1]
    assert last["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert last["val_token_accuracy"] == pytest.approx(sum(right) / len(right), abs=1e-9)
    text_bytes = sum(len(text) for text in texts)
    tokens = text_bytes + len(texts)
    assert last["val_bits_per_byte"] == pytest.approx(
        loss / math.log(2) * tokens / text_bytes, rel=1e-5
    )


def test_prompts_are_completed_at_each_validation_shown_and_kept(
    runs: dict[str, tuple[Path, str]],
) -> None:
    folder, output = runs["validated"]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in samples] == [
        (step, prompt) for step in (0, 3, 6, 8) for prompt in PROMPTS
    ]
    assert all(f"sample after step {step}" in output for step in (0, 3, 6, 8))
    model, tokenizer = (
        kind.from_pretrained(folder / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)[
        0, inputs.input_ids.shape[1] :
    ]
    assert samples[-2]["text"] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["tensor_parallel_degree", "context_parallel_degree"],
    ids=["tensor", "context"],
)
def test_ranks_that_share_sequences_sample_the_same(
    setting: str, runs: dict[str, tuple[Path, str]], world: Path, tmp_path: Path
) -> None:
    words = (
        "--validation.freq",
        3,
        "--validation.prompts",
        *PROMPTS,
        "--validation.temperature",
        0,
    )
    held_out = ("--validation.dataset", world / "validation.jsonl")
    layout = ("--cpus", 2, f"--parallelism.{setting}", 2)
    train(world, tmp_path, *held_out, *words, *layout)
    ours, theirs = (
        [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for folder in (tmp_path, runs["validated"][0])
    )
    assert len(ours) == 4 * len(PROMPTS) and ours == theirs
    [*_, last] = validations(tmp_path)
    [*_, wanted] = validations(runs["validated"][0])
    assert last["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-5)


def test_patience_ends_a_run_that_does_not_get_better_and_the_run_counts_as_finished(
    runs: dict[str, tuple[Path, str]],
) -> None:
    folder, output = runs["hopeless"]
    assert "stopping early: nothing better in 2 validations" in output
    assert [row["step"] for row in validations(folder)] == [0, 2, 4]
    assert [step for step, *_ in curve(folder)] == [1, 2, 3, 4]
    assert steps(folder) == [4]
    assert (folder / "hf" / "model.safetensors").exists()
    assert "Done: 4 steps" in output
    assert "is finished (step 4)" in runs["again"][1]


def test_held_out_data_without_a_token_to_train_is_refused(world: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"input_ids": [7]}\n' * 20)
    flags = ("--validation.dataset", held_out, "--validation.dataset_split", "train")
    said = train(world, tmp_path / "run", *flags, "--training.steps", 1, status=2)
    assert "validation.dataset: none of its tokens is one to be trained" in said
    assert "step 1" not in said
