"""Steps of an optimizer in any layout, by gradients that follow from names and steps alone."""

from pathlib import Path

import torch
from torch import Tensor, nn

from lacuna.config import Config
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.build import BuiltModel, build_model
from lacuna.parallel import homes
from lacuna.parallel.fsdp import own_part
from lacuna.parallel.mesh import Layout
from lacuna.train.optimizer import build_optimizer, optimizer_tensors, update
from layouts import Case, pipelined
from tiny import CPU, mesh_of, tokenizer_of_words, whole

TRAINED = torch.tensor(10.0, dtype=torch.float64)
UNCLIPPED = TrainingConfig(seq_len=24, max_norm=0)

TWO_RANKS = {
    "dp_shard 2": Case(Layout(dp_shard=2)),
    "dp_replicate 2": Case(Layout(dp_replicate=2)),
    "tp 2": Case(Layout(tp=2), parallelism={"tensor_parallel_degree": 2}),
    "pp 2": pipelined(Layout(pp=2), 4),
}
FOUR_RANKS = {
    "dp_shard 4": Case(Layout(dp_shard=4)),
    "dp_replicate 2, dp_shard 2": Case(Layout(2, 2)),
    "dp_shard 2, tp 2": Case(Layout(dp_shard=2, tp=2), parallelism={"tensor_parallel_degree": 2}),
    "dp_shard 2, pp 2": pipelined(Layout(dp_shard=2, pp=2), 4),
    "tp 2, pp 2": pipelined(Layout(tp=2, pp=2), 4),
}


def build(
    folder: Path,
    case: Case,
    settings: OptimizerConfig,
    training: TrainingConfig = UNCLIPPED,
) -> BuiltModel:
    config = Config(
        model=ModelConfig(config=str(folder)),
        training=training,
        optimizer=settings,
        parallelism={"pipeline_parallel_degree": case.layout.pp} | case.parallelism,
    )
    return build_model(config, tokenizer_of_words(), mesh_of(case.layout), CPU)


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """A gradient that follows from the parameter's name and the step."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + step)
    return torch.randn(shape, generator=generator)


def give_gradients(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        full = gradient(name, parameter.shape, step)
        parameter.grad = parameter.detach().clone()
        local = getattr(parameter.grad, "to_local", lambda one=parameter.grad: one)()
        local.copy_(own_part(full, parameter))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole copies of parameters and optimizer state."""
    tensors = dict(model.named_parameters()) | optimizer_tensors(model, optimizer)
    return {name: whole(tensor.detach()).clone() for name, tensor in tensors.items()}


def three_steps(
    folder: Path, cases: list[Case], settings: OptimizerConfig
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The whole parameters before and, with the optimizer's state, after three steps."""
    results = []
    homes.ROUND_VALUES = 4000  # so that there are several rounds
    for case in cases:
        built = build(folder, case, settings)
        before = {name: whole(p.detach()).clone() for name, p in built.model.named_parameters()}
        optimizer = build_optimizer(built.model, settings)
        for step in range(3):
            give_gradients(built.model, step)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * (step + 1)
            update(built, optimizer, TRAINED)
        results.append((before, snapshot(built.model, optimizer)))
    return results
