"""A run does what a plain loop would, however it is cut into micro-batches and over ranks."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
)

from reference import rows_of, texts_of, train_plainly
from runs import METRICS, WORDS, checkpoint, curve, lacuna, rows, steps, together, train, weights

BATCH, LENGTH, STEPS = 4, 32, 8

LAYOUTS = {
    "batch 4": ("--training.batch_size", 4),
    "2 accumulated": ("--training.batch_size", 2, "--training.gradient_accumulation_steps", 2),
    "4 accumulated": ("--training.batch_size", 1, "--training.global_batch_size", 4),
    "two ranks": ("--cpus", 2, "--training.batch_size", 2),
    "two replicas": (
        "--cpus",
        2,
        "--training.batch_size",
        2,
        "--parallelism.data_parallel_replicate_degree",
        2,
    ),
    "zero stage 2": (
        "--cpus",
        2,
        "--training.batch_size",
        1,
        "--training.global_batch_size",
        4,
        "--parallelism.zero_stage",
        2,
    ),
}
FOUR_RANKS = (
    "--cpus",
    4,
    "--training.batch_size",
    1,
    "--parallelism.data_parallel_replicate_degree",
    2,
)


def write_uneven_documents(path: Path) -> Path:
    """Rows of 32 tokens of which half are trained (one-letter documents), and of which most are."""
    generator = random.Random(1)
    long = lambda: " ".join(generator.choices(WORDS, k=30))  # noqa: E731
    texts = [text for _ in range(40) for text in (*generator.choices("abcdefgh", k=33), long())]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


class Uneven(NamedTuple):
    """Weights to start from, documents of uneven lengths, and flags that train on them in order."""

    start: Path
    data: Path
    flags: tuple


@pytest.fixture(scope="module")
def uneven(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Uneven:
    folder = tmp_path_factory.mktemp("uneven")
    start, data = folder / "start", write_uneven_documents(folder / "uneven.jsonl")
    torch.manual_seed(0)
    LlamaForCausalLM(AutoConfig.from_pretrained(world / "model")).save_pretrained(start)
    AutoTokenizer.from_pretrained(world / "model").save_pretrained(start)
    flags = (
        "--model.config",
        "none",
        "--model.name_or_path",
        start,
        "--data.dataset",
        data,
        "--data.shuffle",
        "false",
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
    )
    return Uneven(start, data, flags)


@pytest.fixture(scope="module")
def layouts(world: Path, uneven: Uneven, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each layout."""
    folder = tmp_path_factory.mktemp("layouts")
    together(
        *(
            lambda name=name: train(world, folder / name, *uneven.flags, *LAYOUTS[name])
            for name in LAYOUTS
        )
    )
    return folder


def check_same(folder: Path, other: Path) -> None:
    keys = ("loss", "grad_norm", "lr", "tokens")
    assert len(curve(folder)) == STEPS
    for mine, its in zip(curve(folder, *keys), curve(other, *keys), strict=True):
        assert mine == pytest.approx(its, rel=1e-5)
    validated = [[row for row in rows(run) if "val_loss" in row] for run in (folder, other)]
    assert [row["step"] for row in validated[0]] == [0, STEPS]
    for mine, its in zip(*validated, strict=True):
        assert mine == pytest.approx(its, rel=1e-5)


@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_a_step_is_the_same_however_it_is_cut(name: str, layouts: Path) -> None:
    check_same(layouts / name, layouts / "batch 4")


@pytest.mark.slow
def test_a_step_is_the_same_on_two_replicas_of_two_shards(
    layouts: Path, world: Path, uneven: Uneven, tmp_path: Path
) -> None:
    train(world, tmp_path / "run", *uneven.flags, *FOUR_RANKS)
    check_same(tmp_path / "run", layouts / "batch 4")


def test_a_run_is_what_a_plain_loop_of_torch_and_transformers_does(
    layouts: Path, uneven: Uneven
) -> None:
    model = AutoModelForCausalLM.from_pretrained(uneven.start, dtype=torch.float32)
    packed = list(
        rows_of(texts_of(uneven.data), AutoTokenizer.from_pretrained(uneven.start), LENGTH)
    )
    batches = [packed[step * BATCH : (step + 1) * BATCH] for step in range(STEPS)]
    trained = [sum(len(targets) for _, targets in row) for row in packed]
    assert min(trained) == LENGTH / 2 and max(trained) == LENGTH, "not as uneven as it should be"
    rates = [1.5e-3, *(3e-3 * (1 - step / 8) for step in range(1, 8))]
    for done, (step, loss, norm, rate) in zip(
        train_plainly(model, batches, rates),
        curve(layouts / "batch 4", "loss", "grad_norm", "lr"),
        strict=True,
    ):
        assert rate == pytest.approx(rates[step - 1])
        assert (loss, norm) == pytest.approx(done, rel=1e-4)
    final = load_file(layouts / "batch 4" / "hf" / "model.safetensors")
    for name, weight in model.state_dict().items():
        # Adam divides a gradient near zero by its own size: its rounding moves the weight by a
        # share of the rate, 3e-3.
        torch.testing.assert_close(final[name], weight, rtol=1e-3, atol=5e-5)


@pytest.fixture(scope="module")
def plain(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run from scratch and its variations."""
    folder = tmp_path_factory.mktemp("plain")
    variations = {
        "one": (),
        "again": (),
        "other seed": ("--training.seed", 43, "--checkpoint.export_dtype", "none"),
        "bfloat16 compute": (
            "--training.mixed_precision_param",
            "bfloat16",
            "--checkpoint.export_dtype",
            "float16",
            "--profiling.enable_profiling",
            "--profiling.profile_freq",
            4,
        ),
        "bfloat16 weights": ("--training.dtype", "bfloat16"),
        "two epochs": (
            "--training.steps",
            "none",
            "--training.epochs",
            2,
            "--data.dataset",
            world / "validation.jsonl",
        ),
    }
    together(
        *(lambda name=name: train(world, folder / name, *variations[name]) for name in variations)
    )
    return folder


def test_rows_of_a_run_on_one_source_have_the_documented_keys_in_their_order(plain: Path) -> None:
    assert [list(row) for row in rows(plain / "one")] == [list(METRICS)] * STEPS


def test_the_same_command_gives_the_same_weights_to_the_bit_and_another_seed_others(
    plain: Path,
) -> None:
    assert curve(plain / "one") == curve(plain / "again")
    assert weights(plain / "one") == weights(plain / "again")
    assert curve(plain / "one")[0][1:] != curve(plain / "other seed")[0][1:]


@pytest.mark.parametrize("name", ["bfloat16 compute", "bfloat16 weights"])
def test_bfloat16_follows_float32_closely(name: str, plain: Path) -> None:
    losses = {run: [loss for _, loss, _ in curve(plain / run)] for run in ("one", name)}
    assert losses[name] == pytest.approx(losses["one"], rel=0.01)
    assert losses[name] != losses["one"]
    exact = all(
        torch.equal(weight, weight.bfloat16().float())
        for weight in load_file(plain / name / "hf" / "model.safetensors").values()
    )
    assert exact == (name == "bfloat16 weights")


def test_the_profiler_writes_a_trace_of_one_step_each_time(plain: Path) -> None:
    traces = sorted((plain / "bfloat16 compute" / "profile_trace").glob("*/*"))
    assert [str(trace.relative_to(trace.parent.parent)) for trace in traces] == [
        f"step-{step}/rank-0-trace.json" for step in (4, 8)
    ]
    for trace in traces:
        names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
        assert sum("AdamW" in name and "step" in name for name in names) == 1


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("one", torch.float32), ("bfloat16 compute", torch.float16), ("other seed", torch.bfloat16)],
)
def test_transformers_opens_the_final_model_with_tokenizer_and_generation_settings(
    name: str, dtype: torch.dtype, plain: Path
) -> None:
    folder = plain / name / "hf"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.config.use_cache
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id == 256
    inputs = tokenizer("the cat", return_tensors="pt")
    assert (
        model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1]
        > inputs.input_ids.shape[1]
    )


def test_a_finished_run_says_so_and_stays_as_it_is_until_it_is_made_longer(
    plain: Path, world: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain / "one", folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    output = train(world, folder)
    assert "is finished (step 8)" in output and "raise training.steps" in output
    output = train(world, folder, "--optimizer.lr", 0.5, "--metrics.log_freq", 7, status=2)
    assert (
        "finished, and was trained with other settings (was → is): optimizer.lr: 0.003 → 0.5."
        in (output)
    )
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    further = ("--job.dump_folder", folder, "--training.steps", 11)  # as the run itself advises
    assert "resuming after step 8" in lacuna("train", folder / "config.toml", *further)
    assert [step for step, *_ in curve(folder)] == list(range(1, 12))
    assert curve(folder)[:STEPS] == curve(plain / "one")
    assert steps(folder) == [4, 8, 11]
    assert weights(folder) != weights(plain / "one")
    assert json.loads((folder / "finished.json").read_text())["step"] == 11


def test_epochs_are_passes_over_all_tokens(plain: Path, world: Path) -> None:
    tokens = sum(len(text) + 1 for text in texts_of(world / "validation.jsonl"))
    last = math.ceil(2 * math.ceil(tokens / LENGTH) / BATCH)
    assert curve(plain / "two epochs", "tokens")[-1] == (last, 2 * tokens)
    assert checkpoint(plain / "two epochs", last).exists()


def test_a_finished_run_without_a_checkpoint_is_not_made_longer_from_nothing(
    world: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    without = ("--checkpoint.enable_checkpoint", "false")
    output = train(world, folder, "--training.steps", 2, *without)
    assert "train on" not in output and "your data" in output
    before = weights(folder)
    said = train(world, folder, "--training.steps", 3, *without, status=2)
    assert f"job.dump_folder: the run in {folder} is finished (step 2), and there is no" in said
    assert weights(folder) == before
    assert "is finished (step 2)" in train(world, folder, "--training.steps", 2, *without)
