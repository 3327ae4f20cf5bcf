"""Pipeline parallelism of any Hugging Face decoder: the model cut into stages from outside, and a step through them."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import Config, refuse
from lacuna.parallel.mesh import Mesh
from lacuna.parallel.precision import compute_dtype
from lacuna.parallel.schedule import held_stages, most_unfinished, pipeline_order, splits_backward


class PassThrough(nn.Module):
    """Stands where another stage's module is, and hands on its input, or what was received if that stage is earlier.

    What is received stands for the embeddings too.
    """

    received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states if self.received is None else self.received


@dataclass(frozen=True)
class Stage:
    """The part of a model that runs its `layers`: `module` is the Hugging Face model with all else left out."""

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
    for _ in range(layers - stages):
        fastest = min(
            range(stages),
            key=lambda index: (counts[index] + head_cost * (index == stages - 1), -index),
        )
        counts[fastest] += 1
    return [range(*bounds) for bounds in pairwise(accumulate(counts, initial=0))]


def keep_own_stages(
    model: PreTrainedModel, layers: nn.ModuleList, mesh: Mesh, config: Config
) -> list[Stage]:
    """Leaves in `model`, in place, only what this rank's stages need; returns these stages.

    Every stage is a shallow copy of the model, so that the model keeps all parameters under their
    names. Hugging Face's own forward runs in each: what it does between embedding and first layer
    is done by later stages as well, on what they received, and thrown away. Raises `UserError` for
    a model with unknown parts before its layers.
    """
    if mesh.layout.pp == 1:
        return [Stage(0, model, layers, PassThrough(), True)]
    held = held_stages(pipeline_order(config.parallelism))
    own, count = held[mesh.rank("pp")], sum(map(len, held.values()))
    ranges = stage_ranges(config.parallelism.pipeline_parallel_split_points, count, model, layers)
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
    """The stages of each layer, and of each module with parameters beside the `path`, which ends with the layers."""
    last, embedding, head = (
        len(ranges) - 1,
        model.get_input_embeddings(),
        model.get_output_embeddings(),
    )
    tied = head is not None and head.weight is embedding.weight
    homes = {path[-1][place]: {stage} for stage, places in enumerate(ranges) for place in places}
    for parent, inner in pairwise(path):
        children = [*parent.children()]
        for place, child in enumerate(children):
            if isinstance(child, nn.Embedding):
                # A tied weight stays known by the embedding's name where the head is.
                homes[child] = {0, last} if tied and child is embedding else {0}
            elif child is not inner and [*child.parameters()]:
                early = place < children.index(inner) and last > 0
                unknown = f"{type(model).__name__} has a {type(child).__name__} before its layers, of no known stage"
                refuse(
                    {
                        f"parallelism.pipeline_parallel_degree: {unknown}: use other parallelisms": early
                    }
                )
                homes[child] = {last}
    return homes


def check_pipeline(config: Config, model_config: PretrainedConfig) -> None:
    """Raises `UserError` for a pipeline that the model cannot be cut for."""
    held, text_config = (
        held_stages(pipeline_order(config.parallelism)),
        model_config.get_text_config(),
    )
    stages, layers = sum(map(len, held.values())), text_config.num_hidden_layers
    recomputed, twice = config.activation_checkpoint.mode, splits_backward(config.parallelism)
    name = config.parallelism.pipeline_parallel_schedule
    reasons = {
        f"makes {stages} stages, more than the {layers} layers of the model: lower pipeline_parallel_degree, or choose "
        "a schedule with one stage per rank (1F1B)": stages > layers,
        "goes backward twice, and compiled layers only once: leave compile.enable out": twice
        and config.compile.enable,
        "goes backward once for each weight, and would recompute a layer every time: set activation_checkpoint.mode = "
        '"none"': twice and recomputed != "none",
        "puts the first and the last stage on one rank, where they cannot share the model's tied embedding: use "
        "another": getattr(text_config, "tie_word_embeddings", False)
        and any({0, stages - 1} <= {*own} for own in held.values()),
    }
    refuse(
        {
            f"parallelism.pipeline_parallel_schedule: {name} {reason}": applies
            for reason, applies in reasons.items()
        }
    )


def stage_ranges(
    points: Sequence[str], stages: int, model: PreTrainedModel, layers: nn.ModuleList
) -> list[range]:
    """Which layers each stage runs: as the split `points` say, else balanced.

    Raises `UserError` for points that are no layers in order.
    """
    if points:
        path = next(name for name, module in model.named_modules() if module is layers)
        names = {f".{path}.{place}": place for place in range(1, len(layers))}
        starts = [
            next((place for name, place in names.items() if name.endswith(f".{point}")), 0)
            for point in points
        ]
        wrong = f"parallelism.pipeline_parallel_split_points: {', '.join(points)} are not layers of the model in order"
        mend = f"name the first layer of every stage but the first, from {path}.1 to {path}.{len(layers) - 1}"
        refuse({f"{wrong}: {mend}": 0 in starts or sorted(set(starts)) != starts})
        return [range(*bounds) for bounds in pairwise([0, *starts, len(layers)])]
    text_config = model.config.get_text_config()
    layer = sum(parameter.numel() for parameter in layers[0].parameters())
    return balanced_stages(
        len(layers), stages, text_config.vocab_size * text_config.hidden_size / layer
    )


class Pipeline:
    """The stages of this rank in torch's schedules. Every rank of a pipeline must make the same calls.

    `run(stage, inputs, reading)` computes a stage: hidden states [..., width], or of the last one
    what `reading` makes of them.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        stages: Sequence[Stage],
        run: Callable[[Stage, Any, Any], Tensor],
    ) -> None:
        self.settings, self.mesh, self.device, self.run = config.parallelism, mesh, device, run
        self.dtype = compute_dtype(config, device.type)
        self.width = stages[0].module.config.get_text_config().hidden_size
        self.owners = {
            stage: rank
            for rank, own in held_stages(pipeline_order(self.settings)).items()
            for stage in own
        }
        self.total = len(self.owners)
        self.stages = {stage.index: stage for stage in stages}
        self.planned: tuple[int, torch.Size] | None = None
        self.sums: dict[int, Tensor] = {}
        for stage in stages:
            stage.module.forward = partial(self._forward, stage)

    def _plan(self, microbatches: int) -> None:
        """Has torch's schedule of steps of so many micro-batches, of any one shape."""
        order = pipeline_order(self.settings, microbatches)
        own_last = [
            action for action in order[self.mesh.rank("pp")] if action.stage == self.total - 1
        ]
        self.graphs = deque[Any](maxlen=most_unfinished(own_last))
        group, stages = self.mesh.named.get_group("pp"), self.stages.values()
        own = [
            PipelineStage(stage.module, stage.index, self.total, self.device, group=group)
            for stage in stages
        ]
        name, file = (
            self.settings.pipeline_parallel_schedule,
            self.settings.pipeline_parallel_schedule_csv,
        )
        kind = schedules._PipelineScheduleRuntime if file else schedules.get_schedule_class(name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule: Any = kind(
            own[0] if single else own, microbatches, loss_fn=self._scaled, scale_grads=False
        )
        if file:
            self.schedule._load_csv(file)

    def _forward(
        self, stage: Stage, received: Tensor, index: Tensor, judged: bool = False
    ) -> Tensor:
        """torch hands tensors only from stage to stage; what else a micro-batch has is looked up by its number."""
        stage.entrance.received = received
        result = self.run(stage, self.inputs[int(index)], self.reading)
        if not stage.is_last or judged:
            return result
        self.sums[int(index)] = (
            result.detach()
        )  # anew, where torch went through it before to learn shapes
        return result[0]

    def _scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        loss = loss / self.divisor
        # torch 2.11 lets go of the graph before a zero-bubble schedule comes to the gradients of
        # the weights; kept longer than that, it would keep its activations.
        self.graphs.append(loss.grad_fn)
        return loss

    def step(self, inputs: Sequence[Any], reading: Any, divisor: Tensor) -> Tensor | None:
        """Forward and backward of all micro-batches of a step; the sums of what `reading` makes.

        Gradients are those of the first of them over `divisor`. None but for the last stage.
        """
        self.inputs = inputs
        self.reading = reading
        self.divisor = divisor
        self.sums.clear()
        form = len(inputs), inputs[0].arguments["input_ids"].shape
        if form != self.planned:
            self._plan(len(inputs))
            self.planned = form
        for stage in self.stages.values():
            # Else the backward pass of one stage shards another's parameters, which zero-bubble
            # schedules then miss.
            stage.module.set_reshard_after_backward(False)
        numbers = torch.arange(len(inputs))
        first = (numbers,) if 0 in self.stages else ()
        self.schedule.step(*first, index=numbers, target=numbers, return_outputs=False)
        self.graphs.clear()
        return torch.stack([*self.sums.values()]).sum(0) if self.sums else None

    def evaluate(self, inputs: Any, reading: Any) -> Tensor | None:
        """What `reading` makes of one micro-batch, forward only; None but for the last stage."""
        self.inputs = [inputs]
        self.reading = reading
        group = self.mesh.named.get_group("pp")
        shape = (*inputs.arguments["input_ids"].shape, self.width)
        hidden = torch.zeros((), device=self.device)
        for index, stage in self.stages.items():
            if index and index - 1 not in self.stages:
                hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
                dist.recv(hidden, group=group, group_src=self.owners[index - 1])
            hidden = stage.module(hidden, torch.zeros(1, dtype=torch.int64), judged=True)
            if not stage.is_last and index + 1 not in self.stages:
                dist.send(hidden, group=group, group_dst=self.owners[index + 1])
        return hidden if self.total - 1 in self.stages else None


def tied_weights(model: PreTrainedModel, mesh: Mesh) -> list[nn.Parameter]:
    """The trained weight that this rank's stage shares with that at the other end of the pipeline, if there is one."""
    tied = mesh.ends is not None and getattr(
        model.config.get_text_config(), "tie_word_embeddings", False
    )
    return (
        [weight for weight in [model.get_input_embeddings().weight] if weight.requires_grad]
        if tied
        else []
    )


def add_tied_gradients(model: PreTrainedModel, mesh: Mesh) -> None:
    """Gives the copies that the first and the last stage have of a tied weight the sum of their gradients, in place."""
    for weight in tied_weights(model, mesh):
        dist.all_reduce(weight.grad.to_local(), group=mesh.ends)
