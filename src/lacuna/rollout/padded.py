"""Completions of models whose keys and values cannot be in pages, by transformers' `generate`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from lacuna.rollout.drawing import Asked, Completion, Drawing, draw, uniform_numbers

Listener = Callable[[list[int]], None]


class _Drawer(LogitsProcessor):
    """Draws the tokens in place of transformers, which is left only one to take."""

    def __init__(self, uniform: Tensor, drawing: Drawing) -> None:
        self.uniform = uniform
        self.drawing = drawing
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, logprobs = draw(scores, self.uniform[:, len(self.tokens)], self.drawing)
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _Streamer(BaseStreamer):
    """Tells a listener the tokens so far of the only completion."""

    def __init__(self, listen: Listener) -> None:
        self.listen = listen
        self.tokens: list[int] | None = None  # None: the prompt is still to come

    def put(self, value: Tensor) -> None:
        if self.tokens is None:
            self.tokens = []
            return
        self.tokens += value.flatten().tolist()
        self.listen(self.tokens)

    def end(self) -> None:
        pass


@contextmanager
def _plain_settings(model: PreTrainedModel) -> Iterator[None]:
    """Within it a model has no habits of its own, such as penalties, in generating."""
    habits = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = habits


def complete_padded(
    model: PreTrainedModel,
    asked: Sequence[Asked],
    drawing: Drawing,
    ends: Sequence[int],
    rows: int,
    device: torch.device,
    listen: Listener | None = None,
) -> list[list[Completion]]:
    """All completions of what is `asked`, `rows` of them at a time, until the last has ended.

    Prompts are padded on the left; but those of models with a state, which padding would change,
    run only beside prompts as long as they are. `listen` is given the tokens so far, where there is
    one completion.
    """
    wanted = [(place, seed) for place, one in enumerate(asked) for seed in one.seeds]

    def kind(one: tuple[int, int]) -> tuple[int, int]:
        prompt = asked[one[0]]
        # What `generate` makes has one limit.
        return prompt.limit, len(prompt.tokens) if model._is_stateful else 0

    found: list[list[Completion]] = [[] for _ in asked]
    for _, group in groupby(sorted(wanted, key=kind), key=kind):
        alike = list(group)
        for start in range(0, len(alike), rows):
            part = alike[start : start + rows]
            prompts = [asked[place] for place, _ in part]
            uniform = uniform_numbers([seed for _, seed in part], prompts[0].limit)
            said = _complete(model, prompts, uniform.to(device), drawing, ends, listen)
            for (place, _), completion in zip(part, said, strict=True):
                found[place].append(completion)
    return found


def _complete(
    model: PreTrainedModel,
    prompts: Sequence[Asked],
    uniform: Tensor,
    drawing: Drawing,
    ends: Sequence[int],
    listen: Listener | None,
) -> list[Completion]:
    """A completion of each prompt; `uniform` is [prompts, tokens]."""
    width = max(len(one.tokens) for one in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):  # on the left, so that all go on at the same place
        ids[row, width - len(one.tokens) :] = torch.tensor(one.tokens)
        mask[row, width - len(one.tokens) :] = 1
    drawer = _Drawer(uniform, drawing)
    options: dict[str, Any] = {"eos_token_id": list(ends)} if ends else {}
    with _plain_settings(model):
        model.generate(  # type: ignore[operator]  # torch calls it a tensor
            ids.to(uniform.device),
            attention_mask=mask.to(uniform.device),
            use_cache=True,
            max_new_tokens=uniform.shape[1],
            do_sample=False,
            pad_token_id=0,
            logits_processor=[drawer],
            streamer=None if listen is None else _Streamer(listen),
            synced_gpus=False,
            **options,
        )
    tokens = torch.stack(drawer.tokens, dim=1).tolist()
    logprobs = torch.stack(drawer.logprobs, dim=1).tolist()
    return [_until_end(*both, ends) for both in zip(tokens, logprobs, strict=True)]


def _until_end(tokens: list[int], logprobs: list[float], ends: Sequence[int]) -> Completion:
    """The completion of a row, which may have gone on after its end."""
    places = (place + 1 for place, token in enumerate(tokens) if token in ends)
    count = next(places, len(tokens))
    return Completion(tokens[:count], logprobs[:count], tokens[count - 1] in ends)
