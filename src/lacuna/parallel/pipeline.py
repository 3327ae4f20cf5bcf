"""A training step through the stages of a pipeline, and the weight that its two ends share."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import PreTrainedModel

from lacuna.config.machine import ParallelismConfig
from lacuna.parallel.mesh import Mesh
from lacuna.parallel.schedule import held_stages, most_unfinished, pipeline_order
from lacuna.parallel.stages import Stage


class Pipeline:
    """The stages of this rank in torch's schedules.

    Every rank of a pipeline must make the same calls. `run(stage, inputs, loss)` computes a stage:
    hidden states [..., width] in `dtype`, or of the last one the sums of `loss`, of which the first
    is minimised.
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
        for stage in stages:
            stage.module.forward = partial(self._forward, stage)

    def _make_schedule(self, microbatches: int) -> None:
        """Makes torch's schedule of steps of so many micro-batches, of any one shape."""
        order = pipeline_order(self.settings, microbatches)[self.mesh.rank("pp")]
        of_last = [action for action in order if action.stage == self.total - 1]
        self.graphs = deque[Any](maxlen=most_unfinished(of_last))
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
        self.schedule = kind(parts, microbatches, loss_fn=self._divide, scale_grads=False)
        if file is not None:
            self.schedule._load_csv(file)

    def _forward(
        self, stage: Stage, received: Tensor, index: Tensor, judged: bool = False
    ) -> Tensor:
        """Computes a stage for the micro-batch of this index.

        torch hands tensors only from stage to stage; what else a micro-batch has is looked up.
        """
        stage.entrance.received = received
        result = self.run(stage, self.inputs[int(index)], self.loss)
        if not stage.is_last or judged:
            return result
        # Anew, where torch went through it before to learn shapes.
        self.sums[int(index)] = result.detach()
        return result[0]

    def _divide(self, loss: Tensor, _: Tensor) -> Tensor:
        """The loss of a micro-batch as it is minimised."""
        loss = loss / self.divisor
        # torch 2.11 lets go of the graph before a zero-bubble schedule comes to the gradients of
        # the weights; kept longer than that, it would keep its activations.
        self.graphs.append(loss.grad_fn)
        return loss

    def step(self, inputs: Sequence[Any], loss: Any, divisor: Tensor) -> Tensor:
        """Does the forward and backward passes of all micro-batches of a step.

        Returns the sums of `loss` (0 but for the last stage). Gradients are those of the first of
        them over `divisor`.
        """
        self.inputs = inputs
        self.loss = loss
        self.divisor = divisor
        self.sums.clear()
        form = len(inputs), inputs[0].arguments["input_ids"].shape
        if form != self.scheduled:
            self._make_schedule(len(inputs))
            self.scheduled = form
        for stage in self.stages.values():
            # Else the backward pass of one stage shards another's parameters, which zero-bubble
            # schedules then miss.
            stage.module.set_reshard_after_backward(False)
        numbers = torch.arange(len(inputs))
        first = (numbers,) if 0 in self.stages else ()
        self.schedule.step(*first, index=numbers, target=numbers, return_outputs=False)
        self.graphs.clear()
        return torch.stack([*self.sums.values()]).sum(0) if self.sums else self._nothing()

    def _nothing(self) -> Tensor:
        """The sums of a rank that does not have the last stage."""
        return torch.zeros(len(self.loss.names), device=self.device)

    def evaluate(self, inputs: Any, loss: Any) -> Tensor:
        """The sums of `loss` over one micro-batch, forward only (0 but for the last stage)."""
        self.inputs = [inputs]
        self.loss = loss
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
        return hidden if self.total - 1 in self.stages else self._nothing()


def tied_weights(model: PreTrainedModel, mesh: Mesh) -> list[nn.Parameter]:
    """The trained weight that this rank's stage shares with the other end of the pipeline, if any."""
    is_tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if mesh.ends is None or not is_tied:
        return []
    weight = model.get_input_embeddings().weight
    return [weight] if weight.requires_grad else []


def add_tied_gradients(model: PreTrainedModel, mesh: Mesh) -> None:
    """Gives both copies of a weight that a pipeline's ends share the sum of their gradients."""
    for weight in tied_weights(model, mesh):
        dist.all_reduce(weight.grad.to_local(), group=mesh.ends)
