"""The load-balancing loss of a mixture of experts, as transformers' models define it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.config.sections import ModelConfig
from lacuna.model.architecture import ROUTER_COEFFICIENTS
from lacuna.parallel.mesh import Layout


@dataclass(frozen=True)
class Router:
    """How much the load-balancing loss counts, and how many experts a token goes to."""

    coefficient: float
    chosen: int


def set_router_loss(settings: ModelConfig, model_config: PretrainedConfig) -> None:
    """Has a model's configuration say, in place, what the run's settings do of its router loss.

    Raises `UserError` for a model that has none.
    """
    text_config = model_config.get_text_config()
    asked = settings.output_router_logits
    coefficient = settings.router_aux_loss_coef
    known = [name for name in ROUTER_COEFFICIENTS if hasattr(text_config, name)]
    if (asked or coefficient is not None) and not known:
        setting = "output_router_logits" if asked else "router_aux_loss_coef"
        kind = text_config.model_type
        raise UserError(
            f"model.{setting}: {kind!r} models have no load-balancing loss: leave it out."
        )
    if asked is not None:
        text_config.output_router_logits = asked
    if coefficient is not None:
        setattr(text_config, known[0], coefficient)


def check_router_loss(config: Config, layout: Layout) -> None:
    """Raises `UserError` where the loss of a step's routers would not be that of all its tokens.

    It is not linear: the mean over micro-batches is another one.
    """
    mend = "leave that out, or set model.output_router_logits = false to train without it"
    where = None
    if layout.tp > 1:
        where = "parallelism.tensor_parallel_degree"
    elif layout.pp > 1:
        where = "parallelism.pipeline_parallel_degree"
    elif (config.training.gradient_accumulation_steps or 1) > 1:
        where = "training.gradient_accumulation_steps"
    elif config.curriculum.stages:
        where = "curriculum.stages"
    elif config.compile.enable:
        where = "compile.enable"
    if where is not None:
        raise UserError(
            f"model.output_router_logits, {where}: the load-balancing loss, which the model's "
            f"configuration or this run asks for, is not available with the second: {mend}."
        )


def find_router(model: PreTrainedModel) -> Router | None:
    """How the class of a model, here in small, weighs its load-balancing loss; None if it has none.

    Found out by asking it. Raises `UserError` when it is another than is known.
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
            balance = _balance(logits, router.chosen, whole, over_ranks=False)
            ours = router.coefficient * balance.item()
    if abs(theirs) < 1e-6:
        return None
    if abs(theirs - ours) > 1e-5:
        kind = type(model).__name__
        raise UserError(
            f"model.output_router_logits: {kind} has a load-balancing loss of its own kind "
            f"({theirs:.6f}, not {ours:.6f}): set it to false to train without it."
        )
    return router


def router_loss(router: Router, logits: Sequence[Tensor], real: Tensor) -> Tensor:
    """This rank's share of the load-balancing loss of all ranks' tokens, times its coefficient.

    `logits` of each layer [tokens, experts]; `real` bool [tokens] leaves padding out. The shares
    add up: how often experts are chosen, which has no gradient, is counted over all ranks first.
    """
    return router.coefficient * _balance(logits, router.chosen, real, dist.is_initialized())


def _balance(logits: Sequence[Tensor], chosen: int, real: Tensor, over_ranks: bool) -> Tensor:
    """The share of experts * sum(choices * probabilities), means over all layers and tokens.

    Switch Transformers (arXiv 2101.03961), equations 4 to 6.
    """
    experts = logits[0].shape[-1]
    probabilities = logits[0].new_zeros(experts, dtype=torch.float32)
    counts = probabilities.new_zeros(experts + 1)
    counts[-1] = real.sum() * len(logits)
    for layer in logits:
        weights = layer.float().softmax(-1)
        picked = weights.detach().topk(chosen, dim=-1).indices
        hits = torch.zeros_like(weights).scatter_(1, picked, 1.0)
        counts[:-1] += real.float() @ hits
        probabilities = probabilities + real.float() @ weights
    if over_ranks:
        dist.all_reduce(counts)
    tokens = counts[-1].clamp(min=1)
    return experts * (counts[:-1] / tokens * probabilities / tokens).sum()
