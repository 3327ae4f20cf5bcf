"""The load-balancing loss of a mixture of experts, as transformers' models define it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig, CompileConfig
from lacuna.config.sections import ModelConfig
from lacuna.data import Batch
from lacuna.model.architecture import ROUTER_COEFFICIENTS
from lacuna.model.forward import run_backbone
from lacuna.model.inputs import Inputs
from lacuna.model.probe import runs_by_itself
from lacuna.model.specimen import specimen
from lacuna.parallel.mesh import Layout

if TYPE_CHECKING:  # both import this
    from lacuna.model.build import BuiltModel
    from lacuna.model.head import Head


@dataclass(frozen=True)
class Router:
    """The coefficient of the load-balancing loss, and how many experts are `chosen` for a token."""

    coefficient: float
    chosen: int


def set_router_loss(settings: ModelConfig, model_config: PretrainedConfig) -> None:
    """Writes the run's settings of the load-balancing loss into a model's configuration, in place.

    Raises `UserError` for a model that has no such loss.
    """
    text_config = model_config.get_text_config()
    asked = settings.output_router_logits
    coefficient = settings.router_aux_loss_coef
    known = [name for name in ROUTER_COEFFICIENTS if hasattr(text_config, name)]
    if not known:
        _require_not_asked(settings, text_config)
    if asked is not None:
        text_config.output_router_logits = asked
    if coefficient is not None:
        setattr(text_config, known[0], coefficient)


def _require_not_asked(settings: ModelConfig, text_config: PretrainedConfig) -> None:
    """Raises `UserError` where settings ask for a loss that is none of this kind of model's."""
    asked = settings.output_router_logits
    if asked or settings.router_aux_loss_coef is not None:
        setting = "output_router_logits" if asked else "router_aux_loss_coef"
        kind = text_config.model_type
        raise UserError(
            f"model.{setting}: {kind!r} models have no load-balancing loss that lacuna knows of: "
            "leave it out."
        )


def check_router_loss(
    compiled: CompileConfig, recomputed: ActivationCheckpointConfig, layout: Layout
) -> None:
    """Raises `UserError` where a step's load-balancing loss would not be that of all its tokens."""
    mend = "leave that out, or set model.output_router_logits = false to train without it"
    where = None
    if layout.pp > 1:
        where = "parallelism.pipeline_parallel_degree"
    elif compiled.enable:
        where = "compile.enable"
    elif recomputed.mlp_chunks > 1:
        where = "activation_checkpoint.mlp_chunks"
    if where is not None:
        raise UserError(
            f"model.output_router_logits, {where}: the load-balancing loss, which the model's "
            f"configuration or this run asks for, is not available with the second: {mend}."
        )


def router_of_run(
    model_config: PretrainedConfig,
    settings: ModelConfig,
    compiled: CompileConfig,
    recomputed: ActivationCheckpointConfig,
    layout: Layout,
    device: torch.device,
) -> Router | None:
    """What a run must know of the load-balancing loss of a model that asks for it (`find_router`).

    Raises `UserError` where that loss cannot be computed exactly.
    """
    model = specimen(model_config, device=device)
    with runs_by_itself(model):
        router = find_router(model, settings)
    if router is not None:
        check_router_loss(compiled, recomputed, layout)
    return router


def find_router(model: PreTrainedModel, settings: ModelConfig) -> Router | None:
    """How a small model weighs its load-balancing loss, or None if its class adds none.

    That is found out by comparing its losses. Raises `UserError` when its load-balancing loss is
    another than the one that lacuna computes, and when it has none but settings ask for it.
    """
    text_config = model.config.get_text_config()
    coefficients = [getattr(text_config, name, None) for name in ROUTER_COEFFICIENTS]
    router = Router(next(filter(None, coefficients)), text_config.num_experts_per_tok)
    ids = torch.arange(16)[None].to(model.device) % text_config.vocab_size
    arguments = {"input_ids": ids, "use_cache": False, "output_router_logits": True}
    with torch.no_grad():
        output = model(**arguments, labels=ids)
        whole = torch.ones(ids.numel(), dtype=torch.bool, device=ids.device)
        plain = torch.nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:])
        theirs = (output.loss - plain).item()
        ours = 0.0
        logits = getattr(output, "router_logits", None)  # some classes say nothing of them
        if logits is not None:
            choices = _count_choices(logits, router.chosen, whole)
            balance = _balance_loss(logits, whole, choices)
            ours = router.coefficient * balance.item()
    if abs(theirs) < 1e-6:
        _require_not_asked(settings, text_config)
        return None
    if abs(theirs - ours) > 1e-5:
        kind = type(model).__name__
        raise UserError(
            f"model.output_router_logits: {kind} has a load-balancing loss of its own kind "
            f"({theirs:.6f}, not {ours:.6f}): set it to false to train without it."
        )
    return router


def choices_of_step(built: "BuiltModel", batches: Sequence[Batch]) -> Tensor:
    """How often each expert is chosen in a step's micro-batches, over all ranks [experts + 1].

    That takes a forward pass of each, without gradients. The last number is that of tokens, once
    for each layer.
    """
    with torch.no_grad():
        found = [built.read(batch, _read_choices) for batch in batches]
    total = torch.stack([one for one in found if one is not None]).sum(0)
    dist.all_reduce(total)
    return total


def _read_choices(model: PreTrainedModel, head: "Head", inputs: Inputs) -> Tensor:
    assert head.router is not None
    logits = run_backbone(model, head, inputs).router_logits
    return _count_choices(logits, head.router.chosen, real_tokens(inputs))


def real_tokens(inputs: Inputs) -> Tensor:
    """Which of the tokens that this rank's layers see are no padding, bool [tokens]."""
    real = inputs.columns["real"]
    if inputs.gather is not None:  # layers see this rank's slice of the sequence
        real = real.chunk(inputs.gather.size(), 1)[inputs.gather.get_local_rank()]
    return real.flatten()


def router_loss(
    router: Router, logits: Sequence[Tensor], real: Tensor, choices: Tensor | None = None
) -> Tensor:
    """This rank's share of the load-balancing loss of a step's tokens, times its coefficient.

    `logits` are [tokens, experts] of each layer, and `real`, bool [tokens], leaves padding out. The
    shares add up over micro-batches and ranks, because how often each expert is chosen, which has
    no gradient, is counted over all of them first: `choices`, as `choices_of_step` makes them, or
    those of all ranks' tokens here.
    """
    if choices is None:
        choices = _count_choices(logits, router.chosen, real)
        if dist.is_initialized():
            dist.all_reduce(choices)
    return router.coefficient * _balance_loss(logits, real, choices)


def _count_choices(logits: Sequence[Tensor], chosen: int, real: Tensor) -> Tensor:
    counts = logits[0].new_zeros(logits[0].shape[-1] + 1, dtype=torch.float32)
    counts[-1] = real.sum() * len(logits)
    for layer in logits:
        picked = layer.detach().topk(chosen, dim=-1).indices
        hits = torch.zeros_like(layer, dtype=torch.float32).scatter_(1, picked, 1.0)
        counts[:-1] += real.float() @ hits
    return counts


def _balance_loss(logits: Sequence[Tensor], real: Tensor, choices: Tensor) -> Tensor:
    """The number of experts times sum(choices * probabilities), over these tokens' probabilities.

    Choices and probabilities of experts are means over all layers and tokens, as in Switch
    Transformers (arXiv 2101.03961), equations 4 to 6.
    """
    probabilities = sum(real.float() @ layer.float().softmax(-1) for layer in logits)
    tokens = choices[-1].clamp(min=1)
    return (len(choices) - 1) * (choices[:-1] / tokens * probabilities / tokens).sum()
