"""What a model's routers are: their biases, logits and kind of scores, found by trying them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError
from lacuna.model.architecture import decoder_layers
from lacuna.model.probe import runs_by_itself
from lacuna.model.specimen import LENGTH, specimen_and_layers
from lacuna.parallel.expert_stacks import stacks_of

RATE = "model.router_bias_update_rate"
REPORT = "metrics.router"

# What transformers' models call a bias that is added to scores only to choose experts.
_BIASES = ("e_score_correction_bias", "expert_bias")
_LARGE = 1e3  # beside which no score counts


def _shares_of_sigmoid(logits: Tensor) -> Tensor:
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


_SCORES: tuple[Callable[[Tensor], Tensor], ...] = (
    partial(torch.softmax, dim=-1),
    _shares_of_sigmoid,
)
"""Distributions over all experts that routers make of float32 logits [tokens, experts]."""


def biases_of(layer: nn.Module) -> list[Tensor]:
    """The biases, [experts] or [1, experts], by which a layer's routers choose."""
    named = [*layer.named_parameters(), *layer.named_buffers()]
    return [tensor for name, tensor in named if name.rpartition(".")[-1] in _BIASES]


def routers_of(model: PreTrainedModel, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """A layer's routers, and the place of their logits among what they return.

    They are those whose logits transformers itself records.
    """
    recorded: Any = (getattr(type(model), "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    if kind is not None:
        for module in layer.modules():
            if isinstance(module, kind):
                yield module, recorded.index


def logits_of(output: Any, index: int) -> Tensor:
    """The logits, float32 [tokens, experts], in what a router returns."""
    logits: Tensor = output[index] if isinstance(output, tuple) else output
    return logits.detach().flatten(0, -2).float()


@dataclass
class _Seen:
    """What a layer's routers and experts did in one forward pass: an entry for each call.

    `chosen` and `weights` are [tokens, k], `logits` [tokens, experts].
    """

    chosen: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def note_choice(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if len(arguments) == 3:  # as transformers calls stacks of experts
            self.chosen.append(arguments[1])
            self.weights.append(arguments[2])

    def note_logits(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        self.logits.append(logits_of(output, index))


class _Trial:
    """A small model of which it is seen what each layer with experts does to a row of tokens."""

    def __init__(self, model_config: PretrainedConfig) -> None:
        cpu = torch.device("cpu")
        self.model, layers = specimen_and_layers(model_config, None, LENGTH, cpu, least=1)
        self.layers = [layer for layer in layers if stacks_of([layer]) or biases_of(layer)]
        self.seen = [_Seen() for _ in self.layers]
        for place, layer in enumerate(self.layers):
            for stack in stacks_of([layer]):
                stack.register_forward_pre_hook(partial(self._note_choice, place))
            for router, index in routers_of(self.model, layer):
                router.register_forward_hook(partial(self._note_logits, place, index))
        self.ids = torch.arange(16)[None] % model_config.get_text_config().vocab_size
        self.run()

    def _note_choice(self, place: int, *call: Any) -> None:
        self.seen[place].note_choice(*call)

    def _note_logits(self, place: int, *call: Any) -> None:
        self.seen[place].note_logits(*call)

    def run(self) -> None:
        """Shows the model its tokens; `seen` is what it does to them alone."""
        self.seen = [_Seen() for _ in self.layers]
        with torch.no_grad(), runs_by_itself(self.model):
            self.model(input_ids=self.ids, use_cache=False)


def check_routers(model: PreTrainedModel, rate: float, reported: bool) -> None:
    """Raises `UserError` where a model's load cannot be counted, told, or evened out by a bias.

    `model` may have no memory: a small one like it is tried.
    """
    setting = RATE if rate else REPORT
    kind = model.config.get_text_config().model_type
    if not stacks_of([model]):
        raise UserError(
            f"{setting}: {kind!r} models have no stacks of experts whose tokens could be counted: "
            "leave it out."
        )
    trial = _Trial(model.config)
    if not all(_is_countable(trial, place) for place in range(len(trial.layers))):
        raise UserError(
            f"{setting}: the experts of {kind!r} models are not given every token once, so that "
            "their load is not known: leave it out."
        )
    if reported:
        scores_of(model.config)
    if rate:
        _check_biases(model, trial, kind)


def _is_countable(trial: _Trial, place: int) -> bool:
    """Whether a layer gives each token once to experts that are all in its stacks."""
    seen = trial.seen[place]
    if [len(one) for one in seen.chosen] != [trial.ids.numel()]:
        return False
    [stack] = stacks_of([trial.layers[place]])
    sizes = {len(bias.view(-1)) for bias in biases_of(trial.layers[place])}
    sizes |= {logits.shape[-1] for logits in seen.logits}
    return sizes <= {stack.num_experts}


def scores_of(model_config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """The distribution over all experts that a model's routers make of their logits.

    A small model is tried: the chosen experts' shares of it must be to each other as the weights of
    their outputs are. Raises `UserError` where no known distribution is so.
    """
    trial = _Trial(model_config)
    for scores in _SCORES:
        if all(_weighs_by(scores, seen) for seen in trial.seen):
            return scores
    raise UserError(
        f"{REPORT}: what the routers of {model_config.get_text_config().model_type!r} models weigh "
        "experts by is neither a softmax nor a sigmoid of logits that transformers records, so "
        "that it has no known entropy: leave it out."
    )


def _weighs_by(scores: Callable[[Tensor], Tensor], seen: _Seen) -> bool:
    if len(seen.logits) != 1 or len(seen.chosen) != 1:
        return False
    shares = scores(seen.logits[0]).gather(1, seen.chosen[0])
    weights = seen.weights[0].float()
    if shares.shape != weights.shape:
        return False
    if shares.shape[1] > 1:  # else every kind of score would be 1 of 1
        shares = shares / shares.sum(-1, keepdim=True)
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.allclose(shares, weights, atol=1e-4)


def _check_biases(model: PreTrainedModel, trial: _Trial, kind: str) -> None:
    """Raises `UserError` unless each bias of a model is kept exactly, and has experts chosen."""
    biases = [bias for layer in decoder_layers(model) for bias in biases_of(layer)]
    if not biases:
        raise UserError(
            f"{RATE}: {kind!r} models have no bias by which routers choose experts: leave it out; "
            "model.output_router_logits balances experts by a loss where the model has one."
        )
    are_weights = any(isinstance(bias, nn.Parameter) for bias in biases)
    if are_weights or not all(weight.requires_grad for weight in model.parameters()):
        raise UserError(
            f"{RATE}: {kind!r} models have frozen weights, beside which checkpoints hold only what "
            "is trained, and not the bias: leave the setting out."
        )
    if any(bias.dtype != torch.float32 for bias in biases):
        raise UserError(
            f"{RATE}: the bias of {kind!r} models would be kept in {biases[0].dtype}, too coarse "
            "for small moves: set training.dtype = float32."
        )
    if not all(_obeys(trial, place) for place in range(len(trial.layers))):
        raise UserError(
            f"{RATE}: {kind!r} models do not choose the experts whose bias is large: leave it out."
        )


def _obeys(trial: _Trial, place: int) -> bool:
    """Whether all tokens choose the expert of a layer that fewest chose, if its bias is large."""
    biases = biases_of(trial.layers[place])
    if not biases:
        return True
    bias = biases[0].view(-1)
    trial.run()
    chosen = trial.seen[place].chosen[0]
    rarest = int(torch.bincount(chosen.flatten(), minlength=len(bias)).argmin())
    bias[rarest] += _LARGE
    trial.run()
    bias[rarest] -= _LARGE
    obeyed = (trial.seen[place].chosen[0] == rarest).any(-1).all()
    return len(biases) == 1 and bool(obeyed)
