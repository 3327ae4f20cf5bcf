"""Models that score: transformers' sequence classifiers with a single label."""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from lacuna.config import UserError
from lacuna.model.architecture import asks_for_router_loss
from lacuna.model.forward import run_forward
from lacuna.model.head import Head, relative_difference
from lacuna.model.inputs import Inputs
from lacuna.parallel.backbone import backbone

# What transformers calls the layer that makes scores, where lacuna knows how it is used.
_LAYER = "score"


def make_scoring(model_config: PretrainedConfig) -> None:
    """Makes a causal LM's configuration, in place, that of a model that scores.

    Raises `UserError` where transformers has no such model.
    """
    known: Any = AutoModelForSequenceClassification._model_mapping
    kind = known.get(type(model_config), None)
    if kind is None:
        raise UserError(
            "job.task: transformers has no sequence classifier, which a model that scores is, of "
            f"the kind {model_config.model_type!r}: choose another model."
        )
    if asks_for_router_loss(model_config):
        raise UserError(
            "model.output_router_logits: models that score have no load-balancing loss: set it to "
            "false."
        )
    model_config.num_labels = 1
    model_config.architectures = [kind.__name__]


def scoring_model(model_config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Makes a model that scores by transformers' own code; its scores are its output embeddings.

    So all that is done with the head of a causal LM is done with the layer that makes scores.
    Raises `UserError` for a model that has it under a name which lacuna does not know.
    """
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(model_config, **options)
    if not isinstance(getattr(model, _LAYER, None), nn.Linear):
        raise _unknown(model)
    model.get_output_embeddings = MethodType(_layer_of, model)  # type: ignore[method-assign]
    return model


def _layer_of(model: PreTrainedModel) -> nn.Module:
    return model.get_submodule(_LAYER)


def _unknown(model: PreTrainedModel) -> UserError:
    return UserError(
        f"job.task: {type(model).__name__} makes its scores in a way that lacuna does not know: "
        "choose another model."
    )


@torch.no_grad()
def probe_scores(model: PreTrainedModel, compiled: bool) -> Head:
    """The head of a model that scores, once it is sure that its scores are what lacuna reads.

    That is the layer's output at the last token that is no padding. Raises `UserError` otherwise.
    """
    text_config = model.config.get_text_config()
    padding = text_config.pad_token_id
    ids = [token for token in range(min(16, text_config.vocab_size)) if token != padding]
    arguments = {"input_ids": torch.tensor([ids], device=model.device), "use_cache": False}
    scores = model(**arguments).logits.flatten()
    states = backbone(model)(**arguments).last_hidden_state[0, -1:]
    layer: Any = _layer_of(model)
    own = F.linear(states.to(layer.weight.dtype), layer.weight, layer.bias).flatten()
    if scores.shape != own.shape or relative_difference(own, scores) > 1e-4:
        raise _unknown(model)
    return Head(compiled=compiled)


def with_new_scores(slices: dict[str, Any], shadow: PreTrainedModel) -> dict[str, Any]:
    """The tensors of a model's files, with a layer that scores 0 where the files have none.

    Raises `UserError` where theirs gives other than one score.
    """
    for name, stored in slices.items():
        if name == f"{_LAYER}.weight" and stored.get_shape()[0] != 1:
            raise UserError(
                f"model.name_or_path: the model has {stored.get_shape()[0]} labels, and a score is "
                "one number: choose one that has a single label, or a causal LM."
            )
    new = {
        name: torch.zeros(parameter.shape)
        for name, parameter in shadow.named_parameters()
        if name.startswith(f"{_LAYER}.") and name not in slices
    }
    return slices | new


def sequence_scores(model: PreTrainedModel, inputs: Inputs, states: Tensor) -> Tensor:
    """This rank's share of the scores, float32 [sequences], by the hidden states [tokens, width].

    It is 0 for sequences that other ranks score.
    """
    numbers = inputs.columns["scored"].flatten()
    count = len(next(iter(inputs.sequence_columns.values())))
    places = torch.full((count + 1,), -1, device=numbers.device)
    # What is not scored goes to the first place, which is left out.
    places = places.scatter(0, numbers, torch.arange(len(numbers), device=numbers.device))[1:]
    layer = model.get_output_embeddings()
    scores = run_forward(layer, scores_of, states[places.clamp(min=0)])
    return torch.where(places < 0, 0.0, scores)


def scores_of(layer: nn.Linear, states: Tensor) -> Tensor:
    """The scores, float32 [places], of hidden states [places, width].

    The product is float32 whatever these are: in bfloat16 near scores would be the same.
    """
    scores = states.float() @ layer.weight[0].float()
    return scores if layer.bias is None else scores + layer.bias.float()
