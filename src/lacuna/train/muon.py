"""Muon: the update of a matrix is made orthogonal, on the matrix' home rank; the rest has AdamW."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lacuna.config.optimizers import OptimizerConfig
from lacuna.model.parameter_groups import parameter_groups
from lacuna.parallel.fsdp import local
from lacuna.parallel.homes import Homes, copy_each

# Of the quintic iteration: https://kellerjordan.github.io/posts/muon/
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_EPSILON = 1e-7
# The name in the optimizer's state of the running mean square of each neuron's update.
_SQUARES = "neuron_square"


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """The nearly orthogonal matrices [B, m, n] that Newton and Schulz' iteration makes of these.

    It computes in the matrices' dtype.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=_EPSILON)
    first, third, fifth = _COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)  # of fewer operators than `@`
        polynomial = torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    return x.mT if is_tall else x


def rate_ratio(shape: torch.Size, is_transposed: bool, how: str) -> float:
    """What the learning rate of a matrix [..., out, in] is multiplied by.

    `match_rms_adamw` makes updates about as large as AdamW's (arXiv 2502.16982); `original` is
    Keller Jordan's.
    """
    outputs, inputs = shape[-2:]
    if is_transposed:
        outputs, inputs = inputs, outputs
    if how == "match_rms_adamw":
        return 0.2 * math.sqrt(max(outputs, inputs))
    return math.sqrt(max(1, outputs / inputs))


class Muon(torch.optim.AdamW):
    """Muon for the groups of matrices that say `muon`, and AdamW for all other groups.

    Such a group also says whether its matrices are `transposed`, which is stored as [in, out]. Each
    matrix of a stack [..., m, n] is a matrix of its own. As AdamW's fused kernel does, a step
    leaves everything as it is where `found_inf` is 1, without waiting for the device.

    The iteration runs in `dtype`: by default in bfloat16 on GPUs, as torch's, else in float32.

    With `neuron_beta2` it is NorMuon (arXiv 2510.05491): an orthogonal update is divided, neuron by
    neuron, by the root of the running mean of its square, and then made as large as before. Each
    rank has these means of all matrices, for which the matrices' homes work them out.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        settings: OptimizerConfig,
        kernels: dict[str, bool],
        dtype: torch.dtype | None = None,
    ) -> None:
        betas = settings.beta1, settings.beta2
        super().__init__(groups, settings.lr, betas, settings.eps, settings.weight_decay, **kernels)
        self.settings = settings
        self.matrices = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if group["muon"]
        ]
        for parameter, _ in self.matrices:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        parameters = [parameter for parameter, _ in self.matrices]
        self.homes = Homes(parameters)
        device = _device_of(parameters)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.like = torch.empty(0, device=device, dtype=dtype)
        self.new_squares: dict[int, Tensor] = {}
        if settings.neuron_beta2 is not None:
            for matrix, group in self.matrices:
                neurons = matrix.shape[-1 if group["transposed"] else -2]
                self.state[matrix][_SQUARES] = torch.zeros(neurons, device=device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient, and drops the gradients of matrices."""
        found = getattr(self, "found_inf", None)
        self.skipped = None if found is None else found.bool()
        together = []
        for number, (matrix, _) in enumerate(self.matrices):
            if matrix.grad is None:
                continue
            if matrix.ndim > 2 and self.homes.has_whole_matrices(number):
                [stack] = self._advance([number])
                self._apply([number], [self._orthogonalised_stack(stack.to(self.like))])
            else:
                together.append(number)
        self.homes.transform(
            together, self._advance, self._orthogonalised_by_shape, self._apply, self.like
        )
        if self.settings.neuron_beta2 is not None and together:
            self._take_squares(together)
        return super().step(closure)

    def _orthogonalised_stack(self, stack: Tensor) -> Tensor:
        """A stack [..., m, n] of matrices, each made orthogonal."""
        return orthogonalised(stack.flatten(0, -3), self.settings.ns_steps).view_as(stack)

    def _orthogonalised_by_shape(self, matrices: dict[int, Tensor]) -> dict[int, Tensor]:
        """These matrices made orthogonal; those of one shape are computed together.

        Each is taken out of `matrices` as soon as it is copied, so that its memory can be used.
        """
        alike: dict[Any, list[int]] = {}
        for number, matrix in matrices.items():
            _, group = self.matrices[number]
            alike.setdefault((matrix.shape, group["transposed"]), []).append(number)
        results: dict[int, Tensor] = {}
        for (shape, is_transposed), numbers in alike.items():
            stack = self.like.new_empty(len(numbers), *shape)
            copy_each(stack.unbind(), [matrices.pop(number) for number in numbers])
            stack = self._orthogonalised_stack(stack)
            if self.settings.neuron_beta2 is not None:
                stack = self._evened(numbers, stack, is_transposed, self.settings.neuron_beta2)
            if self.homes.are_here:
                # What is not sent becomes like the weights in one go, in its strides too: a kernel
                # for many tensors wants them alike.
                weight = local(self.matrices[numbers[0]][0])
                stack = stack.to(weight.device).to(weight.dtype).contiguous()
            results |= dict(zip(numbers, stack.unbind(), strict=True))
        return results

    def _evened(
        self, numbers: list[int], stack: Tensor, is_transposed: bool, beta: float
    ) -> Tensor:
        """Orthogonal updates [B, m, n] of these matrices, with neurons divided by their means."""
        inputs = -2 if is_transposed else -1
        update = stack.float()
        before = torch.stack([self.state[self.matrices[one][0]][_SQUARES] for one in numbers])
        squares = before.lerp(update.square().mean(inputs), 1 - beta)
        self.new_squares |= dict(zip(numbers, squares.unbind(), strict=True))
        evened = update / squares.sqrt().clamp(min=_EPSILON).unsqueeze(inputs)
        wanted, norm = (
            torch.linalg.vector_norm(one, dim=(-2, -1), keepdim=True) for one in (update, evened)
        )
        evened *= wanted / norm.clamp(min=_EPSILON)
        return evened.to(stack.dtype)

    def _take_squares(self, numbers: list[int]) -> None:
        """Has every rank take the means of these matrices' neurons from the matrices' homes."""
        states = [self.state[self.matrices[number][0]][_SQUARES] for number in numbers]
        lengths = [state.numel() for state in states]
        together = states[0].new_zeros(sum(lengths))
        parts = dict(zip(numbers, together.split(lengths), strict=True))
        copy_each([parts[number] for number in self.new_squares], [*self.new_squares.values()])
        self.new_squares.clear()
        if not self.homes.are_here:
            dist.all_reduce(together, group=self.homes.group)
        if self.skipped is not None:
            torch.where(self.skipped.to(together.device), torch.cat(states), together, out=together)
        copy_each(states, [*parts.values()])

    def _advance(self, numbers: list[int]) -> list[Tensor]:
        """Takes gradients of matrices into their momenta; returns this rank's parts of the sums.

        A sum may be the momentum itself, or lie in the memory of the gradient, which is dropped.
        """
        matrices = [self.matrices[number][0] for number in numbers]
        gradients = [local(matrix.grad) for matrix in matrices if matrix.grad is not None]
        buffers = [local(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        for matrix in matrices:
            matrix.grad = None
        if self.skipped is not None:
            # A mean of the buffer and itself is the buffer. A factor of 0 would leave NaN.
            skipped = self.skipped.to(buffers[0].device)
            for gradient, buffer in zip(gradients, buffers, strict=True):
                torch.where(skipped, buffer, gradient, out=gradient)
        momentum = self.settings.momentum
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        if not self.settings.nesterov:
            return buffers
        torch._foreach_lerp_(gradients, buffers, momentum)
        return gradients

    def _apply(self, numbers: list[int], updates: list[Tensor]) -> None:
        """Takes this rank's parts of orthogonal updates from matrices, which decay as well.

        Changes what is in the memory of the updates. The rate may be a tensor, which a CUDA graph
        reads, and is multiplied by in float32 in any case.
        """
        pairs = [self.matrices[number] for number in numbers]
        weights = [local(matrix) for matrix, _ in pairs]
        if self.skipped is not None:
            skipped = self.skipped.to(weights[0].device).float()
            before = torch._foreach_mul(weights, skipped)
        alike: dict[tuple[int, float], list[int]] = {}
        for place, (matrix, group) in enumerate(pairs):
            ratio = rate_ratio(matrix.shape, group["transposed"], self.settings.adjust_lr_fn)
            alike.setdefault((id(group), ratio), []).append(place)
        for (_, ratio), places in alike.items():
            _, group = pairs[places[0]]
            chosen = [weights[place] for place in places]
            changes = [updates[place].float() for place in places]
            torch._foreach_mul_(changes, ratio)
            torch._foreach_add_(changes, chosen, alpha=group["weight_decay"])
            torch._foreach_mul_(changes, group["lr"])
            torch._foreach_sub_(chosen, changes)
        if self.skipped is not None:
            # One of the two is 0: skipped updates are those of the momenta, and so are finite.
            torch._foreach_mul_(weights, 1 - skipped)
            torch._foreach_add_(weights, before)


def muon_of(
    model: PreTrainedModel,
    settings: OptimizerConfig,
    groups: list[dict[str, Any]],
    kernels: dict[str, bool],
) -> Muon:
    """Muon for a model, whose parameters are in `groups` by their weight decay."""
    return Muon(parameter_groups(model, settings, groups), settings, kernels)


def _device_of(parameters: Sequence[Tensor]) -> torch.device:
    """Where parameters are computed with, which may be kept elsewhere."""
    first = next(iter(parameters), torch.empty(0))
    return (
        torch.device(first.device_mesh.device_type) if isinstance(first, DTensor) else first.device
    )
