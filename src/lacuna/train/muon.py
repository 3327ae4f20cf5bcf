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
from lacuna.parallel.homes import Homes

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
        sharded = []
        for number, (matrix, _) in enumerate(self.matrices):
            if matrix.grad is None:
                continue
            if matrix.ndim > 2 and self.homes.has_whole_matrices(number):
                self._apply(number, self._orthogonalised_stack(self._advance(number)))
            else:
                sharded.append(number)
        self.homes.transform(
            sharded, self._advance, self._orthogonalised_by_shape, self._apply, self.like
        )
        if self.settings.neuron_beta2 is not None and sharded:
            self._take_squares(sharded)
        return super().step(closure)

    def _orthogonalised_stack(self, stack: Tensor) -> Tensor:
        """A stack [..., m, n] of matrices, each made orthogonal."""
        return orthogonalised(stack.flatten(0, -3), self.settings.ns_steps).view_as(stack)

    def _orthogonalised_by_shape(self, matrices: dict[int, Tensor]) -> dict[int, Tensor]:
        """These matrices made orthogonal; those of one shape are computed together."""
        alike: dict[Any, list[int]] = {}
        for number, matrix in matrices.items():
            _, group = self.matrices[number]
            alike.setdefault((matrix.shape, group["transposed"]), []).append(number)
        results: dict[int, Tensor] = {}
        for (_, is_transposed), numbers in alike.items():
            stack = self._orthogonalised_stack(torch.stack([matrices[one] for one in numbers]))
            if self.settings.neuron_beta2 is not None:
                stack = self._evened(numbers, stack, is_transposed, self.settings.neuron_beta2)
            results |= dict(zip(numbers, stack, strict=True))
        return results

    def _evened(
        self, numbers: list[int], stack: Tensor, is_transposed: bool, beta: float
    ) -> Tensor:
        """Orthogonal updates [B, m, n] of these matrices, with neurons divided by their means."""
        inputs = -2 if is_transposed else -1
        update = stack.float()
        before = torch.stack([self.state[self.matrices[one][0]][_SQUARES] for one in numbers])
        squares = before.lerp(update.square().mean(inputs), 1 - beta)
        self.new_squares |= dict(zip(numbers, squares, strict=True))
        evened = update / squares.sqrt().clamp(min=_EPSILON).unsqueeze(inputs)
        wanted, norm = (
            torch.linalg.vector_norm(one, dim=(-2, -1), keepdim=True) for one in (update, evened)
        )
        evened *= wanted / norm.clamp(min=_EPSILON)
        return evened.to(stack.dtype)

    def _take_squares(self, numbers: list[int]) -> None:
        """Has every rank take the means of these matrices' neurons from the matrices' homes."""
        states = [self.state[self.matrices[number][0]][_SQUARES] for number in numbers]
        found = [
            self.new_squares.pop(number, torch.zeros_like(state))
            for number, state in zip(numbers, states, strict=True)
        ]
        together = torch.cat(found)
        if len(self.homes.parts) > 1:
            dist.all_reduce(together, group=self.homes.group)
        parts = together.split([state.numel() for state in states])
        for state, part in zip(states, parts, strict=True):
            self._replace(state, part)

    def _advance(self, number: int) -> Tensor:
        """Takes the gradient of a matrix into its momentum; returns this rank's part of the sum."""
        matrix, _ = self.matrices[number]
        assert matrix.grad is not None, "only matrices with a gradient are updated"
        gradient = local(matrix.grad)
        matrix.grad = None
        buffer = local(self.state[matrix]["momentum_buffer"])
        momentum = self.settings.momentum
        mean = buffer.lerp(gradient, 1 - momentum)
        self._replace(buffer, mean)
        update = gradient.lerp(mean, momentum) if self.settings.nesterov else mean
        return update.to(self.like)

    def _apply(self, number: int, update: Tensor) -> None:
        """Takes this rank's part of an orthogonal update from a matrix, which decays before."""
        matrix, group = self.matrices[number]
        part = local(matrix)
        how = self.settings.adjust_lr_fn
        rate = group["lr"] * rate_ratio(matrix.shape, group["transposed"], how)
        decayed = part * (1 - group["lr"] * group["weight_decay"])
        self._replace(part, decayed.add_(update.to(part.device), alpha=-rate))

    def _replace(self, target: Tensor, value: Tensor) -> None:
        """Puts a value into a tensor, in place, unless the step is skipped."""
        if self.skipped is not None:
            value = torch.where(self.skipped.to(target.device), target, value)
        target.copy_(value)


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
