"""Training without a model's dropout."""

from functools import partial

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.model.specimen import LENGTH, found_once, specimen, tokens_to_try


def leave_out_dropout(model: PreTrainedModel) -> None:
    """Has a model drop out nothing in training, in place; its configuration stays as it is.

    Log-probabilities that are compared with old ones or a reference's, which are found without
    dropout, would differ by it. That of adapters (`lora.dropout`), for which a user has asked,
    stays. Raises `UserError` for a model that computes something else in training all the same.
    """
    draws = partial(_draws_at_random, model.config)
    if found_once(model.config, (_draws_at_random,), draws):
        raise UserError(
            "model: in training it draws at random where lacuna cannot leave that out, and its "
            "log-probabilities would differ by noise from those that they are compared with: set "
            "what is called dropout or jitter in its config.json to 0, or choose another model."
        )
    if left_out := _set_to_none(model):
        logger.info("dropout of %g is left out, as in what the model is compared with", left_out)


def _draws_at_random(model_config: PretrainedConfig) -> bool:
    """Whether a small model without dropout computes something else in training."""
    tried = specimen(model_config)
    _set_to_none(tried)
    tokens = tokens_to_try(model_config)
    ids = torch.tensor([[tokens[place % len(tokens)] for place in range(LENGTH)]])
    with torch.no_grad():
        plain, trained = (
            tried.train(mode)(input_ids=ids, use_cache=False).logits for mode in (False, True)
        )
    return not torch.allclose(plain, trained, rtol=1e-4, atol=1e-5)


def _set_to_none(model: nn.Module) -> float:
    """Sets the dropout of all modules to 0, in place; returns the largest that there was."""
    shares = [0.0]
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            shares.append(module.p)
            module.p = 0.0
        # Attention and layers that call functions keep their shares as numbers.
        for name, value in vars(module).items():
            if "drop" in name and name != "adapter_dropout" and isinstance(value, float):
                shares.append(value)
                setattr(module, name, 0.0)
    return max(shares)
