"""Losses that a model's own code adds to the cross-entropy: none may be left out silently."""

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from lacuna.config import UserError, logger
from lacuna.model.architecture import causal_class
from lacuna.model.probe import runs_by_itself
from lacuna.model.specimen import LENGTH, found_once, specimen, tokens_to_try

# Parts of the names of settings by which losses are weighted.
_WEIGHTS = ("loss", "coef")
# Settings of fla's with which a model that trains makes no logits.
_FUSED = ("fuse_cross_entropy", "fuse_linear_cross_entropy")
_EXACT = 1e-5


def require_no_added_loss(model_config: PretrainedConfig, device: torch.device) -> None:
    """Raises `UserError` for a model whose own code adds losses that a run would not compute.

    They are found by what a small model says of its loss. One that no setting turns off is only
    warned of.
    """
    kind = causal_class(model_config).__name__
    told = _added_loss, device
    added = found_once(model_config, told, partial(_added_loss, model_config, device))
    if abs(added) < _EXACT:
        return
    without = {
        name: _added_loss(_without(model_config, name), device)
        for name in _weights(model_config.get_text_config())
    }
    found = [name for name, left in without.items() if abs(left - added) > _EXACT]
    if found:
        raise UserError(
            f"model: {kind}'s own code adds a loss to the cross-entropy, weighted by "
            f"{' and '.join(found)} in its configuration, and lacuna does not compute it: set that "
            "to 0 there to train without it, or choose another model."
        )
    logger.warning(
        "the loss of %s's own code is another than the cross-entropy of the next token, which is "
        "what is trained",
        kind,
    )


def _added_loss(model_config: PretrainedConfig, device: torch.device) -> float:
    """What a small model's loss of a row is beyond the cross-entropy of its own logits.

    It is 0 where the model has no such loss, or fails. Some models expect labels that are shifted
    already; theirs is the cross-entropy too.
    """
    model = specimen(model_config, device=device).train()
    for name in _FUSED:
        if hasattr(model.config, name):
            setattr(model.config, name, False)
    tokens = tokens_to_try(model_config)
    ids = torch.arange(LENGTH, device=device)[None] * 5 % len(tokens) + tokens.start
    with suppress(UserError), runs_by_itself(model), torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        output = model(input_ids=ids, labels=ids, use_cache=False)
        logits = output.logits[0].float()
        shifted = F.cross_entropy(logits[:-1], ids[0, 1:])
        found = (output.loss - shifted, output.loss - F.cross_entropy(logits, ids[0]))
        return min((float(one) for one in found), key=abs)
    return 0.0


def _weights(config: PretrainedConfig) -> Iterator[str]:
    """The settings of a configuration and of its parts that may weight a loss, and are not 0."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from (f"{name}.{inner}" for inner in _weights(value))
        elif isinstance(value, int | float) and value and any(part in name for part in _WEIGHTS):
            yield name


def _without(model_config: PretrainedConfig, name: str) -> PretrainedConfig:
    """A copy of a configuration whose text has 0 for the setting of this name."""
    changed = copy.deepcopy(model_config)
    *parts, setting = name.split(".")
    owner: Any = changed.get_text_config()
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, setting, type(getattr(owner, setting))(0))
    return changed
