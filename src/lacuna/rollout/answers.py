"""Answers to many questions at a time, by transformers' own `generate`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.data.chat import end_of_turn
from lacuna.rollout.generate import generating


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
    answers: list[list[str | None]] = [[] for _ in prompts]
    # Only those with as much room are asked together: else the least would be the room of all.
    for room in sorted({room for room in rooms if room > 0}):
        group = [number for number, other in enumerate(rooms) if other == room]
        asked = [prompts[number] for number in group]
        found = _answers_of(asked, model, tokenizer, replace(sampling, max_tokens=room))
        for place, answer in enumerate(found):
            answers[group[place // sampling.samples]].append(answer)
    return answers


def _answers_of(
    prompts: Sequence[list[int]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
) -> list[str | None]:
    """The answers to the first of the prompts, then to the next; None where one has no end."""
    device = next(model.buffers(), next(model.parameters())).device
    width = max(map(len, prompts))
    padding = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
    ids = torch.full((len(prompts), width), padding)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    drawing: dict[str, Any] = {}
    if sampling.temperature > 0:
        drawing = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    ends = end_of_turn(tokenizer)
    with generating(model, device, sampling.seed):
        output = model.generate(  # type: ignore[operator]  # torch calls it a tensor
            ids.to(device),
            attention_mask=mask.to(device),
            use_cache=True,
            max_new_tokens=sampling.max_tokens,
            do_sample=sampling.temperature > 0,
            num_return_sequences=sampling.samples,
            pad_token_id=padding,
            eos_token_id=ends,
            **drawing,
        )
    return [_text_before_end(tokens, ends, tokenizer) for tokens in output[:, width:].tolist()]


def _text_before_end(
    tokens: list[int], ends: list[int], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """The text before the first of the tokens that is one of the `ends`; None where none is."""
    place = next((place for place, token in enumerate(tokens) if token in ends), None)
    # Special tokens in it are kept: reasoning may be marked by them.
    return None if place is None else str(tokenizer.decode(tokens[:place]))
