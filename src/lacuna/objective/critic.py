"""The critic: a model of its own that learns what completions will be worth, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config, UserError, explained
from lacuna.config.adapters import LoraConfig, QuantizationConfig
from lacuna.config.attentions import is_own
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import BuiltModel, build_model
from lacuna.model.forward import head_input, run_forward
from lacuna.model.head import Head
from lacuna.model.inputs import Inputs
from lacuna.model.loss import Loss
from lacuna.model.scores import scores_of
from lacuna.objective.sample_batches import (
    LaidOut,
    of_samples,
    read_batches,
    whole_rows,
)
from lacuna.parallel.mesh import Mesh
from lacuna.rollout.groups import Sample

_MEND = "choose another critic"


@dataclass(frozen=True)
class SecondModel:
    """A model that the steps of a run train as well, by an optimizer of its own.

    Attributes:
        name: with which its tensors in checkpoints begin.
        loss: what it minimises, on the same batches and divided by the same count.
        rate: its learning rate beside that of the first model.
    """

    name: str
    built: BuiltModel
    loss: Loss
    rate: float


def critic_config(config: Config) -> Config:
    """The settings of a run that would train the critic: one that scores, all of it trained."""
    own: dict[str, object] = {"train_new_tokens_only": False, "router_bias_update_rate": 0.0}
    if config.ppo.critic is not None:
        own |= {"name_or_path": config.ppo.critic, "config": None, "tokenizer_path": None}
        if is_own(config.model.attention):
            own["attention"] = "auto"  # that of its own files
    model = config.model.model_copy(update=own)
    job = config.job.model_copy(update={"task": "reward"})
    whole = {"lora": LoraConfig(), "quantization": QuantizationConfig()}
    return config.model_copy(update={"model": model, "job": job, **whole})


def check_critic(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `UserError` for a critic that has other tokens than the model."""
    if config.ppo.critic is None:
        return
    try:
        theirs = grown_tokenizer(critic_config(config).model).get_vocab()
    except UserError as error:
        reason = str(error).rpartition(";")[0]  # what would mend it is for the model's own
        raise UserError(
            f"ppo.critic: {reason}; give a Hub id or a folder that has a tokenizer."
        ) from error
    differing = theirs.items() ^ tokenizer.get_vocab().items()
    if differing:
        token, number = min(differing, key=lambda pair: (pair[1], pair[0]))
        of = "the critic" if (token, number) in theirs.items() else "the model"
        raise UserError(
            f"ppo.critic: {config.ppo.critic} has another vocabulary: token {number} is {token!r} "
            f"for {of} alone: choose a critic with the model's tokenizer."
        )


def build_critic(
    config: Config, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, device: torch.device
) -> BuiltModel:
    """Builds the critic of a run, spread like its model.

    Raises `UserError` for one that cannot be had.
    """
    settings = critic_config(config)
    if config.ppo.critic is None:
        return build_model(settings, tokenizer, mesh, device)
    with explained("ppo.critic", UserError, mend=_MEND):
        return build_model(settings, tokenizer, mesh, device)


def values_of_samples(
    critic: BuiltModel, laid: LaidOut, samples: Sequence[Sample]
) -> list[list[float]]:
    """What the critic expects before each token of each sample, by what it has read until then."""
    return of_samples(read_batches(critic, laid.batches, _read_values), laid, samples)


def _read_values(model: PreTrainedModel, head: Head, inputs: Inputs) -> Tensor:
    """The score at every token of whole rows, float32 [B, T]."""
    states = head_input(model, head, inputs).flatten(0, 1)
    return whole_rows(run_forward(model.get_output_embeddings(), scores_of, states), inputs)
