"""A second model that the steps of a run train as well, with an optimizer of its own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lacuna.config import logger
from lacuna.config.optimizers import OptimizerConfig
from lacuna.data import Batch
from lacuna.formats.checkpoint import model_tensors
from lacuna.formats.reader import read_tensors
from lacuna.model.parameter_groups import used_groups
from lacuna.objective.critic import SecondModel
from lacuna.parallel.processes import Process
from lacuna.train.optimizer import build_optimizer, optimizer_tensors, update
from lacuna.train.step import accumulate_gradients


@dataclass(frozen=True)
class Learner:
    """The second model with its optimizer."""

    model: SecondModel
    optimizer: torch.optim.AdamW

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sums that `train` returns after those of the first model."""
        own = (*self.model.loss.names, "norm")
        return tuple(f"{self.model.name}_{name}" for name in own)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model and its optimizer; all ranks must call it."""
        model = self.model.built.model
        found = model_tensors(model) | optimizer_tensors(model, self.optimizer)
        return {f"{self.model.name}.{name}": tensor for name, tensor in found.items()}

    def train(
        self, batches: Sequence[Batch], divisor: Tensor, rate: float, first: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Trains a step as the first model does, whose sums, norm and skipping are `first`.

        The `batches` are that model's, and this one's too unless it has batches of its own.

        Returns these three of both: the sums of both, this rank's part of them; a norm that is
        finite if both are, and then that of the first; and 1 where either was skipped.
        """
        sums, norm, skip = first
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.model.rate * group.get("lr_ratio", 1.0)
        if self.model.own_batches is not None:
            batches = self.model.own_batches()
        found = accumulate_gradients(self.model.built, batches, self.model.loss, divisor)
        own_norm, own_skip = update(self.model.built, self.optimizer, divisor)
        share = own_norm.to(sums) / dist.get_world_size()
        return (
            torch.cat([sums, found, share[None]]),
            torch.where(torch.isfinite(own_norm), norm, own_norm),
            torch.maximum(skip, own_skip),
        )


def open_learner(
    model: SecondModel, settings: OptimizerConfig, start: str | None, process: Process
) -> Learner:
    """The second model with its optimizer, as the checkpoint `start` left them, if there is one.

    Groups of parameters are the second model's too, but for those that it has nothing of.
    """
    groups = used_groups(model.built.model, settings)
    for group in settings.groups:
        if group not in groups:
            logger.info(
                "%r of optimizer.groups matches nothing of the %s", group.pattern, model.name
            )
    settings = settings.model_copy(update={"groups": groups})
    learner = Learner(model, build_optimizer(model.built.model, settings))
    if start is not None:
        read_tensors(start, learner.tensors(), process, f"{model.name}.")
    return learner
