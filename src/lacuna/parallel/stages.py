"""The stages of a pipeline: parts of any Hugging Face decoder, whose code stays as it is."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MethodType
from typing import Any, cast

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from lacuna.parallel.mesh import Mesh
from lacuna.parallel.schedule import held_stages, pipeline_order, splits_backward


class PassThrough(nn.Module):
    """Replaces a module of another stage, and hands its input on.

    In the place of modules of earlier stages it hands on what was received, in the place of the
    embedding too.
    """

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states if self.received is None else self.received


@dataclass(frozen=True)
class Stage:
    """A part of a model: `module` is the Hugging Face model without the modules of other stages.

    `layers` are those that it runs, and its `entrance` is given what was received.
    """

    index: int
    module: PreTrainedModel
    layers: Sequence[nn.Module]
    entrance: PassThrough
    is_last: bool


def balanced_stages(layers: int, stages: int, head_cost: float) -> list[range]:
    """The layers that each stage runs, shared so that the slowest stage is as fast as can be.

    A layer costs 1, the head `head_cost`, and the embedding nothing, since it only looks up. Among
    equals the later stage gets one more layer, since earlier ones keep more micro-batches in
    memory.
    """
    counts = [1] * stages
    extra = [0.0] * (stages - 1) + [head_cost]

    def cost(stage: int) -> tuple[float, int]:
        return counts[stage] + extra[stage], -stage

    for _ in range(layers - stages):
        counts[min(range(stages), key=cost)] += 1
    return [range(*bounds) for bounds in pairwise(accumulate(counts, initial=0))]


def keep_own_stages(
    model: PreTrainedModel, layers: nn.ModuleList, mesh: Mesh, settings: ParallelismConfig
) -> list[Stage]:
    """Removes from `model`, in place, all that this rank's stages do not need; returns the stages.

    Every stage is a shallow copy of the model, so that the model keeps all parameters under their
    names. Hugging Face's own forward runs in each stage. What it does between the embedding and the
    first layer, later stages do as well with what they received, and do not use. Raises `UserError`
    for a model with unknown parts before its layers.
    """
    if mesh.layout.pp == 1:
        return [Stage(0, model, [*layers], PassThrough(), True)]
    held = held_stages(pipeline_order(settings))
    own = held[mesh.rank("pp")]
    count = sum(map(len, held.values()))
    ranges = stage_ranges(settings.pipeline_parallel_split_points, count, model, layers)
    homes = stages_by_module(model, layers, ranges)
    stages = [stage_of(model, layers, ranges, index) for index in own]
    for name, module in [*model.named_modules()]:
        if module in homes and homes[module].isdisjoint(own):
            model.set_submodule(name, PassThrough())
    return stages


def path_to(layers: nn.ModuleList, model: PreTrainedModel) -> list[nn.Module]:
    """The modules that contain the list of layers, from the model inwards, and the list itself."""
    return [module for module in model.modules() if layers in module.modules()]


def stage_of(
    model: PreTrainedModel, layers: nn.ModuleList, ranges: Sequence[range], index: int
) -> Stage:
    """A stage of a whole model: a shallow copy with stand-ins for what other stages have."""
    entrance = PassThrough()
    # fla's layers return more than their hidden states, and are run whatever their number.
    omits = type(model.config).__module__.startswith("fla.")
    stand_ins: dict[nn.Module, nn.Module] = {}
    for module, home in stages_by_module(model, layers, ranges).items():
        if index not in home:
            stand_ins[module] = entrance if min(home) < index else PassThrough()
    for module in reversed(
        path_to(layers, model)
    ):  # outwards: a copy holds the copy of what is in it
        copied = copy.copy(module)
        copied._modules = {
            name: None if child is None else stand_ins.get(child, child)
            for name, child in module._modules.items()
            if not (module is layers and omits and child in stand_ins)
        }
        for name, value in vars(module).items():
            if getattr(value, "__self__", None) is module:  # a method of this module alone
                setattr(copied, name, MethodType(value.__func__, copied))
        stand_ins[module] = copied
    own_layers = [layers[place] for place in ranges[index]]
    part = cast(PreTrainedModel, stand_ins[model])
    return Stage(index, part, own_layers, entrance, index == len(ranges) - 1)


def stages_by_module(
    model: PreTrainedModel, layers: nn.ModuleList, ranges: Sequence[range]
) -> dict[nn.Module, set[int]]:
    """The stages of each layer, and of each module with parameters beside the path to the layers.

    Raises `UserError` for a model with unknown parts before its layers.
    """
    last = len(ranges) - 1
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    homes = {layers[place]: {stage} for stage, places in enumerate(ranges) for place in places}
    for parent, inner in pairwise(path_to(layers, model)):
        children = [*parent.children()]
        for place, child in enumerate(children):
            if isinstance(child, nn.Embedding):
                # Where the head is, a tied weight keeps the embedding's name.
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


def check_pipeline(
    parallelism: ParallelismConfig,
    compiled: CompileConfig,
    recomputed: ActivationCheckpointConfig,
    model_config: PretrainedConfig,
) -> None:
    """Raises `UserError` for a pipeline into which the model cannot be cut."""
    text_config = model_config.get_text_config()
    held = held_stages(pipeline_order(parallelism)).values()
    stages = sum(map(len, held))
    layers = text_config.num_hidden_layers
    twice = splits_backward(parallelism)
    is_tied = getattr(text_config, "tie_word_embeddings", False)
    reason = None
    if stages > layers:
        reason = (
            f"makes {stages} stages, more than the {layers} layers of the model: lower "
            "pipeline_parallel_degree, or choose a schedule with one stage per rank (1F1B)"
        )
    elif twice and compiled.enable:
        reason = "goes backward twice, and compiled layers only once: leave compile.enable out"
    elif twice and (recomputed.mode != "none" or recomputed.mlp_chunks > 1):
        reason = (
            "goes backward once for each weight, and would recompute a layer every time: set "
            'activation_checkpoint.mode = "none", and leave mlp_chunks out'
        )
    elif is_tied and any({0, stages - 1} <= {*own} for own in held):
        reason = (
            "puts the first and the last stage on one rank, where they cannot share the model's "
            "tied embedding: use another"
        )
    if reason is not None:
        name = parallelism.pipeline_parallel_schedule
        raise UserError(f"parallelism.pipeline_parallel_schedule: {name} {reason}.")


def stage_ranges(
    points: Sequence[str], stages: int, model: PreTrainedModel, layers: nn.ModuleList
) -> list[range]:
    """The layers that each stage runs: as the split `points` say, or balanced without points.

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
