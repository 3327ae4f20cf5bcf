"""A training step through the stages of a pipeline, and the weight that its two ends share."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import PreTrainedModel

from lacuna.config.machine import ParallelismConfig
from lacuna.parallel.fsdp import local
from lacuna.parallel.mesh import Mesh
from lacuna.parallel.schedule import (
    held_stages,
    most_unfinished,
    pipeline_order,
    splits_backward,
)
from lacuna.parallel.stages import Stage


class Pipeline:
    """Runs the stages of this rank by torch's schedules.

    Every rank of a pipeline must make the same calls. `run(stage, inputs, reading)` computes a
    stage. It returns hidden states [..., width] in `dtype`, or for the last stage what `reading`
    makes of the forward pass.
    """

    def __init__(
        self,
        settings: ParallelismConfig,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        stages: Sequence[Stage],
        run: Callable[[Stage, Any, Any], Tensor],
    ) -> None:
        self.settings = settings
        self.mesh = mesh
        self.device = device
        self.dtype = dtype
        self.run = run
        self.width = stages[0].module.config.get_text_config().hidden_size
        held = held_stages(pipeline_order(settings))
        self.owners = {stage: rank for rank, own in held.items() for stage in own}
        self.total = len(self.owners)
        self.stages = {stage.index: stage for stage in stages}
        self.scheduled: tuple[int, torch.Size] | None = None
        self.sums: dict[int, Tensor] = {}
        self.graphs = {index: deque[Any](maxlen=0) for index in self.stages}
        for stage in stages:
            stage.module.forward = partial(self._forward, stage)

    def _make_schedule(self, microbatches: int) -> None:
        """Makes torch's schedule for steps of so many micro-batches, all of one shape."""
        order = pipeline_order(self.settings, microbatches)[self.mesh.rank("pp")]
        if splits_backward(self.settings):
            # Before torch 2.13, a stage's graph was dropped after the gradients of its inputs, and
            # autograd functions in it with it, which the gradients of its weights still need. Kept
            # longer than needed, it would keep its activations.
            for stage in self.stages:
                own_actions = [action for action in order if action.stage == stage]
                self.graphs[stage] = deque(maxlen=most_unfinished(own_actions))
        group = self.mesh.named.get_group("pp")
        own = [
            PipelineStage(stage.module, index, self.total, self.device, group=group)
            for index, stage in self.stages.items()
        ]
        file = self.settings.pipeline_parallel_schedule_csv
        kind: Any = schedules._PipelineScheduleRuntime
        if file is None:
            kind = schedules.get_schedule_class(self.settings.pipeline_parallel_schedule)
        parts = own[0] if issubclass(kind, schedules.PipelineScheduleSingle) else own
        self.schedule = kind(parts, microbatches, loss_fn=self._divide_by_count, scale_grads=False)
        if file is not None:
            self.schedule._load_csv(file)

    def _forward(
        self, stage: Stage, received: Tensor, index: Tensor, judged: bool = False
    ) -> Tensor:
        """Computes a stage for the micro-batch of this index.

        torch hands only tensors from stage to stage; the rest of a micro-batch is looked up.
        """
        stage.entrance.received = received
        result = self.run(stage, self.inputs[int(index)], self.reading)
        if judged:
            return result
        if not stage.is_last:
            self.graphs[stage.index].append(result.grad_fn)
            return result
        # torch may have gone through it before, to learn shapes: this result then counts.
        self.sums[int(index)] = result.detach()
        return result[0]

    def _divide_by_count(self, loss: Tensor, _: Tensor) -> Tensor:
        """The loss of a micro-batch as it is minimised: divided by the count of the step."""
        loss = loss / self.divisor
        self.graphs[self.total - 1].append(loss.grad_fn)
        return loss

    def step(self, inputs: Sequence[Any], reading: Any, divisor: Tensor) -> Tensor | None:
        """Does the forward and backward passes of all micro-batches of a step.

        Returns the sums that `reading` makes, or None on ranks without the last stage. The
        gradients are those of the first sum divided by `divisor`.
        """
        self.inputs = inputs
        self.reading = reading
        self.divisor = divisor
        self.sums.clear()
        form = len(inputs), inputs[0].arguments["input_ids"].shape
        if form != self.scheduled:
            self._make_schedule(len(inputs))
            self.scheduled = form
        for stage in self.stages.values():
            # Else the backward pass of one stage would shard the parameters of another, which
            # zero-bubble schedules would then miss.
            if isinstance(stage.module, FSDPModule):
                stage.module.set_reshard_after_backward(False)
        numbers = torch.arange(len(inputs))
        first = (numbers,) if 0 in self.stages else ()
        self.schedule.step(*first, index=numbers, target=numbers, return_outputs=False)
        for graphs in self.graphs.values():
            graphs.clear()
        return torch.stack([*self.sums.values()]).sum(0) if self.sums else None

    def evaluate(self, inputs: Any, reading: Any) -> Tensor | None:
        """What `reading` makes of a forward pass of a micro-batch; None without the last stage."""
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
    """The trained weight, if any, that this rank's stage shares with the pipeline's other end."""
    if mesh.ends is None or not model.all_tied_weights_keys:
        return []
    weight = model.get_input_embeddings().get_parameter("weight")
    return [weight] if weight.requires_grad else []


def add_tied_gradients(model: PreTrainedModel, mesh: Mesh) -> None:
    """Gives both copies of a weight that a pipeline's ends share the sum of their gradients."""
    for weight in tied_weights(model, mesh):
        assert weight.grad is not None, "its gradients are added after a backward pass"
        dist.all_reduce(local(weight.grad), group=mesh.ends)
