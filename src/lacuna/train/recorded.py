"""Steps on one GPU whose passes and updates are recorded once, as CUDA graphs, and replayed."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lacuna.config import logger
from lacuna.config.attentions import TRAINED
from lacuna.data import Batch
from lacuna.model.attention import BOUNDS, PACKED, UNTOLD
from lacuna.model.build import BuiltModel
from lacuna.model.forward import loss_sums, run_forward
from lacuna.model.inputs import Inputs
from lacuna.model.loss import Loss
from lacuna.rollout.recording import can_record, record
from lacuna.train.muon import Muon
from lacuna.train.optimizer import LocalAdamW, update
from lacuna.train.watching import draws_of_host, waits_of_host

# Micro-batches of a kind that are computed as ever before one is recorded: code is compiled then.
_BEFORE = 2
# Micro-batches of a kind that are computed both ways, and compared.
_COMPARED = 2
# Kinds that are recorded; each has memory for its own tensors, and all share what is between.
_MOST = 16
# Kinds that are told apart.
_KNOWN = 1024
# Losses, and norms of gradients, of the same micro-batch differ by less, unless a graph has kept
# something of another one.
_TOLERANCE, _TOLERANCE_OF_NORM = 1e-4, 1e-3
# Where a run has taken a larger share of a GPU's memory, there is none for recorded passes beside;
# and where it has taken twice as much with these, none for those of more kinds.
_SHARE = 0.4


@dataclass
class _Kind:
    """Micro-batches that differ in the values of their tensors alone.

    Attributes:
        seen: how many there have been.
        compared: how many of them were computed both ways.
        tensors: where a recorded pass reads its micro-batch, and the divisor of its loss.
        sums: where it leaves its sums.
    """

    sums: Tensor
    seen: int = 0
    compared: int = 0
    tensors: list[Tensor] = field(default_factory=list)
    graph: torch.cuda.CUDAGraph | None = None


class RecordedSteps:
    """Makes the passes and updates of steps as they always are, at little work for the host.

    Micro-batches of a kind that has come before are copied to where the first one lay, and its
    recorded kernels are replayed. Gradients are added up in memory that stays the same from step to
    step, as graphs want it. What cannot be recorded is computed as ever, with a warning.
    """

    def __init__(self, built: BuiltModel, loss: Loss) -> None:
        self.built = built
        self.loss = loss
        self.kinds: dict[Any, _Kind] = {}
        self.parameters = [*built.model.parameters()]
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.memory = torch.cuda.graph_pool_handle()
        self.is_wanted = True
        self.is_first = True  # micro-batch of its step
        self.updates = 0
        self.updating: torch.cuda.CUDAGraph | None = None
        zero = partial(torch.zeros, (), device=built.device)
        self.divisor, self.norm, self.skip = zero(), zero(), zero()
        self.rates: list[Tensor] = []
        self.knows_documents = is_told_of_documents(built)

    def begin(self) -> None:
        """Must be called before the first micro-batch of a step; sets gradients to zeros."""
        self.is_first = True
        if self.gradients:
            torch._foreach_zero_([*self.gradients.values()])
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient

    def add(self, batch: Batch, divisor: Tensor) -> Tensor:
        """Adds a micro-batch's gradients to those of the model; returns the sums of its loss."""
        inputs = self.built.inputs(batch)
        if self.is_wanted:
            # Logits of all tokens: those that are trained are of another number each time, and so
            # each micro-batch would be of a kind of its own.
            inputs = replace(inputs, places=None)
        leaves, spec = tree_flatten((inputs.arguments, inputs.columns))
        # One tensor may be there twice, which compiled code knows.
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        kind = self._kind_of(batch, tensors, leaves, str(spec))
        is_first, self.is_first = self.is_first, False
        if kind is None or not self.is_wanted:
            return self._compute(inputs, divisor)
        kind.seen += 1
        if kind.seen == _BEFORE and self.knows_documents:
            return self._watched(inputs, divisor)
        if kind.graph is None and is_first and self._is_due(kind):
            kept = {number: tensor.clone() for number, tensor in tensors.items()}
            kind.tensors = [*kept.values(), divisor.clone()]
            arguments, columns = tree_unflatten([kept.get(id(one), one) for one in leaves], spec)
            self._record(kind, Inputs(arguments, columns))
        if kind.graph is None or not self.is_wanted:
            return self._compute(inputs, divisor)
        torch._foreach_copy_(kind.tensors, [*tensors.values(), divisor])
        if kind.compared < _COMPARED and is_first:
            return self._compared(kind, inputs, divisor)
        kind.graph.replay()
        return kind.sums

    def update(self, optimizer: torch.optim.AdamW, divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Clips gradients and updates weights as `update` does, and returns what it returns.

        Learning rates are numbers on the device, from the first step on: a graph reads them.
        """
        if not (isinstance(optimizer, (LocalAdamW, Muon)) and optimizer.defaults["fused"]):
            return update(self.built, optimizer, divisor)
        groups = optimizer.param_groups
        given = [group["lr"] for group in groups]
        self.rates = self.rates or [torch.zeros_like(self.norm) for _ in groups]
        for group, number, place in zip(groups, given, self.rates, strict=True):
            group["lr"] = place.fill_(number)
        self.divisor.copy_(divisor)
        self.updates += 1
        if self.is_wanted and self.gradients and not self._has_lasting_gradients():
            self._give_up("other weights are learnt than before")
        is_due = self.updates > _BEFORE and self.gradients and can_record(self.built.device)
        if self.updating is None and is_due and self.is_wanted:
            self._record_update(optimizer)
        if self.updating is None:
            self._update(optimizer)
        else:
            self.updating.replay()
            optimizer.zero_grad(set_to_none=True)
        for group, number in zip(groups, given, strict=True):
            group["lr"] = number
        return self.norm, self.skip

    def _kind_of(
        self, batch: Batch, tensors: dict[int, Tensor], leaves: list[Any], spec: str
    ) -> _Kind | None:
        """The kind of a micro-batch with these tensors; None where it is not to be recorded."""
        rows, length = batch.shape
        if not self.knows_documents and len(batch.cu_seqlens) == rows + 1:
            # transformers leaves the mask out where each row is one document, but never in a graph.
            return None
        places = {number: place for place, number in enumerate(tensors)}
        shapes = tuple((one.shape, one.stride(), one.dtype) for one in tensors.values())
        key = spec, shapes, tuple(places.get(id(leaf), leaf) for leaf in leaves)
        if key not in self.kinds and len(self.kinds) < _KNOWN:
            sums = torch.zeros(len(self.loss.names), device=self.built.device)
            self.kinds[key] = _Kind(sums)
        return self.kinds.get(key)

    def _is_due(self, kind: _Kind) -> bool:
        """Whether a kind of micro-batches is to be recorded now."""
        recorded = sum(other.graph is not None for other in self.kinds.values())
        enough = kind.seen > _BEFORE and recorded < _MOST
        if not (self.gradients and enough and can_record(self.built.device)):
            return False
        total = torch.cuda.get_device_properties(self.built.device).total_memory
        taken = torch.cuda.max_memory_reserved(self.built.device) / total
        if taken > (_SHARE if recorded == 0 else 2 * _SHARE):
            self._give_up(f"{taken:.0%} of the GPU's memory is taken, and graphs take more")
        return self.is_wanted

    def _compute(self, inputs: Inputs, divisor: Tensor) -> Tensor:
        """Computes a micro-batch as ever; gradients are where they come to be the first time."""
        sums = self._pass(inputs, divisor)
        if not self.gradients and self.is_wanted:
            self.gradients = {
                parameter: parameter.grad
                for parameter in self.parameters
                if parameter.grad is not None
            }
        return sums

    def _pass(self, inputs: Inputs, divisor: Tensor) -> Tensor:
        """The pass itself, forward and back; returns the sums of the loss."""
        reading = partial(loss_sums, loss=self.loss)
        sums = run_forward(self.built.model, reading, self.built.head, inputs)
        (sums[0] / divisor).backward()
        return sums.detach()

    def _watched(self, inputs: Inputs, divisor: Tensor) -> Tensor:
        """Computes a micro-batch as ever, and gives up graphs where the host waits for numbers.

        By these it would decide what to compute, which a graph would do as for the first batch.
        """
        with waits_of_host() as waits:
            sums = self._compute(inputs, divisor)
        if waits:
            self._give_up("the model has the host decide by what is in a batch")
        return sums

    def _record(self, kind: _Kind, inputs: Inputs) -> None:
        """Records the passes of a kind, whose micro-batches are copied to these inputs."""

        def passes() -> None:
            kind.sums.copy_(self._pass(inputs, kind.tensors[-1]))

        drawn = draws_of_host()
        before = [parameter.grad for parameter in self.parameters]
        torch.cuda.empty_cache()  # what was computed until now has its own memory
        kind.graph = record(passes, self.built.device, "training", self.memory)
        if kind.graph is None:
            self._drop_graphs()
            return
        if draws_of_host() != drawn:
            self._give_up("the model draws numbers on the CPU, which a graph would repeat")
        after = [parameter.grad for parameter in self.parameters]
        if any(one is not other for one, other in zip(before, after, strict=True)):
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            self._give_up("other weights are learnt than before")

    def _compared(self, kind: _Kind, inputs: Inputs, divisor: Tensor) -> Tensor:
        """Computes the first micro-batch of a step both ways, and gives up graphs if they differ.

        The gradients are those of the usual way.
        """
        assert kind.graph is not None, "it is recorded"
        kind.compared += 1
        state = torch.cuda.get_rng_state()
        kind.graph.replay()
        norm = self._norm()
        self.begin()
        torch.cuda.set_rng_state(state)
        self.is_first = False
        sums = self._compute(inputs, divisor)
        same = partial(torch.allclose, atol=0, equal_nan=True)
        if not same(sums, kind.sums, rtol=_TOLERANCE):
            said = kind.sums.tolist(), sums.tolist()
            self._give_up("a graph's sums of the loss are {}, and the model's {}".format(*said))
        elif not same(self._norm(), norm, rtol=_TOLERANCE_OF_NORM):
            norms = norm.item(), self._norm().item()
            self._give_up("a graph's gradients have the norm {}, the model's {}".format(*norms))
        return sums

    def _norm(self) -> Tensor:
        """The norm of the gradients that there are."""
        norms = torch._foreach_norm([*self.gradients.values()])
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms).float())
        return norm

    def _has_lasting_gradients(self) -> bool:
        """Whether gradients are where they always are, and no other weight has one."""
        return all(one.grad is self.gradients.get(one) for one in self.parameters)

    def _update(self, optimizer: torch.optim.AdamW) -> None:
        norm, skip = update(self.built, optimizer, self.divisor)
        self.norm.copy_(norm)
        self.skip.copy_(skip)

    def _record_update(self, optimizer: torch.optim.AdamW) -> None:
        """Records an update of the weights, of which torch's optimizers want to be told."""
        for group in optimizer.param_groups:
            group["capturable"] = True
        updating = partial(self._update, optimizer)
        self.updating = record(updating, self.built.device, "training", self.memory)
        for group in optimizer.param_groups:
            group["capturable"] = False
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        if self.updating is None:
            self._drop_graphs()

    def _give_up(self, reason: str) -> None:
        """Has all steps made as ever from now on, and says why."""
        self._drop_graphs()
        logger.warning("compile.cuda_graphs: training goes on without them: %s", reason)

    def _drop_graphs(self) -> None:
        """Has all steps made as ever from now on; gradients are no more zeros where there are none.

        What a step has of them stays with its weights until they are updated.
        """
        self.is_wanted = False
        self.updating = None
        self.gradients = {}
        for kind in self.kinds.values():
            kind.graph = None


def is_told_of_documents(built: BuiltModel) -> bool:
    """Whether a model's attention needs no masks, which transformers makes, to know documents."""
    attention = str(built.model.config._attn_implementation)
    return attention.startswith((PACKED, TRAINED, BOUNDS, UNTOLD, "flash_attention"))
