"""The critic: a model of its own that learns what completions will be worth, token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lacuna.config import Config, UserError, explained, logger
from lacuna.config.adapters import LoraConfig, QuantizationConfig
from lacuna.config.attentions import is_own
from lacuna.config.contradictions import contradictions_of
from lacuna.config.machine import CriticParallelismConfig, ParallelismConfig
from lacuna.data import Batch
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import BuiltModel, build_meta_model, build_model
from lacuna.model.forward import head_input, run_forward
from lacuna.model.head import Head
from lacuna.model.inputs import Inputs
from lacuna.model.loss import Loss
from lacuna.model.scores import scores_of
from lacuna.objective.sample_batches import of_samples, read_batches, whole_rows
from lacuna.objective.sample_rows import LaidOut
from lacuna.parallel.mesh import Layout, Mesh, build_mesh, resolve_layout
from lacuna.parallel.processes import device_type
from lacuna.rollout.groups import Sample

_MEND = "choose another critic"
_MEND_LAYOUT = "change critic_parallelism, or choose another critic"


@dataclass(frozen=True)
class SecondModel:
    """A model that the steps of a run train as well, by an optimizer of its own.

    Attributes:
        name: with which its tensors in checkpoints begin.
        loss: what it minimises, divided by the same count.
        rate: its learning rate beside that of the first model.
        own_batches: gives this rank's batches of a step, where the model is not spread as the first
            one is; None where both have the same.
    """

    name: str
    built: BuiltModel
    loss: Loss
    rate: float
    own_batches: Callable[[], Sequence[Batch]] | None = None


def is_apart(settings: CriticParallelismConfig) -> bool:
    """Whether the critic is spread by `settings` of its own, and not as the model is."""
    return settings != CriticParallelismConfig()


def critic_config(config: Config) -> Config:
    """The settings of a run that would train the critic: one that scores, all of it trained."""
    own: dict[str, object] = {"train_new_tokens_only": False, "router_bias_update_rate": 0.0}
    own |= {"output_router_logits": False, "router_aux_loss_coef": None}
    if config.ppo.critic is not None:
        own |= {"name_or_path": config.ppo.critic, "config": None, "tokenizer_path": None}
        if is_own(config.model.attention):
            own["attention"] = "auto"  # that of its own files
    model = config.model.model_copy(update=own)
    job = config.job.model_copy(update={"task": "reward"})
    whole = {"lora": LoraConfig(), "quantization": QuantizationConfig()}
    spread = (
        config.critic_parallelism if is_apart(config.critic_parallelism) else config.parallelism
    )
    changes = {"model": model, "job": job, "parallelism": spread, **whole}
    return config.model_copy(update=changes)


def layout_beside(settings: ParallelismConfig, ranks: int) -> Layout:
    """The layout of a second model on so many ranks.

    Raises `UserError` for degrees that do not multiply to them, which only a critic's may not.
    """
    try:
        return resolve_layout(settings, ranks)
    except UserError as error:
        raise UserError(f"critic_{error}") from error


def check_critic(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `UserError` for a critic that has other tokens than the model, or cannot be one."""
    for problem in (
        contradictions_of(critic_config(config)) if is_apart(config.critic_parallelism) else ()
    ):
        names, _, reason = problem.partition(": ")
        if names.startswith("parallelism."):
            raise UserError(f"{names.replace('parallelism.', 'critic_parallelism.')}: {reason}")
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
    with explained("ppo.critic", UserError, mend=_MEND):
        build_meta_model(critic_config(config), tokenizer, Layout(), device_type())


def build_critic(
    config: Config, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, device: torch.device
) -> BuiltModel:
    """Builds the critic of a run, spread like its model on `mesh`, or by settings of its own.

    Raises `UserError` for one that cannot be had.
    """
    settings = critic_config(config)
    if is_apart(config.critic_parallelism):
        layout = layout_beside(settings.parallelism, dist.get_world_size())
        with explained("the critic, by [critic_parallelism]", UserError, mend=_MEND_LAYOUT):
            return build_model(settings, tokenizer, build_mesh(layout, device.type), device)
    logger.info("the critic is spread as the model is: critic_parallelism asks for nothing else")
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
    with torch.enable_grad():  # so that they round as in training, like `read_without_gradient`
        states = head_input(model, head, inputs).flatten(0, 1).detach()
    return whole_rows(run_forward(model.get_output_embeddings(), scores_of, states), inputs)
