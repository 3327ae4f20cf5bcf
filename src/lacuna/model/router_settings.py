"""What settings ask of the load-balancing loss of a mixture of experts, and what its class has."""

import torch
from torch import nn
from transformers import PretrainedConfig

from lacuna.config import UserError, logger
from lacuna.config.sections import ModelConfig
from lacuna.model.architecture import ROUTER_COEFFICIENTS
from lacuna.model.few_experts import most_experts
from lacuna.model.inputs import Inputs
from lacuna.model.probe import runs_by_itself
from lacuna.model.router import Router
from lacuna.model.specimen import LENGTH, specimen_and_layers


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


def find_router(
    model_config: PretrainedConfig, settings: ModelConfig, device: torch.device
) -> Router | None:
    """How a model weighs its load-balancing loss, or None if its class adds none.

    That is found out by comparing the losses of a small one. Raises `UserError` when its
    load-balancing loss is another than the one that lacuna computes, and when it has none but
    settings ask for it.
    """
    model, layers = specimen_and_layers(model_config, None, LENGTH, device, least=1)
    text_config = model.config.get_text_config()
    coefficients = [getattr(text_config, name, None) for name in ROUTER_COEFFICIENTS]
    weight = next(filter(None, coefficients))
    router = Router(weight, text_config.num_experts_per_tok)
    router.watch(model, layers)
    ids = torch.arange(16)[None].to(device) % text_config.vocab_size
    router.is_training = True
    router.enter(Inputs({}, {"real": torch.ones_like(ids, dtype=torch.bool)}))
    arguments = {"input_ids": ids, "use_cache": False, "output_router_logits": True}
    with torch.no_grad(), runs_by_itself(model):
        output = model(**arguments, labels=ids)
        plain = nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:])
        theirs = (output.loss - plain).item()
        router.choices = router.found()[0]
        ours = router.finish().item()
    if abs(theirs) < 1e-6:
        _require_not_asked(settings, text_config)
        return None
    if abs(theirs - ours) > 1e-5:
        kind = type(model).__name__
        raise UserError(
            f"model.output_router_logits: {kind} has a load-balancing loss of its own kind "
            f"({theirs:.6f}, not {ours:.6f}): set it to false to train without it."
        )
    logger.info("load-balancing loss: times %g", weight)
    left_out = most_experts(model_config) - most_experts(model.config)
    return Router(weight, router.chosen, router.experts + left_out)
