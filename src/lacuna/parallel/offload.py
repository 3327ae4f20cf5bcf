"""Activations in CPU memory between the passes, with copies that run beside the computation."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.parallel.around_layers import call_before, first_tensor
from lacuna.parallel.backbone import backbone
from lacuna.parallel.fsdp import local
from lacuna.parallel.movable import require_compiled


@dataclass(eq=False)
class _Moved:
    """A tensor in CPU memory.

    Attributes:
        layer: the number of the layer that saved it.
        host: holds its values.
        device: where it came from.
        previous: the one moved before it, which the backward pass wants next.
        source: the tensor itself, until it is let go.
        copied: happens when `host` has the values.
        fetched: the tensor on its device again, from when it is on its way there to its first use.
        arrived: happens when `fetched` has the values.
        used: whether it has been asked for.
    """

    layer: int
    host: Tensor
    device: torch.device
    previous: "_Moved | None"
    source: Tensor | None
    copied: Any
    fetched: Tensor | None = None
    arrived: Any = None
    used: bool = False


class _Stays(NamedTuple):
    """A tensor that stays on its device, and what was moved before it."""

    tensor: Tensor
    previous: _Moved | None


class _Keeper:
    """Keeps a share of what the layers of a decoder save for the backward pass in CPU memory.

    What a layer moves is let go when the next layer is done, and comes back while the backward pass
    works on the next layer. The stream that computes waits for a copy before its memory is given
    away: memory that another stream is known to use would not be, until the device is there, and
    the host is far ahead of it.

    Attributes:
        share: the share of each layer's bytes that is moved, at most.
        staying: the number of the layer whose tensors stay, since they are wanted at once.
        layer: the number of the layer that computes.
        saved: for each layer, the bytes of each tensor that could be moved, until now.
        chosen: for each layer, the places of those that are moved; empty in the first pass, in
            which it is not known yet what a layer will have saved.
        moved: bytes that the first pass has moved until now.
        leaving: what is on its way to CPU memory.
        last: what was moved last.
        is_open: whether a forward pass has begun and not ended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[nn.Module],
        share: float,
        staying: int,
        kind: str,
    ) -> None:
        self.layers = layers
        self.staying = staying
        self.sizes = {weight.numel() for layer in layers for weight in layer.parameters()}
        self.width = model.config.get_text_config().hidden_size
        self.share = share
        self.device: Any = torch.get_device_module(kind)  # streams of a CPU do nothing
        # One for both ways, so that no tensor is fetched before it is written.
        self.stream = self.device.Stream()
        self.chosen: list[set[int]] = []
        self.moved = 0
        self.begin(0)
        self.is_open = False

    def begin(self, tokens: int) -> None:
        """Begins a forward pass over so many tokens."""
        # Memory of what was fetched and not used, as after an error, is given away only now.
        self.device.current_stream().wait_stream(self.stream)
        self.least = tokens * self.width
        self.leaving: deque[_Moved] = deque()
        self.last: _Moved | None = None
        self.saved: list[list[int]] = [[] for _ in self.layers]
        self.layer = 0
        self.is_open = True

    def begin_layer(self, number: int, _: Tensor) -> None:
        """Begins a layer. Raises `UserError` for one that the decoder's own pass has not called."""
        if torch.is_grad_enabled() and self.layers[number].training and not self.is_open:
            raise UserError(
                "activation_checkpoint.offload: this model calls its layers in another way than "
                "by its decoder, so that nothing of them would be moved: leave it out."
            )
        self.layer = number

    def end(self) -> None:
        """Ends the forward pass, also one that failed: its graph alone keeps its tensors now."""
        self._let_go(len(self.layers))
        self.last = None
        self.is_open = False
        if any(self.saved):
            self.chosen = [widest(sizes, self.share) for sizes in self.saved]

    def pack(self, tensor: Tensor) -> Tensor | _Moved | _Stays:
        """Begins to copy a tensor to CPU memory, if it is one of those that are kept there."""
        is_activation = self._is_activation(tensor)
        # A result keeps the graph that made it: kept by that graph, neither would ever be freed.
        tensor = tensor.detach()
        if not is_activation:
            return tensor
        if self.layer == self.staying:
            return _Stays(tensor, self.last)
        if not self._is_chosen(tensor.nbytes):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._let_go(self.layer)
        copied = self._copy(tensor, host)
        self.last = _Moved(self.layer, host, tensor.device, self.last, tensor, copied)
        self.leaving.append(self.last)
        return self.last

    def unpack(self, kept: Tensor | _Moved | _Stays) -> Tensor:
        """The tensor on its device; begins to fetch those before it, of its layer and the last."""
        if isinstance(kept, Tensor):
            return kept
        if isinstance(kept, _Stays):
            self._fetch_back_to(self.staying - 1, kept.previous)
            return kept.tensor
        tensor = self._fetch(kept)
        kept.fetched = None
        kept.used = True
        self.device.current_stream().wait_event(kept.arrived)
        self._fetch_back_to(kept.layer - 1, kept.previous)
        return tensor

    def _fetch_back_to(self, layer: int, kept: _Moved | None) -> None:
        """Begins to fetch this and what was moved before it, back to a layer."""
        while kept is not None and kept.layer >= layer:
            if not kept.used:
                self._fetch(kept)
            kept = kept.previous

    def _is_activation(self, tensor: Tensor) -> bool:
        """Whether a tensor has as many numbers as hidden states, or more, and is no weight.

        It must lie in memory without gaps: compiled code wants it back with the same strides.
        """
        is_wide = type(tensor) is Tensor and tensor.numel() >= self.least
        if not is_wide or not tensor.is_floating_point():
            return False
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            return False
        if all(size % tensor.numel() for size in self.sizes):
            return True
        place = tensor.untyped_storage().data_ptr()
        weights = (local(weight) for layer in self.layers for weight in layer.parameters())
        return all(weight.untyped_storage().data_ptr() != place for weight in weights)

    def _is_chosen(self, size: int) -> bool:
        """Whether the next tensor that a layer saves, of so many bytes, is moved."""
        saved = self.saved[self.layer]
        saved.append(size)
        if self.chosen:
            return len(saved) - 1 in self.chosen[self.layer]
        is_within = self.moved + size <= self.share * sum(map(sum, self.saved))
        self.moved += size * is_within
        return is_within

    def _let_go(self, layer: int) -> None:
        """Lets go of what the layers before this one have moved, once it has been copied."""
        while self.leaving and self.leaving[0].layer < layer:
            first = self.leaving.popleft()
            self.device.current_stream().wait_event(first.copied)
            first.source = None

    def _fetch(self, kept: _Moved) -> Tensor:
        """Begins to copy a tensor back to its device, unless that has begun."""
        if kept.fetched is None:
            kept.fetched = torch.empty_like(kept.host, device=kept.device)
            kept.arrived = self._copy(kept.host, kept.fetched)
        return kept.fetched

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        """Begins to copy what was computed until now; returns what happens when that is done."""
        self.stream.wait_stream(self.device.current_stream())
        with self.device.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()


def offload_activations(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    settings: ActivationCheckpointConfig,
    compiled: bool,
    pipelined: bool,
    kind: str,
) -> None:
    """Makes a decoder, in place, keep what its layers save in CPU memory until the backward pass.

    Tensors count that have at least as many numbers as hidden states; of the bytes of each of the
    `layers` a share is moved, of the last one none, unless it is `pipelined` or alone. `kind` is
    the type of the device that computes. The hooks are around the decoder and not around its
    layers, since compiled layers must not contain them. Raises `UserError` where layers that are
    not recomputed whole are not `compiled`: such layers save one tensor several times, torch keeps
    what is selected by operation out of reach, and weights that are cast look like activations.
    """
    require_compiled(settings.mode, compiled)
    base = backbone(model)
    staying = -1 if pipelined or len(layers) == 1 else len(layers) - 1
    keeper = _Keeper(model, layers, settings.offload_share, staying, kind)
    for number, layer in enumerate(layers):
        call_before(layer, partial(keeper.begin_layer, number))
    forward = base.forward

    def offloading(*arguments: Any, **named: Any) -> Any:
        # Else no backward pass is to come, though gradients may be recorded.
        if not (base.training and torch.is_grad_enabled()):
            return forward(*arguments, **named)
        given = first_tensor([*arguments, *named.values()])
        keeper.begin(given.shape[:2].numel())
        try:
            with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack):
                return forward(*arguments, **named)
        finally:
            keeper.end()

    base.forward = offloading


def widest(sizes: Sequence[int], share: float) -> set[int]:
    """The places of the largest of these sizes, the first ones first, within a share of the sum."""
    chosen = set()
    room = share * sum(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        if sizes[place] <= room:
            room -= sizes[place]
            chosen.add(place)
    return chosen
