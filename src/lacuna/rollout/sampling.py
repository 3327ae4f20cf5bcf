"""Completions by the model in training, with the log-probability of each of their tokens."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.config.reinforcement import RolloutConfig
from lacuna.data.mixture import random_key
from lacuna.model.build import BuiltModel
from lacuna.rollout.generate import generating

# Tells the randomness of completions from all other that derives from the seed.
_STREAM = 2
# Probabilities are whole numbers of 1 / this when a token is drawn.
_UNIT = 2**48


@dataclass(frozen=True)
class Completion:
    """What the model said: its tokens, and with what log-probability it drew each of them.

    The last token is one that ends an answer where the completion `ended`; otherwise there was no
    room for more.
    """

    tokens: list[int]
    logprobs: list[float]
    ended: bool


def generate(
    policy: BuiltModel,
    prompts: Sequence[list[int]],
    keys: Sequence[int],
    sampling: RolloutConfig,
    ends: Sequence[int],
    seed: int,
) -> list[list[Completion]]:
    """`sampling.samples` completions of each prompt by the model as it is now.

    All parameters are gathered once, on every rank that shares them, so that ranks may have
    different numbers of prompts and of tokens. Each prompt has a key: its completions are a
    function of the weights, the seed, the key and their number alone, but for rounding, which
    depends on what is generated beside them. Tokens are drawn from all of the vocabulary. Raises
    `UserError` for a model that keeps no keys and values.
    """
    asked = [*product(range(len(prompts)), range(sampling.samples))]
    found = []
    with generating(policy.model, policy.device, seed), gathered(policy.model):
        for start in range(0, len(asked), sampling.batch_size):
            part = asked[start : start + sampling.batch_size]
            seeds = [random_key(seed, _STREAM, keys[place], number) for place, number in part]
            uniform = _uniform(seeds, sampling.max_tokens).to(policy.device)
            own = [prompts[place] for place, _ in part]
            found += _complete(policy.model, own, uniform, sampling.temperature, {*ends})
    count = sampling.samples
    return [found[start : start + count] for start in range(0, len(found), count)]


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within it, and within `inference`, every rank has all parameters of `model`.

    Forward passes exchange nothing then, so that ranks may make different numbers of them.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(bool(unit.frees_after_forward), recurse=False)


def _uniform(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1), float64 [seeds, count], each row by its own seed."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed % 2**63)
        rows.append(torch.rand(count, dtype=torch.float64, generator=generator))
    return torch.stack(rows)


def draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token of each row of `logits` [rows, vocabulary], and its log-probability, both [rows].

    It is the first whose cumulative probability is beyond the number in `uniform`, float64 [rows].
    Probabilities are added up as whole numbers, which is the same in any order: of floats a GPU has
    no deterministic sum.
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    cumulative = (logprobs.double().exp() * _UNIT).long().cumsum(-1)
    total = cumulative[:, -1:]
    place = torch.minimum((uniform[:, None] * total).long(), total - 1)
    tokens = torch.searchsorted(cumulative, place, right=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _complete(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    uniform: Tensor,
    temperature: float,
    ends: set[int],
) -> list[Completion]:
    """A completion of each prompt, one token of all at a time; `uniform` is [prompts, tokens]."""
    device = uniform.device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # on the left, so that all go on at the same place
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    last = torch.tensor(sorted(ends), device=device)
    cache = None
    steps = []
    for number in range(uniform.shape[1]):
        logits, cache = _next_logits(model, ids, mask, positions, cache)
        tokens, logprobs = draw(logits, uniform[:, number], temperature)
        steps.append(torch.stack([tokens.double(), logprobs.double(), alive.double()]))
        alive = alive & ~torch.isin(tokens, last)
        if not alive.any():
            break
        ids = tokens[:, None]
        mask = F.pad(mask, (0, 1), value=1)
        positions = positions[:, -1:] + 1
    of_rows = torch.stack(steps, dim=2).cpu().unbind(1)
    return [_completion(rows, ends) for rows in of_rows]


def _completion(row: Tensor, ends: set[int]) -> Completion:
    """The completion of a row: tokens, log-probabilities, and whether each token counts."""
    tokens, logprobs, alive = row.tolist()
    count = int(sum(alive))
    said = [int(token) for token in tokens[:count]]
    return Completion(said, logprobs[:count], said[-1] in ends)


def _next_logits(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    """The logits after the last of `ids` [rows, tokens], and the keys and values up to there."""
    options: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        **options,
    )
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise UserError(
            f"model: {type(model).__name__} keeps no keys and values, with which completions are "
            "generated for job.task = grpo: choose a model with attention."
        )
    return output.logits[:, -1], cache
