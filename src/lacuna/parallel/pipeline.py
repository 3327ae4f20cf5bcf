"""Pipeline parallelism of any Hugging Face decoder: the model cut into stages from outside, and a step through them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config, UserError, refuse
from lacuna.parallel.fsdp import compute_dtype
from lacuna.parallel.mesh import Mesh
from lacuna.parallel.schedule import held_stages, pipeline_order, schedule_class, splits_backward


class PassThrough(nn.Module):
    """Stands where another stage's module is. Before a stage's first layer it hands on what was received."""

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states if self.received is None else self.received


class _NoEmbedding(nn.Module):
    """Stands for an embedding of the first stage; what is added to is thrown away later."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


@dataclass(frozen=True)
class Stage:
    """The part of a model that runs its `layers`: `module` is the Hugging Face model with all else left out."""

    index: int
    module: PreTrainedModel
    layers: Sequence[nn.Module]
    entrance: PassThrough | None
    is_last: bool


def balanced_stages(layers: int, stages: int, head_cost: float) -> list[range]:
    """Which layers each stage runs, so that the slowest stage is as fast as can be.

    A layer counts 1, the head `head_cost`; an embedding only looks up and counts nothing. Among equals the later stage
    gets one more, since earlier ones keep more micro-batches in memory.
    """
    counts = [1] * stages
    for _ in range(layers - stages):
        loads = [count + (head_cost if index == stages - 1 else 0) for index, count in enumerate(counts)]
        counts[min(range(stages), key=lambda index: (loads[index], -index))] += 1
    starts = [sum(counts[:index]) for index in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def cut(model: PreTrainedModel, layers: nn.ModuleList, mesh: Mesh, config: Config) -> list[Stage]:
    """Leaves in `model`, in place, only what this rank's stages need; returns these stages.

    Every stage is a shallow copy of the model, so that the model keeps all parameters under their names. Hugging
    Face's own forward runs in each: what it does between embedding and first layer is done by later stages as well,
    on what they received, and thrown away. Raises `UserError` for a model with unknown parts before its layers.
    """
    if mesh.layout.pp == 1:
        return [Stage(0, model, layers, None, True)]
    held = held_stages(pipeline_order(config.parallelism))
    points, count = config.parallelism.pipeline_parallel_split_points, sum(map(len, held.values()))
    ranges, own = stage_ranges(points, count, model, layers), held[mesh.rank("pp")]
    names = next(name for name, module in model.named_modules() if module is layers).split(".")
    parents = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    stages = [_stage(model, layers, names, parents, index, ranges) for index in own]
    kept = {id(module) for stage in stages for module in stage.module.modules()}
    for parent, on_path in zip((*parents, layers), (*names, None), strict=True):
        for name, child in parent.named_children():
            if name != on_path and id(child) not in kept:
                parent._modules[name] = PassThrough()
    return stages


def _stage(
    model: PreTrainedModel, layers: nn.ModuleList, names: list[str], parents: list[nn.Module],
    index: int, ranges: Sequence[range],
) -> Stage:  # fmt: skip
    """The stage `index`: copies of the modules from the model down to its layers, with stand-ins."""
    first, last = index == 0, index == len(ranges) - 1
    entrance, own = PassThrough(), ranges[index]
    inner: nn.Module = nn.ModuleList(
        layer if place in own else entrance if place < own.start else PassThrough()
        for place, layer in enumerate(layers)
    )
    for parent, on_path in zip(reversed(parents), reversed(names), strict=True):
        parent = copy.copy(parent)
        parent._modules = {
            name: inner if name == on_path else child if _needed(model, parent, child, on_path, first, last)
            else _NoEmbedding() if isinstance(child, nn.Embedding) else PassThrough()
            for name, child in parent._modules.items()
        }  # fmt: skip
        inner = parent
    return Stage(index, inner, [layers[place] for place in own], None if first else entrance, last)


def _needed(model: PreTrainedModel, parent: nn.Module, child: nn.Module, on_path: str, first: bool, last: bool) -> bool:
    """Whether a stage needs `child`, a sibling of the module that holds the layers or of the layers themselves."""
    if not any(True for _ in child.parameters()):
        return True
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(child, nn.Embedding):
        # A tied weight stays known by the embedding's name where the head is.
        return first or (last and child is embedding and head is not None and head.weight is embedding.weight)
    order = list(parent._modules)
    if order.index(next(name for name, module in parent._modules.items() if module is child)) > order.index(on_path):
        return last
    raise UserError(
        f"parallelism.pipeline_parallel_degree: {type(model).__name__} has a {type(child).__name__} before its layers, "
        f"and lacuna does not know which stage that belongs to: use other parallelisms."
    )


def check_pipeline(config: Config, model_config: PretrainedConfig) -> None:
    """Raises `UserError` for a pipeline that the model cannot be cut for."""
    held, text_config = held_stages(pipeline_order(config.parallelism)), model_config.get_text_config()
    stages, layers = sum(map(len, held.values())), text_config.num_hidden_layers
    recomputed, twice = config.activation_checkpoint, splits_backward(config.parallelism)
    name = config.parallelism.pipeline_parallel_schedule
    reasons = {
        f"makes {stages} stages, more than the {layers} layers of the model: lower pipeline_parallel_degree, or choose "
        "a schedule with one stage per rank (1F1B)": stages > layers,
        "goes backward twice, and compiled layers only once: leave compile.enable out": twice and config.compile.enable,
        'goes backward twice, and recomputation by operation only once: set activation_checkpoint.mode = "full"': (
            twice and (recomputed.mode, recomputed.selective_ac_option) == ("selective", "op")
        ),
        "puts the first and the last stage on one rank, where they cannot share the model's tied embedding: use "
        "another": text_config.tie_word_embeddings and any({0, stages - 1} <= {*own} for own in held.values()),
    }
    refuse({f"parallelism.pipeline_parallel_schedule: {name} {reason}": applies for reason, applies in reasons.items()})


def stage_ranges(points: Sequence[str], stages: int, model: PreTrainedModel, layers: nn.ModuleList) -> list[range]:
    """Which layers each stage runs: as the split `points` say, else balanced.

    Raises `UserError` for points that are no layers in order.
    """
    if points:
        path = next(name for name, module in model.named_modules() if module is layers)
        names = {f".{path}.{place}": place for place in range(1, len(layers))}
        starts = [next((place for name, place in names.items() if name.endswith(f".{point}")), 0) for point in points]
        if 0 in starts or sorted(set(starts)) != starts:
            raise UserError(
                f"parallelism.pipeline_parallel_split_points: {', '.join(points)} are not layers of the model in "
                f"order: name the first layer of every stage but the first, from {path}.1 to {path}.{len(layers) - 1}."
            )
        return [range(*bounds) for bounds in zip([0, *starts], [*starts, len(layers)], strict=True)]
    text_config = model.config.get_text_config()
    layer = sum(parameter.numel() for parameter in layers[0].parameters())
    return balanced_stages(len(layers), stages, text_config.vocab_size * text_config.hidden_size / layer)


class Pipeline:
    """The stages of this rank, and torch's schedule of them. Every rank of a pipeline must make the same calls.

    `run(stage, inputs, received)` computes a stage: hidden states [..., `width`], or of the last stage the summed
    loss.
    """

    def __init__(
        self, config: Config, mesh: Mesh, device: torch.device, stages: Sequence[Stage], width: int, microbatches: int,
        run: Callable[[Stage, Any, Tensor | None], Tensor],
    ) -> None:  # fmt: skip
        self.device, self.mesh = device, mesh
        self.dtype, self.width = compute_dtype(config, device.type), width
        self.held = held_stages(pipeline_order(config.parallelism, microbatches))
        self.total = sum(map(len, self.held.values()))
        self.stages = {stage.index: stage for stage in stages}
        self.inputs: Sequence[Any] = ()
        self.divisor = torch.ones((), device=device)
        for stage in stages:
            stage.module.forward = self._forward(stage, run)
        self.schedule = self._schedule(config, microbatches)

    def _forward(self, stage: Stage, run: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def forward(received: Tensor, index: Tensor) -> Tensor:
            """torch hands tensors only from stage to stage; what else a micro-batch has is looked up by its number."""
            if stage.entrance is not None:
                stage.entrance.received = received
            return run(stage, self.inputs[int(index)], None if stage.entrance is None else received.detach())

        return forward

    def _schedule(self, config: Config, microbatches: int) -> Any:
        group, settings = self.mesh.pipeline, config.parallelism
        stages = [
            PipelineStage(stage.module, index, self.total, self.device, group=group)
            for index, stage in self.stages.items()
        ]
        options = {"loss_fn": lambda loss, _: loss / self.divisor, "scale_grads": False}
        if settings.pipeline_parallel_schedule_csv:
            schedule = _PipelineScheduleRuntime(stages, microbatches, **options)
            schedule._load_csv(settings.pipeline_parallel_schedule_csv)
            return schedule
        kind = schedule_class(settings.pipeline_parallel_schedule)
        return kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, microbatches, **options)

    def step(self, inputs: Sequence[Any], divisor: Tensor) -> Tensor:
        """Forward and backward of all micro-batches of a step; returns the summed loss (0 but for the last stage).

        Gradients are those of the summed loss over `divisor`.
        """
        self.inputs, self.divisor = inputs, divisor
        numbers = torch.arange(len(inputs))
        losses: list[Tensor] = []
        target = {"target": numbers, "losses": losses} if self.total - 1 in self.stages else {}
        self.schedule.step(*((numbers,) if 0 in self.stages else ()), index=numbers, return_outputs=False, **target)
        return torch.stack(losses).detach().sum() * divisor if losses else torch.zeros((), device=self.device)

    def evaluate(self, inputs: Any, shape: Sequence[int]) -> Tensor:
        """What the last stage computes of one micro-batch of `shape`, forward only (zeros [2] on other ranks)."""
        self.inputs = [inputs]
        group = self.mesh.pipeline
        owner = {stage: rank for rank, stages in self.held.items() for stage in stages}
        hidden = torch.zeros((), device=self.device)
        for index, stage in self.stages.items():
            if index and index - 1 not in self.stages:
                hidden = torch.empty((*shape, self.width), dtype=self.dtype, device=self.device)
                dist.recv(hidden, group=group, group_src=owner[index - 1])
            hidden = stage.module(hidden, torch.zeros(1, dtype=torch.int64))
            if not stage.is_last and index + 1 not in self.stages:
                dist.send(hidden, group=group, group_dst=owner[index + 1])
        last = self.stages.get(self.total - 1)
        return hidden if last is not None else torch.zeros(2, device=self.device)


def tied_weights(model: PreTrainedModel, mesh: Mesh) -> list[nn.Parameter]:
    """The weight that this rank's stage shares with the stage at the other end of the pipeline, if there is one."""
    tied = mesh.ends is not None and model.config.get_text_config().tie_word_embeddings
    return [model.get_input_embeddings().weight] if tied else []


def add_tied_gradients(model: PreTrainedModel, mesh: Mesh) -> None:
    """Gives the copies that the first and the last stage have of a tied weight the sum of their gradients, in place."""
    for weight in tied_weights(model, mesh):
        dist.all_reduce(weight.grad.to_local(), group=mesh.ends)
