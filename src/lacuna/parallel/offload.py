"""Layers' inputs in CPU memory between the passes, with copies that run beside the computation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.parallel.backbone import backbone


@dataclass
class _Offloaded:
    """A tensor in CPU memory.

    Attributes:
        host: holds its values.
        previous: the one kept before it, which the backward pass wants next.
        fetched: the tensor on its device again, from when it is on its way there.
    """

    host: Tensor
    device: torch.device
    previous: "_Offloaded | None"
    fetched: Tensor | None = None


class _Keeper:
    """Keeps tensors [B, T, `width`] that are saved for the backward pass in CPU memory."""

    def __init__(self, width: int, device_type: str) -> None:
        self.width = width
        self.device: Any = torch.get_device_module(device_type)  # streams of a CPU do nothing
        # One for both ways, so that no tensor is fetched before it is written.
        self.stream = self.device.Stream()
        self.last: _Offloaded | None = None

    def pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        """Begins to copy a tensor to CPU memory, if it is one of those that are kept there."""
        is_kept = tensor.ndim == 3 and tensor.shape[-1] == self.width and tensor.is_floating_point()
        if not is_kept:
            return tensor
        self.stream.wait_stream(self.device.current_stream())
        with self.device.stream(self.stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            host.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            tensor.record_stream(self.stream)  # its memory is not given away before it is copied
        self.last = _Offloaded(host, tensor.device, self.last)
        return self.last

    def unpack(self, kept: Tensor | _Offloaded) -> Tensor:
        """The tensor on its device; begins to fetch the one before it."""
        if isinstance(kept, Tensor):
            return kept
        self.last = None  # the forward pass is over: nothing but its graph keeps its tensors now
        tensor = self._fetch(kept)
        kept.fetched = None
        self.device.current_stream().wait_stream(self.stream)
        if kept.previous is not None:
            self._fetch(kept.previous)
        return tensor

    def _fetch(self, kept: _Offloaded) -> Tensor:
        """Begins to copy a tensor back to its device, unless that has begun."""
        if kept.fetched is None:
            # Of the memory that computation uses: that of another stream would be kept beside it.
            kept.fetched = torch.empty_like(kept.host, device=kept.device)
            self.stream.wait_stream(self.device.current_stream())
            with self.device.stream(self.stream):
                kept.fetched.copy_(kept.host, non_blocking=True)
            if kept.fetched.is_cuda:
                kept.fetched.record_stream(self.stream)
        return kept.fetched


def offload_inputs(model: PreTrainedModel, device_type: str) -> None:
    """Makes a decoder, in place, keep its layers' inputs in CPU memory until the backward pass.

    What counts as such is every tensor [B, T, width] that is saved for the backward pass. Each is
    fetched while the backward pass works with the one after it. The hooks are around the decoder
    and not around its layers, since compiled layers must not contain them.
    """
    base = backbone(model)
    keeper = _Keeper(model.config.get_text_config().hidden_size, device_type)
    forward = base.forward

    def offloading(*arguments: Any, **named: Any) -> Any:
        if not base.training:  # no backward pass is to come, also where gradients are recorded
            return forward(*arguments, **named)
        keeper.last = None  # other passes are apart
        with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
            return forward(*arguments, **named)

    base.forward = offloading
