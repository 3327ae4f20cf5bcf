"""Weights kept in two halves: the bfloat16 numbers that are computed with, and what these lack."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import logger
from lacuna.model.build import BuiltModel
from lacuna.model.layers.casting import Cast, compute_in
from lacuna.model.layers.linear import is_matrix
from lacuna.model.probe import FAULTS, in_one_line
from lacuna.model.specimen import LENGTH, specimen, tokens_to_try
from lacuna.parallel.precision import compute_dtype
from lacuna.train.one_kernel import OneKernelAdamW
from lacuna.train.optimizer import WholeWeights, optimizer_tensors

_LARGEST = torch.iinfo(torch.int16).max


def halves_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16 numbers to a float32 weight, and what its bits are beyond them, int16.

    Where two numbers are as near, and the even one is the nearer to zero, the weight's last bit
    changes.
    """
    near = weight.to(torch.bfloat16)
    rest = weight.view(torch.int32) - (near.view(torch.int16).int() << 16)
    return near, rest.clamp_(-_LARGEST - 1, _LARGEST).short()


def whole_of(near: Tensor, rest: Tensor) -> Tensor:
    """The float32 weight of which these are the halves."""
    return ((near.view(torch.int16).int() << 16) + rest).view(torch.float32)


class SplitWeights:
    """Keeps a model's weights in halves while it computes, which spares a cast at each use.

    Both halves are where the whole weight was. What is computed stays the same: the gradient of a
    matrix that one micro-batch uses once is rounded to bfloat16 either way (`weights_to_split`).
    Those of several micro-batches are added up in float32, beside the weights: the compiler refuses
    weights that have gradients of another dtype.

    Attributes:
        memory: the weights that are split -> where each is, as float32.
        sums: the weights -> their gradients of the micro-batches so far, float32.
        is_adding: whether gradients go there.
    """

    def __init__(
        self, model: PreTrainedModel, weights: list[nn.Parameter], optimizer: OneKernelAdamW
    ) -> None:
        optimizer_tensors(model, optimizer)  # state is made in the dtype that weights have
        self.optimizer = optimizer
        self.memory = {weight: weight.data for weight in weights}
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.is_adding = False
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self._add)
        self._split()

    @contextmanager
    def accumulate(self, micro_batches: int) -> Iterator[None]:
        """Within it gradients of a step are computed, from none; after it the weights have them."""
        for weight in self.memory:
            weight.grad_dtype = torch.bfloat16
        self.is_adding = micro_batches > 1
        yield
        for weight, total in self.sums.items():
            weight.grad_dtype = torch.float32
            weight.grad = total
        self.sums.clear()

    def _add(self, weight: Any) -> None:
        """Moves the gradient that a weight has got to the sums, where there are to be several."""
        if not self.is_adding or weight.grad is None:
            return
        if weight in self.sums:
            self.sums[weight] += weight.grad
        else:
            self.sums[weight] = weight.grad.float()
        weight.grad = None

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within it weights are whole, in place; gradients that a failed step left are dropped."""
        self._join()
        try:
            yield
        finally:
            self._split()

    @torch.no_grad()
    def _split(self) -> None:
        for weight, memory in self.memory.items():
            near, rest = halves_of(memory)
            upper, lower = memory.flatten().view(torch.int16).chunk(2)
            upper.copy_(near.flatten().view(torch.int16))
            lower.copy_(rest.flatten())
            weight.data = upper.view(torch.bfloat16).view_as(memory)
            weight.grad_dtype = torch.bfloat16
            self.optimizer.rests[weight] = lower

    @torch.no_grad()
    def _join(self) -> None:
        self.sums.clear()
        for weight, memory in self.memory.items():
            weight.grad = None
            rest = self.optimizer.rests.pop(weight).view_as(memory)
            memory.copy_(whole_of(weight, rest))
            weight.data = memory
            weight.grad_dtype = torch.float32


class _Casts(TorchFunctionMode):
    """Within it, counts how often tensors are cast, by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[int] = Counter()

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, given: Any = (), named: Any = None
    ) -> Any:
        if function is torch.Tensor.to:
            self.times[id(given[0])] += 1
        return function(*given, **(named or {}))


def _kind_of(name: str) -> str:
    """A weight's name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _used_once(model_config: PretrainedConfig, device: torch.device) -> set[str]:
    """The kinds of weights that a forward pass of such a model casts once each, by their names.

    A model in small tells, of which layers share their weights. What is cast to be asked for its
    shape alone counts as if it were used. Of a model that does not run by itself none are known.
    """
    model = specimen(model_config, device=device).train()
    compute_in(model, torch.bfloat16)
    tokens = tokens_to_try(model_config)
    ids = torch.arange(LENGTH, device=device)[None] % len(tokens) + tokens.start
    casts = _Casts()
    try:
        with torch.no_grad(), casts:
            model(input_ids=ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except FAULTS as fault:
        logger.info("weights stay whole: a model in small does not run (%s)", in_one_line(fault))
        return set()
    named = [(name, id(one)) for name, one in model.named_parameters(remove_duplicate=False)]
    names = Counter(weight for _, weight in named)
    used = {_kind_of(name) for name, weight in named if casts.times[weight]}
    return used - {_kind_of(name) for name, weight in named if casts.times[weight] > names[weight]}


def weights_to_split(model: PreTrainedModel, device: torch.device) -> list[nn.Parameter]:
    """The weights of a model that computes in bfloat16 that may be kept in halves on a `device`.

    They are learnt, and cast once in a pass: gradients of several uses are added up in float32 only
    while a weight is whole. So are those of an embedding's rows, and in compiled code those of what
    is no matrix.
    """
    names = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    found = {
        f"{path}.{name}": weight
        for path, module in model.named_modules()
        if isinstance(module, Cast)
        for name, weight in module.named_parameters(recurse=False)
        if names[id(weight)] == 1 and _can_be_split(module, name, weight)
    }
    once = _used_once(model.config, device) if found else set()
    return [weight for name, weight in found.items() if _kind_of(name) in once]


def _can_be_split(module: nn.Module, name: str, weight: nn.Parameter) -> bool:
    """Whether a weight of a module is a matrix of this process that is learnt, and cast there."""
    is_cast = isinstance(getattr(type(module), name, None), property)
    is_local_matrix = is_matrix(module, name, weight) and not isinstance(weight, DTensor)
    # The kernel is fastest where all tensors begin at multiples of 16 bytes.
    return is_cast and is_local_matrix and weight.requires_grad and weight.numel() % 8 == 0


def split_weights(built: BuiltModel, optimizer: OneKernelAdamW) -> SplitWeights | WholeWeights:
    """Keeps in halves, in place, the weights of a model that can be."""
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    # torch's own kernel updates others, and all with them.
    suits = all(one.dtype == torch.float32 and one.is_contiguous() for one in trained)
    if not suits or compute_dtype(built.training, built.device.type) != torch.bfloat16:
        return WholeWeights()
    weights = weights_to_split(built.model, built.device)
    if not weights:
        return WholeWeights()
    numbers = sum(weight.numel() for weight in weights)
    logger.info("weights: %.1f M are kept as bfloat16 and the bits that it lacks", numbers / 1e6)
    return SplitWeights(built.model, weights, optimizer)
