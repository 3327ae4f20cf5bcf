"""The task of the learning experiment: sums step by step, a tokenizer of bytes, a model.

A sum such as 12+34-5= is answered by its running totals, 46,41, of which the last is its result.
Long answers write each step out: 12+34=46,46-5=41. Those that a model is first trained on are
careless: it learns how to answer, and how to go wrong.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"
RESULT = r"-?\d+$"
"""Where the result stands in an answer."""
LEVELS = ((9, 9), (99, 9), (99, 99), *((99,) * numbers for numbers in range(3, 7)))
"""The largest that each number of a sum may be, level by level."""
LONG_LEVELS = tuple((99,) * numbers for numbers in range(4, 20, 3))
SLIPS = (-10, -1, 1, 10)
"""By what they are wrong."""


@dataclass(frozen=True)
class Sizes:
    """How much there is of everything.

    Attributes:
        shape: what the model has that is trained from scratch.
        sft: problems that it is first trained on.
        prompts: problems to learn from by reward, equally many of every level, as all are.
        held_out: problems to measure by, the same.
        batch: prompts of a step by reward.
        samples: completions of each.
        max_tokens: longest completion.
        parts: into how many TRL's batches are divided so that they fit into memory.
        levels: the largest that each number of a sum may be, level by level.
        is_written_out: whether answers have each step in full, or only what comes of it.
        careless: the share of running totals that are wrong in what is learnt before.
        sft_row: tokens of a row before.
    """

    shape: dict[str, int]
    sft: int
    prompts: int
    held_out: int
    batch: int
    samples: int
    max_tokens: int = 32
    parts: int = 1
    levels: tuple[tuple[int, ...], ...] = LEVELS
    is_written_out: bool = False
    careless: float = 0.2
    sft_row: int = 128


LARGE = Sizes(
    {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6},
    sft=150_000,
    prompts=60_000,
    held_out=600,
    batch=256,
    samples=8,
)
LONG = Sizes(
    LARGE.shape,
    sft=150_000,
    prompts=30_000,
    held_out=1200,
    batch=64,
    samples=8,
    max_tokens=256,
    parts=4,
    levels=LONG_LEVELS,
    is_written_out=True,
    careless=0.05,
    sft_row=320,
)
TINY = Sizes(
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    sft=300,
    prompts=60,
    held_out=12,
    batch=4,
    samples=4,
)
SPEED = Sizes(
    {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    sft=0,
    prompts=2_000,
    held_out=8,
    batch=32,
    samples=8,
    max_tokens=256,
    parts=4,
)
"""SmolLM2 135M's shape, with completions of a usual length."""


def problem(largest: tuple[int, ...], numbers: random.Random) -> tuple[str, list[int]]:
    """A sum, such as 12+34-5=, and the numbers that are added up, 12, 34 and -5.

    None is above the `largest` in its place.
    """
    first, *others = largest
    terms = [numbers.randint(0, first)]
    text = str(terms[0])
    for most in others:
        number = numbers.randint(0, most)
        is_plus = numbers.random() < 0.5
        text += f"+{number}" if is_plus else f"-{number}"
        terms.append(number if is_plus else -number)
    return f"{text}=", terms


def problems(
    count: int, seed: int, without: set[str], levels: tuple[tuple[int, ...], ...]
) -> list[tuple[str, list[int]]]:
    """Different problems, of each level in turn, none that are to be left out.

    A level that has no more of them, as the first may, gives way to the next.
    """
    numbers = random.Random(seed)
    seen = set(without)
    found = []
    level = 0
    while len(found) < count:
        for _ in range(100):
            one = problem(levels[level % len(levels)], numbers)
            if one[0] not in seen:
                found.append(one)
                seen.add(one[0])
                break
        level += 1
    return found


def worked(
    terms: list[int], numbers: random.Random, careless: float, is_written_out: bool = False
) -> str:
    """The running totals of a sum, such as 46,41, of which each is wrong with this probability.

    What follows a wrong one goes on from it.
    """
    total = terms[0]
    steps = []
    for term in terms[1:]:
        asked = f"{total}{term:+}=" if is_written_out else ""
        total += term
        if numbers.random() < careless:
            total += numbers.choice(SLIPS)
        steps.append(f"{asked}{total}")
    return ",".join(steps)


def write_task(folder: Path, sizes: Sizes) -> None:
    """Writes the problems of three kinds: held_out.jsonl, prompts.jsonl, sft.jsonl.

    Beside them is a chat template, which the texts need not, but fine-tuning asks for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held_out = problems(sizes.held_out, 0, set(), sizes.levels)
    asked = {prompt for prompt, _ in held_out}
    (folder / "plain.jinja").write_text(
        "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"
    )
    numbers = random.Random(3)
    prompts = problems(sizes.prompts, 1, asked, sizes.levels)
    for name, rows in (("held_out", held_out), ("prompts", prompts)):
        answers = [{"prompt": prompt, "answer": str(sum(terms))} for prompt, terms in rows]
        _write_rows(folder / f"{name}.jsonl", answers)
    careless = [
        {
            "prompt": prompt,
            "completion": worked(terms, numbers, sizes.careless, sizes.is_written_out),
        }
        for prompt, terms in problems(sizes.sft, 2, asked, sizes.levels)
    ]
    _write_rows(folder / "sft.jsonl", careless)


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path, sizes: Sizes, random_weights: bool = False) -> None:
    """Writes a model's configuration and a tokenizer of bytes, which has a token for each digit.

    With `random_weights` there are these too.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, END])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    fast.save_pretrained(folder)
    heads = max(sizes.shape["hidden_size"] // 64, 2)
    usual: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": len(alphabet),
        "pad_token_id": len(alphabet),
    }
    config = LlamaConfig(**usual | sizes.shape)
    config.save_pretrained(folder)
    if random_weights:
        LlamaForCausalLM(config).save_pretrained(folder)
