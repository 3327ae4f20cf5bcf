"""Fine-tuning trains answers alone, packed or not, in any layout; the model learns to stop."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from runs import curve, lacuna, rows, together, train, weights

TALKS = [
    [
        ("user", "the cat sat"),
        ("assistant", "on the mat"),
        ("user", "and then"),
        ("assistant", "it ran to the river"),
    ],
    [("system", "fish swam"), ("user", "where"), ("assistant", "under the tree")],
    [("user", "the bird"), ("assistant", "flew over the house but so did the dog")],
    [("user", "so"), ("assistant", "so")],
]
SFT = (
    "--job.task",
    "sft",
    "--chat.template",
    "chatml",
    "--model.new_tokens",
    "<|im_start|>,<|im_end|>",
    "--checkpoint.interval",
    2,
)


def as_messages(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


@pytest.fixture(scope="module")
def chats(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The flags of a model with weights and of a step on all four conversations."""
    folder = tmp_path_factory.mktemp("chats")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig.from_pretrained(world / "model", max_position_embeddings=512)
    ).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(world / "model").save_pretrained(folder / "model")
    lines = [json.dumps({"messages": as_messages(talk)}) + "\n" for talk in TALKS]
    (folder / "chats.jsonl").write_text("".join(lines))
    return (
        "--model.config",
        "none",
        "--model.name_or_path",
        folder / "model",
        "--data.dataset",
        folder / "chats.jsonl",
        "--validation.dataset",
        folder / "chats.jsonl",
        "--validation.dataset_split",
        "train",
        *SFT,
    )


APART = ("--packing.mode", "none", "--training.seq_len", 256)
ALONE = (*APART, "--training.batch_size", 4)
PACKED = ("--training.seq_len", 512, "--training.batch_size", 1)
LAYOUTS = {
    "alone": ALONE,
    "packed": PACKED,
    "tensor": (*ALONE, "--cpus", 2, "--parallelism.tensor_parallel_degree", 2),
    "data": (*APART, "--training.batch_size", 2, "--cpus", 2),
}


@pytest.fixture(scope="module")
def runs(world: Path, chats: tuple, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    steps = ("--training.steps", 4)
    together(
        *(
            lambda name=name: train(world, folder / name, *chats, *steps, *LAYOUTS[name])
            for name in LAYOUTS
        )
    )
    return {name: folder / name for name in LAYOUTS}


def test_the_loss_is_that_of_the_answers_by_transformers_own_mask(runs: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(runs["alone"] / "hf")
    model = AutoModelForCausalLM.from_pretrained(runs["alone"] / "hf").eval()
    total, count, right = 0.0, 0, 0
    for talk in TALKS:
        encoded = tokenizer.apply_chat_template(
            as_messages(talk),
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        mask = torch.as_tensor(encoded["assistant_masks"]).bool().view(-1)[1:]
        with torch.no_grad():
            logits = model(encoded["input_ids"]).logits[0, :-1][mask]
        targets = encoded["input_ids"][0, 1:][mask]
        total += cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    last = [row for row in rows(runs["alone"]) if "val_loss" in row][-1]
    assert last["step"] == 4
    assert last["val_loss"] == pytest.approx(total / count, rel=1e-5)
    assert last["val_token_accuracy"] == pytest.approx(right / count, abs=1e-9)
    assert last["val_bits_per_byte"] is None


@pytest.mark.parametrize("name", ["packed", "tensor", "data"])
def test_packing_and_ranks_change_no_step(name: str, runs: dict[str, Path]) -> None:
    assert curve(runs[name]) == [pytest.approx(row, rel=2e-5) for row in curve(runs["alone"])]


def test_the_result_chats_and_stops_where_an_answer_ends(runs: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(runs["alone"] / "hf")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in GenerationConfig.from_pretrained(runs["alone"] / "hf").eos_token_id
    assert tokenizer.apply_chat_template(as_messages(TALKS[3]), tokenize=False).startswith(
        "<|im_start|>user\nso"
    )
    model = AutoModelForCausalLM.from_pretrained(runs["alone"] / "hf")
    asked = tokenizer.apply_chat_template(as_messages(TALKS[3][:1]), add_generation_prompt=True)[
        "input_ids"
    ]
    letter = tokenizer.convert_tokens_to_ids("x")
    with torch.no_grad():
        before_end, after_end = model.model(torch.tensor([[*asked, end]])).last_hidden_state[0, -2:]
        model.lm_head.weight.zero_()
        model.lm_head.weight[end], model.lm_head.weight[letter] = (
            before_end,
            after_end,
        )  # it answers <|im_end|>x
    model.save_pretrained(runs["alone"] / "ends")
    tokenizer.save_pretrained(runs["alone"] / "ends")
    assert model.generate(torch.tensor([asked]), max_new_tokens=2, do_sample=False)[
        0, len(asked) :
    ].tolist() == [end]
    assert lacuna("generate", runs["alone"] / "ends", "--prompt", "so", "--chat").strip() == ""


def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    world: Path, chats: tuple, tmp_path: Path
) -> None:
    flags = (*chats, *PACKED, "--lr_scheduler.decay_type", "constant", "--training.steps")
    together(
        lambda: train(world, tmp_path / "straight", *flags, 4),
        lambda: [train(world, tmp_path / "twice", *flags, steps) for steps in (2, 4)],
    )
    assert weights(tmp_path / "twice") == weights(tmp_path / "straight")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"messages": [{"role": "user", "content": "the"}]},
            "row 1, column messages: no message is the assistant's",
        ),
        ({"messages": []}, "row 1, column messages: the conversation is empty"),
        (
            {"dialog": []},
            "prompt and completion, instruction and output, or text, but dialog",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_refused_by_name(
    row: dict, complaint: str, world: Path, chats: tuple, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    given = [path if str(flag).endswith("chats.jsonl") else flag for flag in chats]
    assert complaint in train(world, tmp_path / "run", *given, *ALONE, status=2)


def test_examples_are_shown_as_they_are_trained(world: Path, chats: tuple) -> None:
    output = lacuna("data", world / "run.toml", *chats, *PACKED).replace("⟧⟦", "")
    assert (
        "⟦on the mat<|im_end|>⟧" in output and "<|im_start|>user\nthe cat sat<|im_end|>" in output
    )
    assert "4 examples" in output and "1 an epoch" in output
