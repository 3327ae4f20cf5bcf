"""Answers to many questions at a time."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.data.chat import end_of_turn
from lacuna.data.mixture import random_key
from lacuna.rollout.drawing import Asked, Completion, Drawing
from lacuna.rollout.generate import complete


@dataclass(frozen=True)
class Sampling:
    """How answers are made: `samples` to each question, each of at most `max_tokens` tokens.

    Temperature 0 is greedy; otherwise tokens are drawn from all, by the `seed`.
    """

    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int = 0


def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    sampling: Sampling,
) -> list[list[str | None]]:
    """The answers to each of the questions, which are texts that end where an answer begins.

    An answer comes without the token that ends it. None stands for one that did not end within
    `max_tokens` or the model's positions. A question that leaves no room for an answer has none.
    """
    prompts: list[list[int]] = [
        tokenizer(text, add_special_tokens=False).input_ids for text in questions
    ]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rooms = [
        min(sampling.max_tokens, (positions or sys.maxsize) - len(prompt)) if prompt else 0
        for prompt in prompts
    ]
    asked = [
        Asked(prompt, [random_key(sampling.seed, place, n) for n in range(sampling.samples)], room)
        for place, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
        if room > 0
    ]
    if not asked:
        return [[] for _ in prompts]
    device = next(model.buffers(), next(model.parameters())).device
    ends = end_of_turn(tokenizer)
    rows = len(asked) * sampling.samples
    drawing = Drawing(sampling.temperature)
    found = iter(complete(model, asked, drawing, ends, rows, device))
    return [
        [_text_before_end(one, tokenizer) for one in next(found)] if room > 0 else []
        for room in rooms
    ]


def _text_before_end(said: Completion, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text before the end of a completion; None where it has none."""
    # Special tokens in it are kept: reasoning may be marked by them.
    return str(tokenizer.decode(said.tokens[:-1])) if said.ended else None
