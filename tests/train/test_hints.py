"""What a run prints at its end are commands that fit it and work as they are printed."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lacuna.config.fields import RECIPES
from runs import environment, lacuna, rows, together

pytestmark = pytest.mark.slow  # whole runs of the command line

TALK = {
    "messages": [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "the 'cat' sat"},
        {"role": "assistant", "content": "on the mat"},
    ]
}


@pytest.fixture(scope="module")
def folder(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are started: a model that chats, and data of both kinds."""
    folder = tmp_path_factory.mktemp("hints")
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    tokenizer.chat_template = (RECIPES / "templates" / "chatml.jinja").read_text()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(folder / "base")
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(world / "model", **settings)).save_pretrained(
        folder / "base"
    )
    (folder / "chats.jsonl").write_text(
        json.dumps(TALK) + "\n" + json.dumps(TALK | {"id": "b"}) + "\n"
    )
    (folder / "my.jsonl").write_text(
        '{"text": "the dog ran", "messages": ' + json.dumps(TALK["messages"]) + "}\n"
    )
    return folder


@pytest.fixture(scope="module")
def outputs(world: Path, folder: Path) -> dict[str, str]:
    """What runs printed, to a pipe of 80 columns."""
    env = environment(COLUMNS="80")
    fine = (
        "--model.name_or_path",
        "base",
        "--data.dataset",
        "chats.jsonl",
        "--training.seq_len",
        64,
    )
    held_out = (
        "--validation.dataset",
        world / "validation.jsonl",
        "--validation.dataset_split",
        "train",
    )
    calls = {
        "text": ("train", world / "run.toml", "--job.dump_folder", "text", *held_out),
        "sft": (
            "train",
            "sft.toml",
            *fine,
            "--validation.prompts",
            "who are you?",
            "--validation.max_new_tokens",
            4,
        ),
        "lora": ("train", "lora.toml", *fine),
        "qlora": ("train", "qlora.toml", *fine, "--dry-run"),
        "nf4": ("train", "qlora.toml", *fine, "--job.name", "nf4"),
        "early": (
            *("train", world / "run.toml", "--job.dump_folder", "early", *held_out),
            *("--optimizer.lr", 0, "--validation.freq", 1, "--validation.patience", 1),
        ),
    }
    options = {"cwd": folder, "env": env, "timeout": 400}
    printed = together(*(lambda words=words: lacuna(*words, **options) for words in calls.values()))
    return dict(zip(calls, printed, strict=True))


def hint(output: str, name: str) -> str:
    (line,) = re.findall(rf"^  {name} +(.*)$", output, re.MULTILINE)
    return line


def test_prompts_are_the_runs_own_or_how_its_data_begins(
    world: Path, outputs: dict[str, str]
) -> None:
    first = json.loads((world / "validation.jsonl").read_text().splitlines()[0])["text"].split()[:5]
    assert shlex.split(hint(outputs["text"], "try it"))[:4] == [
        "lacuna",
        "generate",
        "text",
        "--prompt",
    ]
    assert shlex.split(hint(outputs["text"], "try it"))[4].split()[:5] == first
    assert (
        hint(outputs["sft"], "try it")
        == "lacuna generate outputs/sft --chat --prompt 'who are you?'"
    )
    words = shlex.split(hint(outputs["lora"], "try it"))
    assert words[2:] == ["outputs/lora/hf/adapter", "--chat", "--prompt", "the 'cat' sat"]


@pytest.mark.parametrize("held_out", [(), ("--validation.dataset", "asked.jsonl")])
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "the dog ran"}, ["--prompt", "the dog ran", "--temperature", "0.8"]),
        ({"messages": TALK["messages"][:2]}, ["--chat", "--prompt", "the 'cat' sat"]),
        ({"prompt": TALK["messages"][:2]}, ["--chat", "--prompt", "the 'cat' sat"]),
        ({"instruction": "sit", "output": ""}, ["--chat", "--prompt", "sit"]),
    ],
)
def test_a_model_is_tried_with_a_prompt_of_its_rewards(
    row: dict, wanted: list[str], held_out: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "asked.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    words = ("--model.name_or_path", folder / "base", "--data.dataset", "asked.jsonl", *held_out)
    words += ("--job.task", "grpo", "--rewards.functions", "length", "--training.steps", 1)
    words += ("--training.seq_len", 64, "--training.batch_size", 2, "--rollout.max_tokens", 2)
    said = lacuna("train", *words, cwd=tmp_path)
    assert shlex.split(hint(said, "try it"))[3:] == wanted


def test_hints_name_the_columns_and_the_task_of_the_run(outputs: dict[str, str]) -> None:
    assert hint(outputs["text"], "your data").endswith("--job.name mine (rows with a text column)")
    for name in ("sft", "lora"):
        assert "--job.task sft" in hint(outputs[name], "your data")
        assert hint(outputs[name], "your data").endswith("--job.name mine (rows with messages)")
    assert "--lora.adapter outputs/lora/hf/adapter" in hint(outputs["lora"], "your data")
    assert not re.search("^  adapter|^  merge", outputs["text"] + outputs["sft"], re.MULTILINE)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("text", "your data"),
        ("text", "train on"),
        ("text", "try it"),
        ("sft", "your data"),
        ("lora", "your data"),
        ("lora", "try it"),
        ("lora", "merge"),
    ],
)
def test_commands_work_as_they_are_printed(
    run: str, name: str, folder: Path, outputs: dict[str, str]
) -> None:
    command, *words = shlex.split(hint(outputs[run], name).partition(" (rows")[0])
    assert command == "lacuna"
    words = [f"{run}-mine" if word == "mine" else word for word in words]
    lacuna(*words, cwd=folder, timeout=400)
    if name == "your data":
        assert (folder / "outputs" / f"{run}-mine" / "hf" / "config.json").exists()
    if name == "train on":
        assert rows(folder / "text")[-1]["step"] == 16


def test_a_run_that_stopped_early_is_told_how_it_trains_on(
    folder: Path, outputs: dict[str, str]
) -> None:
    assert "stopping early: nothing better in 1 validations" in outputs["early"]
    before = rows(folder / "early")[-1]["step"]
    command, *words = shlex.split(hint(outputs["early"], "train on"))
    lacuna(*words, cwd=folder, timeout=400)
    assert rows(folder / "early")[-1]["step"] > before + 1


def test_adapters_of_a_quantised_base_are_tried_beside_it(outputs: dict[str, str]) -> None:
    """Beside the base as it was before, or merged into that, they are another model."""
    assert hint(outputs["nf4"], "try it").startswith("lacuna generate outputs/nf4 ")
    assert "  merge " not in outputs["nf4"]


def test_samples_of_a_chat_show_question_and_answer_apart(outputs: dict[str, str]) -> None:
    lines = outputs["sft"].splitlines()
    place = lines.index("sample after step 0")
    assert lines[place + 1] == "question  who are you?"
    assert lines[place + 2].startswith("answer    ")


def test_what_goes_to_a_pipe_is_not_broken_into_lines(outputs: dict[str, str]) -> None:
    assert re.search(
        r"^text: .* 8 steps of 4 × 32 tokens; writing to text$", outputs["text"], re.MULTILINE
    )
    assert re.search(
        r"^memory a rank +about .* GiB at a time \(weights .*, loss [\d.]+\) *$",
        outputs["qlora"],
        re.MULTILINE,
    )
    assert not re.search(r" $", outputs["text"], re.MULTILINE), "nor padded"


def test_recipes_are_short() -> None:
    for name in ("sft", "lora", "qlora"):
        assert len((RECIPES / f"{name}.toml").read_text().splitlines()) <= 12


def test_curves_are_where_the_run_wrote_them(outputs: dict[str, str]) -> None:
    assert hint(outputs["text"], "curves") == "text/metrics.jsonl"  # its tensorboard is off
    curves = "outputs/sft/metrics.jsonl; tensorboard --logdir outputs/sft"
    assert hint(outputs["sft"], "curves") == curves


def test_the_rate_of_muon_stays_with_muon(world: Path, folder: Path) -> None:
    muon = ("--optimizer.name", "Muon", "--optimizer.adjust_lr_fn", "original")
    muon += ("--optimizer.nesterov=false", "--optimizer.lr", 0.02, "--training.steps", 1)
    said = lacuna("train", world / "run.toml", "--job.dump_folder", folder / "muon", *muon)
    printed = hint(said, "your data").partition(" (rows")[0]
    words = shlex.split(printed)[1:-1]
    lacuna(*words, "of_muon", cwd=folder)
    found = (folder / "outputs" / "of_muon" / "config.toml").read_text()
    for line in ('name = "Muon"', 'adjust_lr_fn = "original"', "nesterov = false", "lr = 0.02"):
        assert f"\n{line}\n" in found


def test_the_dtype_of_the_model_is_said(outputs: dict[str, str]) -> None:
    assert "hf, written in float32 (checkpoint.export_dtype)." in outputs["text"]
    assert "hf, adapters merged in float32 and written in bfloat16 (checkpoint" in outputs["lora"]


def test_what_opens_an_own_attention_is_said(world: Path, tmp_path: Path) -> None:
    said = lacuna(
        "train",
        world / "run.toml",
        *("--job.dump_folder", tmp_path, "--model.attention", "softpick", "--training.steps", 1),
    )
    assert "after lacuna.model.own_attention.register('softpick')" in hint(said, "model")


def test_a_run_by_rewards_in_epochs_says_so_for_other_data(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "the dog ran"}\n' * 4)
    words = ("--model.name_or_path", folder / "base", "--data.dataset", "asked.jsonl")
    words += ("--job.task", "grpo", "--rewards.functions", "length", "--training.seq_len", 64)
    words += ("--training.batch_size", 2, "--rollout.max_tokens", 2, "--training.epochs", 1)
    mine = hint(lacuna("train", *words, "--training.steps", "none", cwd=tmp_path), "your data")
    assert "--training.epochs 1" in mine and "--training.steps" not in mine
