"""A step whose gradients are not finite is skipped and counted, or ends the run."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from reference import texts_of
from runs import curve, rows, steps, together, train, weights

pytestmark = pytest.mark.slow  # whole runs of the command line

POISON = "~"
STEPS = 30
KEYS = ("loss", "grad_norm", "lr", "tokens", "skipped_steps")


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What runs from a model to which the input "~" is not a number printed, by their folders.

    One document in seven holds it ("rare"), or all of them do ("common").
    """
    folder = tmp_path_factory.mktemp("poisoned")
    torch.manual_seed(0)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(world / "model"))
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer(POISON).input_ids] = math.nan
    model.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    texts = texts_of(world / "train.jsonl")
    for name, every in (("rare", 7), ("common", 1)):
        marked = [text + POISON * (number % every == 0) for number, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in marked)
        )

    def run(name: str, data: str, *flags: object, status: int = 0) -> str:
        return train(
            world,
            folder / name,
            "--model.config",
            "none",
            "--model.name_or_path",
            folder / "start",
            "--data.dataset",
            folder / f"{data}.jsonl",
            "--training.steps",
            STEPS,
            "--checkpoint.interval",
            1,
            *flags,
            status=status,
        )

    skip = "--training.skip_nan_inf"
    stopped, *others = together(
        lambda: run("stopped", "rare", status=1),
        lambda: run("skipping", "rare", skip),
        lambda: run(
            "two ranks",
            "rare",
            skip,
            "--cpus",
            2,
            "--training.batch_size",
            2,
            "--optimizer.implementation",
            "foreach",
        ),
        lambda: run(
            "diverged",
            "common",
            skip,
            "--training.max_skipped_steps",
            3,
            "--cpus",
            2,
            "--training.batch_size",
            32,
            status=1,
        ),
    )
    shutil.copytree(folder / "stopped", folder / "continued")
    others.append(run("continued", "rare", skip))
    names = ("stopped", "skipping", "two ranks", "diverged", "continued")
    return {
        str(folder / name): output for name, output in zip(names, (stopped, *others), strict=True)
    }


def folder_of(runs: dict[str, str], name: str) -> Path:
    return next(Path(folder) for folder in runs if Path(folder).name == name)


def output_of(runs: dict[str, str], name: str) -> str:
    return runs[str(folder_of(runs, name))]


@pytest.mark.parametrize("name", ["skipping", "two ranks"])
def test_steps_without_finite_gradients_are_skipped_and_counted(
    name: str, runs: dict[str, str]
) -> None:
    count = 0
    for _, loss, norm, skipped in curve(
        folder_of(runs, name), "loss", "grad_norm", "skipped_steps"
    ):
        assert (loss is None) == (norm is None)
        count += loss is None
        assert skipped == count
    assert 2 <= count < STEPS / 2


@pytest.mark.parametrize("name", ["skipping", "two ranks", "continued"])
def test_weights_stay_finite_but_for_what_was_not_from_the_start(
    name: str, runs: dict[str, str]
) -> None:
    final = load_file(folder_of(runs, name) / "hf" / "model.safetensors")
    bad = {key: int((~weight.isfinite()).sum()) for key, weight in final.items()}
    assert {key: count for key, count in bad.items() if count} == {"model.embed_tokens.weight": 64}


def test_all_ranks_skip_the_step_of_which_one_has_bad_gradients(runs: dict[str, str]) -> None:
    one, two = (
        [
            tuple(math.nan if value is None else value for value in row)
            for row in curve(folder_of(runs, name), *KEYS)
        ]
        for name in ("skipping", "two ranks")
    )
    assert len(one) == len(two) == STEPS
    for alone, shared in zip(one, two, strict=True):
        assert shared == pytest.approx(alone, rel=1e-5, nan_ok=True)


def test_without_skipping_the_run_stops_with_a_message_and_keeps_the_last_good_checkpoint(
    runs: dict[str, str],
) -> None:
    folder, output = folder_of(runs, "stopped"), output_of(runs, "stopped")
    assert "lacuna: the gradient norm is not finite (by step" in output
    assert "training.skip_nan_inf = true" in output
    assert "Traceback" not in output
    first_bad = next(step for step, loss, _ in curve(folder_of(runs, "skipping")) if loss is None)
    assert f"by step {first_bad}" in output
    assert steps(folder) == list(range(1, first_bad))
    assert rows(folder)[-1]["step"] == first_bad - 1
    assert not (folder / "hf").exists()


def test_weights_that_are_no_numbers_from_the_start_are_told_where_no_checkpoint_is(
    world: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM(AutoConfig.from_pretrained(world / "model"))
    with torch.no_grad():
        model.lm_head.weight[0] = math.nan
    model.save_pretrained(tmp_path / "start")
    AutoTokenizer.from_pretrained(world / "model").save_pretrained(tmp_path / "start")
    flags = ("--model.config", "none", "--model.name_or_path", tmp_path / "start")
    output = train(world, tmp_path / "run", *flags, "--training.steps", 2, status=1)
    assert (
        "the gradient norm is not finite (by step 1); there is no checkpoint from before" in output
    )
    assert "the weights that the run began with may not be finite themselves" in output


def test_from_there_it_goes_on_with_skipping_as_if_it_always_had(runs: dict[str, str]) -> None:
    continued, skipping = folder_of(runs, "continued"), folder_of(runs, "skipping")
    assert curve(continued, *KEYS) == curve(skipping, *KEYS)
    assert weights(continued) == weights(skipping)


def test_too_many_skipped_steps_in_a_row_end_the_run(runs: dict[str, str]) -> None:
    output = output_of(runs, "diverged")
    message = "lacuna: 3 steps in a row were skipped because their gradients are not finite"
    assert output.count(message) == 1
    assert "Traceback" not in output
    assert [row["skipped_steps"] for row in rows(folder_of(runs, "diverged"))] == [1, 2]
