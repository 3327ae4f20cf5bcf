"""The stages of a pipeline: parts of any Hugging Face decoder, which is cut from outside."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.config.machine import ParallelismConfig
from lacuna.parallel.mesh import Mesh
from lacuna.parallel.schedule import held_stages, pipeline_order, splits_backward


class PassThrough(nn.Module):
    """Stands where another stage's module is, and hands on its input.

    If that stage is earlier, it hands on what was received, which stands for the embeddings too.
    """

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states if self.received is None else self.received


@dataclass(frozen=True)
class Stage:
    """A part of a model: `module` is the Hugging Face model without what is in other stages.

    `layers` are those that it runs, and its `entrance` is told what was received.
    """

    index: int
    module: PreTrainedModel
    layers: Sequence[nn.Module]
    entrance: PassThrough
    is_last: bool


def balanced_stages(layers: int, stages: int, head_cost: float) -> list[range]:
    """Which layers each stage runs, so that the slowest stage is as fast as can be.

    A layer counts 1, the head `head_cost`; an embedding only looks up and counts nothing. Among
    equals the later stage gets one more, since earlier ones keep more micro-batches in memory.
    """
    counts = [1] * stages

    def cost(stage: int) -> tuple[float, int]:
        return counts[stage] + (head_cost if stage == stages - 1 else 0), -stage

    for _ in range(layers - stages):
        counts[min(range(stages), key=cost)] += 1
    return [range(*bounds) for bounds in pairwise(accumulate(counts, initial=0))]


def keep_own_stages(
    model: PreTrainedModel, layers: nn.ModuleList, mesh: Mesh, settings: ParallelismConfig
) -> list[Stage]:
    """Leaves in `model`, in place, only what this rank's stages need; returns these stages.

    Every stage is a shallow copy of the model, so that the model keeps all parameters under their
    names. Hugging Face's own forward runs in each: what it does between embedding and first layer
    is done by later stages as well, on what they received, and thrown away. Raises `UserError` for
    a model with unknown parts before its layers.
    """
    if mesh.layout.pp == 1:
        return [Stage(0, model, layers, PassThrough(), True)]
    held = held_stages(pipeline_order(settings))
    own = held[mesh.rank("pp")]
    count = sum(map(len, held.values()))
    ranges = stage_ranges(settings.pipeline_parallel_split_points, count, model, layers)
    homes = homes_of(model, path_to(layers, model), ranges)
    stages = [stage_of(model, layers, ranges, index) for index in own]
    for name, module in [*model.named_modules()]:
        if module in homes and homes[module].isdisjoint(own):
            model.set_submodule(name, PassThrough())
    return stages


def path_to(layers: nn.ModuleList, model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the layers are in, from the model inwards, and the list of them."""
    return [module for module in model.modules() if layers in module.modules()]


def stage_of(
    model: PreTrainedModel, layers: nn.ModuleList, ranges: Sequence[range], index: int
) -> Stage:
    """A stage of a model that is whole: a shallow copy in which what is elsewhere is stood in for."""
    path = path_to(layers, model)
    entrance = PassThrough()
    stand_ins: dict[nn.Module, nn.Module] = {}
    for module, home in homes_of(model, path, ranges).items():
        if index not in home:
            stand_ins[module] = entrance if min(home) < index else PassThrough()
    for module in reversed(path):  # outwards: a copy holds the copy of what is in it
        stand_ins[module] = copied = copy.copy(module)
        copied._modules = {
            name: stand_ins.get(child, child) for name, child in module._modules.items()
        }
    own_layers = [layers[place] for place in ranges[index]]
    return Stage(index, stand_ins[model], own_layers, entrance, index == len(ranges) - 1)


def homes_of(
    model: PreTrainedModel, path: Sequence[nn.Module], ranges: Sequence[range]
) -> dict[nn.Module, set[int]]:
    """The stages of each layer, and of each module with parameters beside the `path` to them.

    The path ends with the layers.
    """
    last = len(ranges) - 1
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    homes = {path[-1][place]: {stage} for stage, places in enumerate(ranges) for place in places}
    for parent, inner in pairwise(path):
        children = [*parent.children()]
        for place, child in enumerate(children):
            if isinstance(child, nn.Embedding):
                # A tied weight stays known by the embedding's name where the head is.
                homes[child] = {0, last} if tied and child is embedding else {0}
            elif child is not inner and [*child.parameters()]:
                if place < children.index(inner) and last > 0:
                    raise UserError(
                        f"parallelism.pipeline_parallel_degree: {type(model).__name__} has a "
                        f"{type(child).__name__} before its layers, of no known stage: use other "
                        "parallelisms."
                    )
                homes[child] = {last}
    return homes


def check_pipeline(config: Config, model_config: PretrainedConfig) -> None:
    """Raises `UserError` for a pipeline that the model cannot be cut for."""
    text_config = model_config.get_text_config()
    held = held_stages(pipeline_order(config.parallelism)).values()
    stages = sum(map(len, held))
    layers = text_config.num_hidden_layers
    twice = splits_backward(config.parallelism)
    is_tied = getattr(text_config, "tie_word_embeddings", False)
    reason = None
    if stages > layers:
        reason = (
            f"makes {stages} stages, more than the {layers} layers of the model: lower "
            "pipeline_parallel_degree, or choose a schedule with one stage per rank (1F1B)"
        )
    elif twice and config.compile.enable:
        reason = "goes backward twice, and compiled layers only once: leave compile.enable out"
    elif twice and config.activation_checkpoint.mode != "none":
        reason = (
            "goes backward once for each weight, and would recompute a layer every time: set "
            'activation_checkpoint.mode = "none"'
        )
    elif is_tied and any({0, stages - 1} <= {*own} for own in held):
        reason = (
            "puts the first and the last stage on one rank, where they cannot share the model's "
            "tied embedding: use another"
        )
    if reason is not None:
        name = config.parallelism.pipeline_parallel_schedule
        raise UserError(f"parallelism.pipeline_parallel_schedule: {name} {reason}.")


def stage_ranges(
    points: Sequence[str], stages: int, model: PreTrainedModel, layers: nn.ModuleList
) -> list[range]:
    """Which layers each stage runs: as the split `points` say, else balanced.

    Raises `UserError` for points that are no layers in order.
    """
    if not points:
        text_config = model.config.get_text_config()
        layer = sum(parameter.numel() for parameter in layers[0].parameters())
        head = text_config.vocab_size * text_config.hidden_size
        return balanced_stages(len(layers), stages, head / layer)
    path = next(name for name, module in model.named_modules() if module is layers)
    names = {f".{path}.{place}": place for place in range(1, len(layers))}
    starts = [
        next((place for name, place in names.items() if name.endswith(f".{point}")), 0)
        for point in points
    ]
    if 0 in starts or sorted(set(starts)) != starts:
        raise UserError(
            f"parallelism.pipeline_parallel_split_points: {', '.join(points)} are not layers of "
            "the model in order: name the first layer of every stage but the first, from "
            f"{path}.1 to {path}.{len(layers) - 1}."
        )
    return [range(*bounds) for bounds in pairwise([0, *starts, len(layers)])]
