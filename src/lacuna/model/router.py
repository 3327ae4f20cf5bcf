"""The load-balancing loss of a mixture of experts, as transformers' models define it.

Its gradient needs how often each expert is chosen in all of a step. So no graph of all layers is
kept for it. Where a router's logits are made they are counted, and a node is put behind them that
adds their gradient when the backward pass comes by. It is an operation of its own, so that compiled
layers, recomputed ones and those of any stage of a pipeline do the same.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.data import Batch
from lacuna.model.forward import run_backbone
from lacuna.model.inputs import Inputs

if TYPE_CHECKING:  # both import this
    from lacuna.model.build import BuiltModel
    from lacuna.model.head import Head

_numbers = itertools.count()
_ROUTERS: WeakValueDictionary[int, "Router"] = WeakValueDictionary()
"""Those of the run's models, by the number that operations know them by."""


class Router:
    """The load-balancing loss of a model, in the course of a step.

    Attributes:
        coefficient: what the loss is multiplied by.
        chosen, experts: how many experts are chosen for a token, and of how many.
        real: which tokens of the micro-batch at hand are no padding, bool [B, T]; None outside of
            steps.
        counts: what each router found of the micro-batch at hand, float32 [2, experts + 1]: how
            often each expert is chosen, and the sums of their probabilities. The last numbers are
            those of tokens.
        passes: these of each micro-batch in each stage of this rank.
        choices: the sum of the first over all routers, micro-batches and ranks, once it is known.
        is_training: whether a step is going on; outside of steps nothing is counted.
    """

    def __init__(self, coefficient: float, chosen: int, experts: int = 0) -> None:
        self.coefficient = coefficient
        self.chosen = chosen
        self.experts = experts
        self.real: Tensor | None = None
        self.counts: list[Tensor] = []
        self.passes: dict[tuple[int, int], tuple[Inputs, list[Tensor]]] = {}
        self.choices: Tensor | None = None
        self.is_training = False
        self.number = next(_numbers)
        _ROUTERS[self.number] = self

    def watch(self, model: PreTrainedModel, layers: Iterable[nn.Module]) -> None:
        """Has the routers of the layers of a `model` count and learn by this one, in place."""
        for layer in layers:
            for part, index in _recorded(model, layer):
                part.register_forward_hook(partial(self._attach, index))
            for part in layer.modules():
                if hasattr(part, "tell_piece"):
                    part.tell_piece = self.of_piece  # type: ignore[assignment]

    def _attach(self, index: int, _: nn.Module, __: Any, output: Any) -> Any:
        """Puts the loss behind another result than the logits, which nobody else may use."""
        if not isinstance(output, tuple):
            return _balanced(output, output, self.number)[0]
        others = [place for place, one in enumerate(output) if _is_float(one) and place != index]
        place = others[0] if others else index
        attached = _balanced(output[place], output[index], self.number)[0]
        return (*output[:place], attached, *output[place + 1 :])

    def of_piece(
        self, compute: Callable[..., Tensor], index: int, pieces: int, *given: Any, **named: Any
    ) -> Tensor:
        """What a block makes of one piece of the sequence, of whose tokens routers then count."""
        whole = self.real
        if whole is not None:
            self.real = whole.chunk(pieces, dim=1)[index]
        try:
            return compute(*given, **named)
        finally:
            self.real = whole

    def begin(self, built: "BuiltModel", batches: Sequence[Batch]) -> None:
        """Begins a step.

        Where there is more than one forward pass before its last backward pass, choices are counted
        by a pass of each micro-batch without gradients. It has the random numbers of training,
        except in pipelines, which may go through micro-batches in another order.
        """
        self.is_training = True
        self.choices = None
        self.passes.clear()
        if built.pipeline is None and len(batches) == 1:
            return
        devices = [built.device] if built.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            for batch in batches:
                built.read(batch, _look)
        self.settle()
        self.passes.clear()

    def enter(self, inputs: Inputs, stage: int = 0) -> None:
        """Begins the forward pass of a micro-batch. Outside of steps that is nothing.

        A pass that is made twice, as torch does to learn a pipeline's shapes, counts once.
        """
        if self.is_training:
            self.real = _real_tokens(inputs)
            self.counts = []
            # With the inputs, so that no others get their number while the step lasts.
            self.passes[stage, id(inputs)] = inputs, self.counts

    def leave(self, result: Tensor) -> Tensor:
        """Ends it: when the backward pass comes to `result`, tokens are those of now again."""
        apply: Callable[..., Tensor] = _Remembering.apply
        return apply(result, self, self.real)

    def settle(self) -> None:
        """Makes the choices of the step known to all ranks, before the first backward pass."""
        if self.choices is None:
            self.choices = self.found()[0]
            if dist.is_initialized():
                dist.all_reduce(self.choices)

    def finish(self) -> Tensor:
        """Ends a step; returns this rank's share of its loss. The shares add up over ranks."""
        loss = (self.weights() * self.found()[1, :-1]).sum()
        self.choices = None
        self.real = None
        self.passes.clear()
        self.is_training = False
        return loss

    def found(self) -> Tensor:
        """The sum of all counts of this rank, which may have no router."""
        assert self.real is not None, "there was a forward pass"
        nothing = torch.zeros(2, self.experts + 1, device=self.real.device)
        return torch.stack(
            [nothing, *(one for _, each in self.passes.values() for one in each)]
        ).sum(0)

    def weights(self) -> Tensor:
        """What each expert's probabilities are multiplied by in the loss [experts].

        The loss is the number of experts times sum(choices * probabilities), where both are means
        over all layers and tokens, as in Switch Transformers (arXiv 2101.03961), equations 4 to 6.
        """
        assert self.choices is not None, "choices are counted before a backward pass"
        tokens = self.choices[-1].clamp(min=1)
        experts = len(self.choices) - 1
        return self.choices[:-1] * (self.coefficient * experts / tokens.square())

    def count(self, logits: Tensor, real: Tensor) -> None:
        """Adds what a router found of tokens, float32 [tokens, experts], of which some are real."""
        self.experts = logits.shape[1]
        picked = logits.topk(self.chosen, dim=-1).indices
        hits = torch.zeros_like(logits).scatter_(1, picked, 1.0)
        found = real @ torch.stack([hits, logits.softmax(-1)])
        self.counts.append(torch.cat([found, real.sum().expand(2, 1)], dim=1))


class _Remembering(torch.autograd.Function):
    """Nothing, but that its backward pass tells the router which micro-batch is gone through."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, router: Router, real: Tensor) -> Tensor:
        ctx.router = router
        ctx.real = real
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.router.real = ctx.real
        return gradients[0], None, None


@torch.library.custom_op("lacuna::balanced", mutates_args=())
def _balanced(carrier: Tensor, logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """A copy of `carrier`, and which tokens of the logits count, float32 [tokens].

    In its backward pass logits get the gradient of their share of the loss.
    """
    router = _ROUTERS[number]
    rows = logits.flatten(0, -2)
    if not router.is_training or router.real is None:
        return carrier.clone(), rows.new_zeros(len(rows), dtype=torch.float32)
    real = router.real.flatten().float()
    is_repeated = torch._C._current_graph_task_id() != -1
    if not is_repeated:
        router.count(rows.float(), real)
    return carrier.clone(), real


@_balanced.register_fake
def _(carrier: Tensor, logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    tokens = logits.numel() // logits.shape[-1]
    return torch.empty_like(carrier), logits.new_empty(tokens, dtype=torch.float32)


@torch.library.custom_op("lacuna::balance_gradient", mutates_args=())
def _gradient(logits: Tensor, real: Tensor, number: int) -> Tensor:
    """The gradient of the loss by logits, of which `real` says which tokens count."""
    weights = _ROUTERS[number].weights()
    probabilities = logits.flatten(0, -2).float().softmax(-1)
    excess = weights - (probabilities @ weights)[:, None]
    return (probabilities * excess * real[:, None]).view_as(logits).to(logits.dtype)


@_gradient.register_fake
def _(logits: Tensor, real: Tensor, number: int) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    _, logits, ctx.number = inputs
    ctx.save_for_backward(logits, output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    return gradient, _gradient(*ctx.saved_tensors, ctx.number), None


_balanced.register_autograd(_backward, setup_context=_save)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _recorded(model: PreTrainedModel, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The parts of a layer whose logits transformers records, and where in what they return."""
    recorders: Any = (getattr(type(model), "_can_record_outputs", None) or {}).get("router_logits")
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        kind = getattr(recorder, "target_class", None)
        for name, part in layer.named_modules():
            within = f".{recorder.layer_name}." if kind and recorder.layer_name else "."
            if kind is not None and isinstance(part, kind) and within in f".{name}.":
                yield part, recorder.index


def _look(model: PreTrainedModel, head: "Head", inputs: Inputs) -> Tensor:
    run_backbone(model, head, inputs)
    return torch.zeros(())


def _real_tokens(inputs: Inputs) -> Tensor:
    """Which of the tokens that this rank's layers see are no padding, bool [B, T]."""
    real = inputs.columns["real"]
    if inputs.gather is not None:  # layers see this rank's slice of the sequence
        real = real.chunk(inputs.gather.size(), 1)[inputs.gather.get_local_rank()]
    return real
