"""Frozen weights in 4 or 8 bits, for adapters to be trained beside (QLoRA, arXiv 2305.14314), in bitsandbytes' forms.

nf4: 16 levels, a scale for every 64 weights, and of the scales 256 levels with a scale for every
256: 4.13 bits in all. int8: 255 levels with a scale for every row. A packed weight is one tensor
[n] of bytes, its scales in front, so that it is sharded, gathered and moved with them. As a
parameter its bytes pass for float32: torch 2.11 shards no integers, and when FSDP gathers those of
16 bits, what would not be a number becomes another one that is not.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lacuna.config import refuse
from lacuna.model.targets import plain_linears

BLOCK, GROUP = 64, 256
# Quantiles of a normal distribution, scaled to [-1, 1] (arXiv 2305.14314, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """The values that codes of so many bits stand for, in order, float32.

    Those of 8 bits have an exponent of ten and the more digits the larger they are (arXiv
    1511.04561).
    """
    if bits == 4:
        return torch.tensor(_NF4, device=device)
    edges = [torch.linspace(0.1, 1, 2**digits + 1) for digits in range(7)]
    positive = torch.cat(
        [(edge[1:] + edge[:-1]) / 2 * 10.0 ** (place - 6) for place, edge in enumerate(edges)]
    )
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values.to(device)


def _scaled(values: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of `values` [n], and the scale of each block of `size` of them."""
    blocks = nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)
    scales, levels = blocks.abs().amax(1), _levels(bits, values.device)
    pieces = zip(
        blocks.split(2**24 // size), scales.split(2**24 // size), strict=True
    )  # little at a time
    parts = (block / scale.clamp(min=1e-38)[:, None] for block, scale in pieces)
    codes = [
        torch.bucketize(part, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        for part in parts
    ]
    return torch.cat(codes).flatten()[: len(values)], scales


def packed_sizes(base: str, shape: Sequence[int]) -> list[int]:
    """The bytes of the parts of a packed weight of this shape: float32 scales, codes of scales (nf4), codes, and none.

    The last part makes the sum a multiple of 4.
    """
    count = shape[0] * shape[1]
    blocks = -(-count // BLOCK)
    sizes = (
        [4 * shape[0], count]
        if base == "int8"
        else [4 * (-(-blocks // GROUP) + 1), blocks, -(-count // 2)]
    )
    return [*sizes, -sum(sizes) % 4]


def quantize(weight: Tensor, base: str) -> Tensor:
    """A weight [rows, columns] packed as `base`, nf4 or int8: uint8 [sum of `packed_sizes`]."""
    values = weight.detach().float()
    if base == "int8":
        scales = values.abs().amax(1)
        codes = (values * (127 / scales.clamp(min=1e-38))[:, None]).round_().to(torch.int8)
        return _joined(scales, codes)
    codes, scales = _scaled(values.flatten(), BLOCK, bits=4)
    codes = nn.functional.pad(codes, (0, len(codes) % 2))
    offset = scales.mean()[None]
    coded, groups = _scaled(scales - offset, GROUP, bits=8)
    return _joined(groups, offset, coded, codes[::2] << 4 | codes[1::2])


def _joined(*parts: Tensor) -> Tensor:
    joined = torch.cat([part.flatten().view(torch.uint8) for part in parts])
    return nn.functional.pad(joined, (0, -len(joined) % 4))


def dequantize(packed: Tensor, base: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight of this shape that is `packed` as `base`; on a GPU by bitsandbytes' kernels."""
    scales, *coded, codes, _ = packed.view(torch.uint8).split(packed_sizes(base, shape))
    scales = scales.view(torch.float32)
    if base == "int8":
        return (codes.view(torch.int8).view(*shape) * (scales / 127)[:, None]).to(dtype)
    groups, offset = scales[:-1], scales[-1]
    if packed.is_cuda:
        import bitsandbytes  # noqa: F401  # which takes seconds, and adds to torch.ops

        kernels, levels = torch.ops.bitsandbytes, _levels(8, packed.device)
        scales = (
            kernels.dequantize_blockwise(coded[0], groups, levels, GROUP, torch.float32) + offset
        )
        return kernels.dequantize_4bit(codes, scales, BLOCK, "nf4", shape, dtype)
    scales = (
        _levels(8, packed.device)[coded[0].int()] * groups.repeat_interleave(GROUP)[: len(coded[0])]
        + offset
    )
    values = _levels(4, packed.device)[torch.stack([codes >> 4, codes & 15], dim=1).flatten().int()]
    count = shape[0] * shape[1]
    return (values[:count] * scales.repeat_interleave(BLOCK)[:count]).view(*shape).to(dtype)


@torch.library.custom_op("lacuna::quantized_product", mutates_args=())
def quantized_product(
    hidden: Tensor,
    packed: Tensor,
    down: Tensor | None,
    up: Tensor | None,
    base: str,
    shape: Sequence[int],
    transposed: bool,
    scale: float,
) -> Tensor:
    """`hidden` [..., k] times the weight of this shape that is packed as `base`, or times its transpose [k, n].

    With an adapter, `down` [rank, k] and `up` [n, rank], `scale` times their product is added to
    the weight. All is one operation in both passes: no compiler finds a dequantised weight to keep
    between them, and what the adapter makes is added where the product is, not beside it.
    """
    weight = dequantize(packed, base, shape, hidden.dtype)
    result = hidden @ (weight.t() if transposed else weight)
    if down is not None:
        result.flatten(0, -2).addmm_(hidden.flatten(0, -2) @ down.t(), up.t(), alpha=scale)
    return result


@quantized_product.register_fake
def _(hidden: Tensor, *others: Any) -> Tensor:
    *_, shape, transposed, _ = others
    return hidden.new_empty(*hidden.shape[:-1], shape[0 if transposed else 1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, packed, *adapter = inputs[:4]
    ctx.save_for_backward(packed, *([] if adapter[0] is None else [hidden, *adapter]))
    ctx.how = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, *adapted = ctx.saved_tensors
    base, shape, transposed, scale = ctx.how
    turned, changes, inward = (None, None), (None, None), None
    if adapted:
        hidden, down, up = adapted
        turned = up.t(), down.t()
        seen, wanted = hidden.flatten(0, -2), gradient.flatten(0, -2)
        changes = (scale * (wanted @ up)).t() @ seen, wanted.t() @ (scale * (seen @ down.t()))
    if ctx.needs_input_grad[0]:
        inward = quantized_product(gradient, packed, *turned, base, shape, not transposed, scale)
    return inward, None, *changes, None, None, None, None


quantized_product.register_autograd(_backward, setup_context=_keep)


@cache
def _quantized(kind: type[nn.Module], base: str, shape: tuple[int, int]) -> type[nn.Module]:
    """A kind of linear layer whose weight is packed; its `forward` takes an adapter as well."""

    def forward(
        module: nn.Module,
        hidden: Tensor,
        down: Tensor | None = None,
        up: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        packed = module.weight if module.weight.ndim == 1 else quantize(module.weight, base)
        result = quantized_product(hidden, packed, down, up, base, shape, kind is not Conv1D, scale)
        return result if module.bias is None else result + module.bias

    return type(kind.__name__, (kind,), {"forward": forward, "quantized": (base, shape)})


def quantize_layers(model: PreTrainedModel, base: str, left: Sequence[str]) -> None:
    """Has the linear layers of a whole model compute with weights quantised as `base`, in place.

    The head, and modules of which the name or its end is one of those `left`, stay as they are.
    """
    for name, module in plain_linears(model).items():
        stays = module is model.get_output_embeddings() or any(
            f".{name}.".endswith(f".{part}.") for part in left
        )
        if not stays:
            module.__class__ = _quantized(type(module), base, tuple(module.weight.shape))


def quantized_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weights are quantised, by name."""
    return {
        name: module for name, module in model.named_modules() if hasattr(type(module), "quantized")
    }


def leave_whole(module: nn.Module) -> None:
    """Takes quantisation off a module and all in it, in place."""
    for layer in quantized_modules(module).values():
        layer.__class__ = type(layer).__base__


def pack_layers(model: nn.Module) -> None:
    """Puts packed weights in the place of quantised ones of a model on the meta device, in place."""
    for module in quantized_modules(model).values():
        size = sum(packed_sizes(*type(module).quantized)) // 4
        module.weight = nn.Parameter(
            module.weight.new_empty(size, dtype=torch.float32), requires_grad=False
        )


def dense_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """What a layer computes with of its stored `weight`, which is whole: float32 where it is quantised."""
    if not hasattr(type(module), "quantized"):
        return weight
    base, shape = type(module).quantized
    return dequantize(
        weight if weight.ndim == 1 else quantize(weight, base), base, shape, torch.float32
    )


def take_off_quantization(model_config: PretrainedConfig, asked: str) -> list[str]:
    """The modules that the files of a quantised model leave as they were; none for other models.

    Takes the description of that off the configuration, since what lacuna writes is not quantised.
    Raises `UserError` for files that cannot be read, or are quantised otherwise than `asked`.
    """
    theirs = model_config.__dict__.pop("quantization_config", None) or {}
    doubly_nf4 = theirs.get("bnb_4bit_quant_type") == "nf4" and theirs.get(
        "bnb_4bit_use_double_quant"
    )
    form = (
        "int8"
        if theirs.get("load_in_8bit")
        else "nf4"
        if theirs.get("load_in_4bit") and doubly_nf4
        else None
    )
    quantised = f"model.name_or_path: its weights are quantised by {theirs.get('quant_method')}"
    unknown = bool(theirs) and (
        form is None or model_config.model_type == "gpt2"
    )  # which is stored transposed
    refuse(
        {
            f"{quantised}: only bitsandbytes' int8, and nf4 with double quantisation, can be read": unknown,
            f"{quantised} as {form}, quantization.base is {asked}: set it to {form}": bool(theirs)
            and form != asked,
        }
    )
    return theirs.get("llm_int8_skip_modules") or []


@dataclass(frozen=True)
class PackedSlice:
    """A weight among a model's files, packed as `base` when it is read, like a slice of safetensors'."""

    slices: Mapping[str, Any]
    key: str
    base: str
    like: Tensor
    device: torch.device

    def get_shape(self) -> list[int]:
        return [*self.like.shape]

    def __getitem__(self, place: Any) -> Tensor:
        parts = stored_parts(self.slices, self.key)
        packed = (
            _joined(*parts)
            if parts
            else quantize(self.slices[self.key][...].to(self.device), self.base)
        )
        return packed.view(torch.float32)[place]


def stored_parts(slices: Mapping[str, Any], key: str) -> list[Tensor]:
    """Of a weight that bitsandbytes has quantised in files, the parts in the order in which they are packed here."""
    if (scales := f"{key.removesuffix('weight')}SCB") in slices:
        return [slices[scales][...], slices[key][...]]
    if (state := f"{key}.quant_state.bitsandbytes__nf4") in slices:
        offset = torch.tensor([json.loads(bytes(slices[state][...].tolist()))["nested_offset"]])
        groups, scales = (slices[f"{key}.{part}"][...] for part in ("nested_absmax", "absmax"))
        return [groups, offset, scales, slices[key][...]]
    return []


def packed_weights(model: nn.Module) -> dict[str, str]:
    """The names of the weights that a model has packed, and as what each is."""
    layers = quantized_modules(model).items()
    return {
        f"{name}.weight": type(layer).quantized[0]
        for name, layer in layers
        if layer.weight.ndim == 1
    }


def packed_slices(
    model: nn.Module, slices: Mapping[str, Any], device: torch.device
) -> dict[str, PackedSlice]:
    """What stands in files for the packed weights of a model, by their names there; computed on `device`."""
    packed = {
        _tail(name): (base, model.get_parameter(name))
        for name, base in packed_weights(model).items()
    }
    return {
        key: PackedSlice(slices, key, *packed[_tail(key)], device)
        for key in slices
        if _tail(key) in packed
    }


def _tail(key: str) -> str:
    """What a tensor's name ends with, from the number of its layer on; what precedes that differs between files."""
    return re.search(r"\d+\..*|[^.]+\.[^.]+$|$", key)[0]
