"""AdamW whose moments take fewer bits: bfloat16, rounded at random, or 8 bits with scales."""

import math
import zlib
from collections.abc import Sequence
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import disable_cache_limit
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.config.optimizers import OptimizerConfig
from lacuna.model.parameter_groups import block_length, parameter_groups, weights_in_8_bits
from lacuna.parallel.fsdp import local
from lacuna.train.eight_bits import Codes, dequantised, dynamic_codes, quantised

PIECE = 2**24  # numbers that are updated at a time, beside which their float32 forms are small


def random_bits(places: Tensor, seed: Tensor) -> Tensor:
    """32 bits for each place, int32, that follow from the low 32 bits of it and of the seed.

    The hash is Chris Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/). Products of
    int32 keep their low 32 bits, and are several times as fast on GPUs as those of int64.
    """
    bits = (places ^ seed).int()
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)


def rounded_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """Finite float32 values as bfloat16, up or down so that the mean over `bits` is the value.

    `bits` are int32 of the same shape, of which the lowest 16 count.
    """
    raised = values.view(torch.int32) + (bits & 0xFFFF)
    return (raised & -(2**16)).view(torch.float32).bfloat16()


class SmallStateAdamW(torch.optim.AdamW):
    """AdamW whose running means are kept in bfloat16, or those of matrices in 8 bits.

    Updates are computed in float32. Means in bfloat16, and weights that are stored so, are rounded
    up or down at random, by bits that follow from the parameter's name, the step and the place in
    the whole parameter alone: resumed runs draw the same, and so do replicas and other layouts. As
    AdamW's fused kernel does, a step leaves everything as it is where `found_inf` is 1, without
    waiting for the device.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], settings: OptimizerConfig, names: dict[Tensor, str]
    ) -> None:
        betas = settings.beta1, settings.beta2
        super().__init__(
            groups, settings.lr, betas, settings.eps, settings.weight_decay, fused=True
        )
        self.state_dtype = settings.state_dtype
        if settings.state_dtype == "int8":
            for parameter in names:
                require_whole_blocks(parameter)
        self.codes: dict[torch.device, dict[str, Codes]] = {}
        self.seeds = {parameter: zlib.crc32(name.encode()) for parameter, name in names.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient."""
        with disable_cache_limit():  # every shape of a parameter is compiled once
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        return None

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        state = self.state[parameter]
        if not state:
            state |= _empty_state(parameter, self.state_dtype)
        part = torch.atleast_1d(local(parameter))
        skip = getattr(self, "found_inf", None)
        skip = part.new_zeros((), dtype=torch.float32) if skip is None else skip.to(part.device)
        # Numbers that change are tensors, so that compiled code serves all steps.
        rate = torch.full((), float(group["lr"]), device=part.device)
        if part.device not in self.codes:
            signs = {"exp_avg": True, "exp_avg_sq": False}
            self.codes[part.device] = {
                name: dynamic_codes(signed, part.device) for name, signed in signs.items()
            }
        strides = [math.prod(parameter.shape[place + 1 :]) for place in range(part.ndim)]
        first = _first_place(parameter, strides)
        seed = torch.full((), self.seeds[parameter], dtype=torch.int64, device=part.device)
        step = state["step"]
        moments = {
            name: torch.atleast_1d(local(value))
            for name, value in state.items()
            if value is not step
        }
        gradient = torch.atleast_1d(local(parameter.grad))
        update = _compiled_advance if part.is_cuda else advance
        rows = max(1, PIECE // max(1, part[:1].numel()))
        for start in range(0, len(part), rows):
            piece = slice(start, start + rows)
            update(
                part[piece],
                gradient[piece],
                {name: value[piece] for name, value in moments.items()},
                step,
                self.codes[part.device],
                rate,
                group["weight_decay"],
                group["betas"],
                group["eps"],
                skip,
                torch.full((), first + start * strides[0], dtype=torch.int64, device=part.device),
                strides,
                seed,
            )
        _replace(step, step + 1, skip)


def adamw_of(
    model: PreTrainedModel, settings: OptimizerConfig, groups: list[dict[str, Any]]
) -> SmallStateAdamW:
    """Such an AdamW for a model, whose parameters are in `groups` by their weight decay.

    Raises `UserError` where a state in 8 bits is asked for and no weight can have it, or the layout
    divides blocks of it.
    """
    if settings.state_dtype == "int8":
        small, trained = (f"{count:,}" for count in weights_in_8_bits(model))
        logger.info(
            "optimizer: the moments of %s of %s trained weights are in 8 bits", small, trained
        )
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return SmallStateAdamW(parameter_groups(model, settings, groups), settings, names)


def _empty_state(parameter: Tensor, dtype: str | None) -> dict[str, Tensor]:
    """The state of a parameter before its first step; zeros stand for means of 0 in every form."""
    block = block_length(parameter.shape) if dtype == "int8" else None
    state = {"step": torch.zeros((), device=parameter.device)}
    kept = torch.uint8 if block else torch.bfloat16 if dtype == "bfloat16" else parameter.dtype
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(parameter, dtype=kept)
        if block:
            state[f"{name}_scale"] = _empty_scales(parameter, block)
    return state


def require_whole_blocks(parameter: Tensor) -> None:
    """Raises `UserError` where a rank's part of a trained parameter has not whole blocks."""
    block = block_length(parameter.shape)
    width = local(parameter).shape[-1] if parameter.ndim else 0
    if block is not None and parameter.requires_grad and width % block:
        raise UserError(
            f'optimizer.state_dtype: "int8" has blocks of {block} values in rows of '
            f"{parameter.shape[-1]}, and this layout gives a rank {width} of them: choose a "
            "tensor_parallel_degree of 2, 4 or 8, or another state_dtype."
        )


def _empty_scales(parameter: Tensor, block: int) -> Tensor:
    """Zeros for the blocks of a parameter, which are placed as it is."""
    part = local(parameter)
    scales = part.new_zeros(*part.shape[:-1], part.shape[-1] // block, dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size([*parameter.shape[:-1], parameter.shape[-1] // block])
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        scales, mesh, placements, run_check=False, shape=shape, stride=tuple(strides)
    )


def _first_place(parameter: Tensor, strides: Sequence[int]) -> int:
    """The place of the first value of a rank's part in the whole parameter, of these strides."""
    if not isinstance(parameter, DTensor):
        return 0
    chunks = parameter.__create_chunk_list__()
    if not chunks:  # some ranks may have nothing
        return 0
    return sum(map(mul, chunks[0].offsets, strides))


def advance(
    parameter: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    step: Tensor,
    codes: dict[str, Codes],
    rate: Tensor,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    skip: Tensor,
    first: Tensor,
    strides: Sequence[int],
    seed: Tensor,
) -> None:
    """Makes AdamW's update of a piece of a parameter and its moments, in place, unless `skip` is 1.

    Those are of the piece's size, others scalars; `step` counts the updates before this one. A
    piece begins at the place `first` of the whole parameter, which has these strides; `first` and
    `seed` are int64.
    """
    step = step + 1
    places = _places(parameter.shape, first, strides)
    bits = random_bits(places, seed + step.long() * 0x9E3779B9)
    gradient = gradient.float()
    mean = _advance_mean(moments, codes, "exp_avg", gradient, betas[0], skip, bits)
    square = _advance_mean(moments, codes, "exp_avg_sq", gradient**2, betas[1], skip, bits >> 16)
    mean = mean / _correction(betas[0], step)
    deviation = (square / _correction(betas[1], step)).sqrt() + eps
    value = parameter.float()
    value = value - rate * (decay * value + mean / deviation)
    if parameter.dtype == torch.bfloat16:
        value = rounded_at_random(value, random_bits(bits, seed))
    _replace(parameter, value, skip)


_compiled_advance = torch.compile(advance, fullgraph=True, dynamic=False)


def _correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step, all of whose digits count where that is small."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _advance_mean(
    moments: dict[str, Tensor],
    codes: dict[str, Codes],
    name: str,
    new: Tensor,
    beta: float,
    skip: Tensor,
    bits: Tensor,
) -> Tensor:
    """Takes `new` into a running mean, in place as it is kept; returns the mean in float32."""
    kept = moments[name]
    scales = moments.get(f"{name}_scale")
    if scales is None:
        mean = kept.float().lerp(new, 1 - beta)
        is_half = kept.dtype == torch.bfloat16
        _replace(kept, rounded_at_random(mean, bits) if is_half else mean, skip)
        return mean
    mean = dequantised(kept, scales, codes[name]).lerp(new, 1 - beta)
    new_kept, new_scales = quantised(mean, kept.shape[-1] // scales.shape[-1], codes[name])
    _replace(kept, new_kept, skip)
    _replace(scales, new_scales, skip)
    return mean


def _replace(target: Tensor, value: Tensor, skip: Tensor) -> None:
    """Puts a value into a tensor, in place, unless the step is skipped."""
    target.copy_(torch.where(skip > 0, target, value.to(target.dtype)))


def _places(shape: torch.Size, first: Tensor, strides: Sequence[int]) -> Tensor:
    """The place of each value of a piece in the whole parameter's memory, int64, of `shape`."""
    places = first.expand(shape)
    for dimension, stride in enumerate(strides):
        along = torch.arange(shape[dimension], device=first.device) * stride
        places = places + along.view(-1, *[1] * (len(shape) - dimension - 1))
    return places
