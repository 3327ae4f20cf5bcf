"""Stages and rankings change what is trained when they should; a run goes on in them exactly."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from lacuna.config import load_config
from lacuna.config.documents import CurriculumConfig
from lacuna.data import BatchSizes, build_loader
from reference import texts_of
from runs import curve, rows, together, train, weights

pytestmark = pytest.mark.slow  # whole runs of the command line

STAGES = """
[[curriculum.stages]]
from_step = 2
data_probs = [0, 1]
seq_len = 64
batch_size = 2
[[curriculum.stages]]
from_step = 5
global_batch_size = 8
[[curriculum.stages]]
from_loss = 100
data_probs = [1, 1]
seq_len = 16
"""

CONSTANT = ("--lr_scheduler.decay_type", "constant")
HALVED = ("--cpus", 2, "--training.batch_size", 2)

LAYOUTS = {
    "single": (),
    "data": HALVED,
    "tensor": ("--cpus", 2, "--parallelism.tensor_parallel_degree", 2),
    "pipeline": ("--cpus", 2, "--parallelism.pipeline_parallel_degree", 2),
}


@pytest.fixture(scope="module")
def staged(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four stages, the last from the validation after step 6 on, on one rank and on two."""
    folder = tmp_path_factory.mktemp("staged")
    both = f'["{world}/train.jsonl", "{world}/validation.jsonl"]\ndata_probs = [1, 0]'
    text = (world / "run.toml").read_text().replace(f'"{world}/train.jsonl"', both)
    text += (
        f'[validation]\ndataset = "{world}/validation.jsonl"\ndataset_split = "train"\nfreq = 6\n'
    )
    (folder / "run.toml").write_text(text.replace("interval = 4", "interval = 1") + STAGES)
    together(
        *(
            lambda name=name: train(folder, folder / name, *CONSTANT, *LAYOUTS[name])
            for name in LAYOUTS
        )
    )
    return folder


def trained(folder: Path) -> list[dict]:
    return [row for row in rows(folder) if "loss" in row]


def test_a_stage_changes_length_batch_and_sources_when_it_is_due(staged: Path) -> None:
    steps = trained(staged / "single")
    assert (
        np.diff([0, *(row["tokens"] for row in steps)]).tolist()
        == [128] * 2 + [256] * 3 + [512] + [128] * 2
    )
    first = [
        row[next(key for key in row if key.startswith("share_0"))] * row["tokens"] for row in steps
    ]
    assert first[1] == first[5] == pytest.approx(256) and 256 < first[7] < 512


@pytest.mark.parametrize("layout", ["data", "tensor", "pipeline"])
def test_every_layout_goes_through_the_same_stages(staged: Path, layout: str) -> None:
    for left, right in zip(trained(staged / "single"), trained(staged / layout), strict=True):
        assert left["tokens"] == right["tokens"] and left["loss"] == pytest.approx(
            right["loss"], rel=1e-5
        )


def test_a_run_that_is_made_longer_goes_through_what_is_then_due(staged: Path) -> None:
    train(staged, staged / "longer", *CONSTANT, "--training.steps", 5)
    train(staged, staged / "longer", *CONSTANT)
    assert curve(staged / "longer") == curve(staged / "single")


def goes_on(straight: Path, folder: Path, world: Path, step: int, *flags: object) -> None:
    """A copy of a finished run, set back to `step`, goes on to the same weights."""
    shutil.copytree(straight, folder)
    for made in ("hf", "finished.json"):
        shutil.rmtree(folder / made, ignore_errors=True)
    (folder / "finished.json").unlink(missing_ok=True)
    train(world, folder, "--checkpoint.load_step", step, *flags)
    assert curve(folder) == curve(straight) and weights(folder) == weights(straight)


def test_a_run_goes_on_within_any_stage_exactly(staged: Path) -> None:
    steps = (1, 2, 4, 6)
    together(
        *(
            lambda s=s: goes_on(staged / "single", staged / str(s), staged, s, *CONSTANT)
            for s in steps
        )
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("global_batch_size = 6", "training.global_batch_size: 6 is no multiple"),
        ("seq_len = 999", "999 is more than the"),
    ],
)
def test_what_is_wrong_with_a_stage_is_said_of_its_table(
    world: Path, tmp_path: Path, wrong: str, said: str
) -> None:
    stage = "[[curriculum.stages]]"
    tables = f"{stage}\nfrom_step = 2\nseq_len = 16\n{stage}\nfrom_step = 4\n{wrong}\n"
    (tmp_path / "run.toml").write_text((world / "run.toml").read_text() + tables)
    printed = train(tmp_path, tmp_path / "run", status=2)
    assert (
        "curriculum.stages, table 2: " in printed
        and said in printed
        and "change it in that table" in printed
    )


RANKED = ("--curriculum.rank_every", 3)


@pytest.fixture(scope="module")
def still(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on all layouts that rank twice and learn nothing."""
    folder = tmp_path_factory.mktemp("still")
    flags = (*RANKED, "--optimizer.lr", 0, "--training.steps", 6)
    together(
        *(lambda name=name: train(world, folder / name, *flags, *LAYOUTS[name]) for name in LAYOUTS)
    )
    return folder


def ranking(run: Path, step: int) -> dict[str, np.ndarray]:
    with np.load(run / "curriculum" / f"step-{step}.npz") as file:
        return dict(file)


def test_documents_are_ranked_by_the_models_own_loss_on_every_layout(
    world: Path, still: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(still / "single" / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(still / "single" / "hf")
    expected = []
    for text in texts_of(world / "train.jsonl"):
        ids = torch.tensor(tokenizer(text).input_ids + [tokenizer.eos_token_id])[:33]
        with torch.no_grad():
            logits = model(ids[None, :-1] if len(ids) == 33 else ids[None]).logits[0]
        expected.append(cross_entropy(logits[: len(ids) - 1], ids[1:]).item())
    for name in LAYOUTS:
        np.testing.assert_allclose(
            ranking(still / name, 0)["losses"], expected, rtol=1e-5, err_msg=name
        )


def test_a_pass_goes_from_low_to_high_loss_and_uses_each_document_once(still: Path) -> None:
    first, second = ranking(still / "single", 0), ranking(still / "single", 3)
    assert not first["uses"].any() and set(second["uses"]) == {0, 1}
    used = second["uses"] == 1
    assert first["losses"][used].max() <= first["losses"][~used].min()
    lengths = {name: [row["tokens"] for row in trained(still / name)] for name in LAYOUTS}
    assert all(length == lengths["single"] for length in lengths.values())


def test_what_no_pass_begins_does_not_stand_in_the_way_of_a_ranking(
    world: Path, tmp_path: Path
) -> None:
    texts = [
        "",
        *("the cat sat on the mat and then ran " * (1 + number % 3) for number in range(7)),
        "dog " * 60,
        "",
    ]
    (tmp_path / "few.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    train(
        world,
        tmp_path / "run",
        "--data.dataset",
        tmp_path / "few.jsonl",
        "--packing.mode",
        "none",
        "--packing.long_examples",
        "drop",
        "--training.seq_len",
        128,
        "--training.batch_size",
        1,
        "--training.steps",
        14,
        "--curriculum.rank_every",
        7,
    )
    first, second = ranking(tmp_path / "run", 0), ranking(tmp_path / "run", 7)
    assert np.isinf(first["uses"]).tolist() == [True, *[False] * 7, True, True]
    assert second["uses"][1:8].tolist() == [1] * 7
    assert (second["losses"] != first["losses"])[1:8].all()  # a pass is over: all are measured anew


def test_stages_draw_in_orders_of_their_own(staged: Path) -> None:
    tokenizer, first = AutoTokenizer.from_pretrained(staged / "single" / "hf"), BatchSizes(4, 1, 4)
    config = load_config(
        str(staged / "run.toml"), ["--training.seq_len", "16", "--data.data_probs", "1,1"]
    )
    config = config.model_copy(
        update={"curriculum": CurriculumConfig(stages=({"from_step": 1, "batch_size": 2},))}
    )
    batches = [
        next(build_loader(stage, tokenizer, first, dp_rank=0))
        for stage in config.curriculum_stages()
    ]
    assert not torch.equal(batches[0].columns["input_ids"], batches[1].columns["input_ids"])


def test_what_has_no_trained_token_comes_last(world: Path, tmp_path: Path) -> None:
    asked = [
        {"role": "user", "content": "the cat " * (20 if talk % 2 else 1)} for talk in range(40)
    ]
    talks = [
        {"messages": [question, {"role": "assistant", "content": "sat"}]} for question in asked
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    flags = (
        "--job.task",
        "sft",
        "--chat.template",
        "chatml",
        "--model.new_tokens",
        "<|im_start|>,<|im_end|>",
    )
    train(
        world,
        tmp_path / "run",
        *flags,
        *RANKED,
        "--data.dataset",
        tmp_path / "chats.jsonl",
        "--packing.buffer",
        1,
        "--training.seq_len",
        64,
        "--training.steps",
        4,
    )
    first = ranking(tmp_path / "run", 0)
    assert np.isnan(first["losses"]).tolist() == [talk % 2 == 1 for talk in range(40)]
    assert len(trained(tmp_path / "run")) == 4


def test_a_ranked_run_goes_on_exactly(world: Path, tmp_path: Path) -> None:
    train(world, tmp_path / "straight", *RANKED, "--checkpoint.interval", 1)
    steps = (1, 3, 5)
    together(
        *(
            lambda s=s: goes_on(tmp_path / "straight", tmp_path / str(s), world, s, *RANKED)
            for s in steps
        )
    )
    for wrong in ("torn", "lost"):
        shutil.copytree(tmp_path / "straight", tmp_path / wrong)
        file = tmp_path / wrong / "curriculum" / "step-3.npz"
        file.write_bytes(file.read_bytes()[:200])
    file.unlink()
    goes = [
        lambda wrong=wrong: train(
            world, tmp_path / wrong, *RANKED, "--checkpoint.load_step", 4, status=2
        )
        for wrong in ("torn", "lost")
    ]
    for printed, reason in zip(
        together(*goes), ("File is not a zip file", "No such file"), strict=True
    ):
        assert "curriculum.rank_every: the order" in printed and f"step-3.npz: {reason}" in printed
