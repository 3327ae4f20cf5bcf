"""The task of the learning experiment: sums of growing length, a tokenizer of bytes, a model."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

END = "<end>"
LEVELS = ((9, 9), (99, 9), (99, 99), (99, 99, 9), (99, 99, 99), (99, 99, 99, 99))
"""The largest that each number of a sum may be, level by level."""
EASY = 4
"""So many levels, from the first, are learnt before."""


@dataclass(frozen=True)
class Sizes:
    """How much there is of everything.

    Attributes:
        shape: what the model has that is trained from scratch.
        sft: problems that it is first trained on, of the easy levels alone.
        prompts: problems to learn from by reward, equally many of every level.
        held_out: problems to measure by, the same.
        batch: prompts of a step by reward.
        samples: completions of each.
        max_tokens: longest completion.
    """

    shape: dict[str, int]
    sft: int
    prompts: int
    held_out: int
    batch: int
    samples: int
    max_tokens: int = 8


LARGE = Sizes(
    {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6},
    sft=60_000,
    prompts=12_000,
    held_out=600,
    batch=64,
    samples=8,
)
TINY = Sizes(
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    sft=300,
    prompts=60,
    held_out=12,
    batch=4,
    samples=4,
)


def problem(level: int, numbers: random.Random) -> tuple[str, str]:
    """A sum and its result, such as 12+34-5= and 41."""
    first, *others = LEVELS[level]
    result = numbers.randint(0, first)
    text = str(result)
    for largest in others:
        number = numbers.randint(0, largest)
        is_plus = numbers.random() < 0.5
        text += f"+{number}" if is_plus else f"-{number}"
        result += number if is_plus else -number
    return f"{text}=", str(result)


def problems(count: int, levels: int, seed: int, without: set[str]) -> list[tuple[str, str]]:
    """Different problems, of each of the first levels in turn, none that are to be left out.

    A level that has no more of them, as the first may, gives way to the next.
    """
    numbers = random.Random(seed)
    seen = set(without)
    found = []
    level = 0
    while len(found) < count:
        for _ in range(100):
            one = problem(level % levels, numbers)
            if one[0] not in seen:
                found.append(one)
                seen.add(one[0])
                break
        level += 1
    return found


def write_task(folder: Path, sizes: Sizes) -> None:
    """Writes the problems of three kinds: held_out.jsonl, prompts.jsonl, sft.jsonl.

    Beside them is a chat template, which the texts need not, but fine-tuning asks for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held_out = problems(sizes.held_out, len(LEVELS), 0, set())
    asked = {prompt for prompt, _ in held_out}
    (folder / "plain.jinja").write_text(
        "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    )
    _write_rows(folder / "held_out.jsonl", held_out, "answer")
    _write_rows(folder / "prompts.jsonl", problems(sizes.prompts, len(LEVELS), 1, asked), "answer")
    _write_rows(folder / "sft.jsonl", problems(sizes.sft, EASY, 2, asked), "completion")


def _write_rows(path: Path, rows: list[tuple[str, str]], name: str) -> None:
    lines = [json.dumps({"prompt": prompt, name: answer}) + "\n" for prompt, answer in rows]
    path.write_text("".join(lines))


def write_model(folder: Path, sizes: Sizes) -> None:
    """Writes a model's configuration and a tokenizer of bytes, which has a token for each digit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, END])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    fast.save_pretrained(folder)
    shape: dict[str, Any] = dict(sizes.shape)
    heads = max(shape["hidden_size"] // 64, 2)
    ends = {"bos_token_id": None, "eos_token_id": len(alphabet), "pad_token_id": len(alphabet)}
    LlamaConfig(
        vocab_size=len(vocabulary),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **ends,
        **shape,
    ).save_pretrained(folder)
