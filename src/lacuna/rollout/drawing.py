"""What is asked of a model and what it says, and how its tokens are drawn on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Probabilities are whole numbers of 1 / this when a token is drawn.
_UNIT = 2**48
# Tokens of the vocabulary that are added up together.
_CHUNK = 256


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn: temperature 0 takes the likeliest.

    Otherwise they are drawn from the `top_k` likeliest (0: from all) and, of these, from the
    likeliest that have the share `top_p` of the probability together.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Asked:
    """A prompt that is to be completed: at least one token.

    Attributes:
        seeds: one for each completion that is wanted.
        limit: the longest completion, in tokens.
    """

    tokens: list[int]
    seeds: Sequence[int]
    limit: int


@dataclass(frozen=True)
class Completion:
    """What the model said: its tokens, and with what log-probability it drew each of them.

    The last token is one that ends an answer where the completion `ended`; otherwise there was no
    room for more.
    """

    tokens: list[int]
    logprobs: list[float]
    ended: bool


def uniform_numbers(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers in [0, 1), float64 [seeds, count], each row by its own seed."""
    found = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in zip(found, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed % 2**63))
    return found


def draw(logits: Tensor, uniform: Tensor, drawing: Drawing) -> tuple[Tensor, Tensor]:
    """A token of each row of `logits` [rows, vocabulary], and its log-probability, both [rows].

    The log-probability is that of being drawn; of the likeliest token it is the model's own. The
    token is the first whose cumulative probability is beyond the number in `uniform`, float64
    [rows]. Probabilities are added up as whole numbers, which is the same in any order: of floats a
    GPU has no deterministic sum.
    """
    logits = logits.float()
    if not drawing.temperature:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], logits.log_softmax(-1).gather(-1, tokens)[:, 0]
    logits = _restricted(logits / drawing.temperature, drawing)
    # Not all log-probabilities are written, which are many, but what they are made of is read.
    total = logits.logsumexp(-1, keepdim=True)
    padding = (0, -logits.shape[-1] % _CHUNK)
    chunks = F.pad(logits, padding, value=-torch.inf).unflatten(-1, (-1, _CHUNK))
    of_chunks = _amounts(chunks - total[:, :, None]).sum(-1)
    cumulative = of_chunks.cumsum(-1)
    most = cumulative[:, -1:]
    place = torch.minimum((uniform[:, None] * most).long(), most - 1)
    chunk = torch.searchsorted(cumulative, place, right=True)
    place = place - (cumulative - of_chunks).gather(1, chunk)
    own = chunks.gather(1, chunk[:, :, None].expand(-1, 1, _CHUNK))[:, 0]
    within = torch.searchsorted(_amounts(own - total).cumsum(-1), place, right=True)
    # Compiled, the amounts of a chunk may be those of before but for rounding.
    tokens = (chunk * _CHUNK + within.clamp(max=_CHUNK - 1)).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], (logits.gather(-1, tokens) - total)[:, 0]


def _amounts(logprobs: Tensor) -> Tensor:
    """Probabilities as whole numbers."""
    return (logprobs.exp() * _UNIT).long()


def _restricted(logits: Tensor, drawing: Drawing) -> Tensor:
    """The logits, -inf where a token is none of those that are drawn from."""
    if 0 < drawing.top_k < logits.shape[-1]:
        least = logits.topk(drawing.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if drawing.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True)
        shares = ordered.softmax(-1)
        # A token stays where those before it have less than the share: the likeliest always does.
        beyond = shares.cumsum(-1) - shares >= drawing.top_p
        beyond[:, 0] = False
        ordered = ordered.masked_fill(beyond, -torch.inf)
        logits = torch.empty_like(logits).scatter(1, places, ordered)
    return logits
