"""The optimizer's state in CPU memory while gradients are computed, with copies beside that."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.model.architecture import decoder_layers
from lacuna.parallel.around_layers import call_after, call_before
from lacuna.parallel.fsdp import local
from lacuna.parallel.movable import require_several

# Smaller tensors, as a share of the largest, stay.
_SMALL = 1e-3
# How many layers before it leaves a part is copied.
_AHEAD = 2
# Bytes to whose multiples tensors begin in a part, as torch's allocator has it.
_ALIGNMENT = 512


@dataclass(eq=False)
class _Part:
    """Tensors of the optimizer's state that share memory.

    Attributes:
        values: that memory, uint8.
        host: holds its values while they are away.
        layer: the number of the layer before which it leaves, or how many there are if it does
            after the last; it comes back when the layer, or the last, has gone backward.
        is_home: whether the tensors have memory.
        is_copied: whether `host` has the values since the last update, or will have.
        copied: happens when the last copy, out or back, is done.
    """

    values: Tensor
    host: Tensor
    layer: int
    is_home: bool = True
    is_copied: bool = False
    copied: Any = None


class _Mover:
    """Moves a share of an optimizer's state out in the forward pass and back in the backward pass.

    Activations grow as state leaves, and it comes back as they go. The stream that computes
    allocates what comes back, and waits for a copy before it frees the memory of what leaves.

    Attributes:
        optimizer: whose state it is.
        share: the share of its bytes that is moved, at most.
        layers: how many layers the model has.
        parts: what is moved; empty before the first update.
        tensors: how many tensors the state had when they were chosen.
        is_updated: whether there was an update since then.
        is_returning: whether all is to be there when a backward pass is done.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, share: float, layers: int, kind: str
    ) -> None:
        self.optimizer = optimizer
        self.share = share
        self.layers = layers
        self.kind = kind
        self.device: Any = torch.get_device_module(kind)  # streams of a CPU do nothing
        # One for both ways, so that nothing comes back before it has left.
        self.stream = self.device.Stream()
        self.parts: list[_Part] = []
        self.tensors = 0
        self.is_updated = False
        self.is_returning = False

    def leave(self, layer: int) -> None:
        """Gives away the memory of what leaves before this layer, and copies what leaves soon.

        Copies that are asked for all at once would hold up what the other stream is asked for
        later.
        """
        self.is_returning = False  # also where a backward pass has failed
        if self.is_updated:
            self._choose()
        for part in self.parts:
            if part.is_home and part.is_copied and part.layer <= layer:
                self.device.current_stream().wait_event(part.copied)
                part.values.untyped_storage().resize_(0)
                part.is_home = False
        self.stream.wait_stream(self.device.current_stream())
        for part in self.parts:
            if not part.is_copied and part.layer <= layer + _AHEAD:
                with self.device.stream(self.stream):
                    part.host.copy_(part.values, non_blocking=True)
                part.copied = self.stream.record_event()
                part.is_copied = True

    def come_back(self, layer: int) -> None:
        """Begins to bring back what left before this layer or a later one, in a backward pass."""
        self._fetch(layer)
        if not self.is_returning:
            self.is_returning = True
            torch.autograd.Variable._execution_engine.queue_callback(self.bring_home)

    def bring_home(self) -> None:
        """Brings back all that is still away; what is computed from now on finds it there."""
        self._fetch(0)
        self.device.current_stream().wait_stream(self.stream)
        self.is_returning = False

    def _fetch(self, layer: int) -> None:
        """Begins to copy back what left before this layer or a later one."""
        away = [part for part in self.parts if not part.is_home and part.layer >= layer]
        for part in away:
            part.values.untyped_storage().resize_(part.host.nbytes)
            part.is_home = True
        self.stream.wait_stream(self.device.current_stream())
        with self.device.stream(self.stream):
            for part in away:
                part.values.copy_(part.host, non_blocking=True)
                part.copied = self.stream.record_event()

    def note_update(self) -> None:
        """Says that the state has been changed."""
        self.is_updated = True
        for part in self.parts:
            part.is_copied = False

    @torch.no_grad()
    def _choose(self) -> None:
        """Chooses what is moved: the first tensors, spread over the layers by bytes.

        A parameter has state since its first gradient, and what is new makes all be chosen anew.
        """
        self.is_updated = False
        state = [
            local(tensor)
            for tensors in self.optimizer.state.values()
            for tensor in tensors.values()
            if isinstance(tensor, Tensor) and tensor.device.type == self.kind
        ]
        if len(state) == self.tensors:
            return
        self.tensors = len(state)
        whole = sum(tensor.nbytes for tensor in state)
        room = self.share * whole
        least = _SMALL * max((tensor.nbytes for tensor in state), default=0)
        chosen: list[Tensor] = []
        for tensor in state:
            if least <= tensor.nbytes <= room and tensor.is_contiguous():
                room -= tensor.nbytes
                chosen.append(tensor)
        self.parts = self._spread(chosen)
        moved = sum(part.values.nbytes for part in self.parts)
        said = "optimizer: %.3f of %.3f GiB of state are in CPU memory while gradients are computed"
        logger.info(said, moved / 2**30, whole / 2**30)

    def _spread(self, chosen: Sequence[Tensor]) -> list[_Part]:
        """These tensors in parts, spread over the layers by bytes."""
        total = sum(tensor.nbytes for tensor in chosen)
        of_layers: dict[int, list[Tensor]] = {}
        before = 0
        for tensor in chosen:
            before += tensor.nbytes
            of_layers.setdefault(-(-before * self.layers // total), []).append(tensor)
        parts = []
        for layer, tensors in of_layers.items():
            values = _joined(tensors)
            host = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
            parts.append(_Part(values, host, layer))
        return parts


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Has tensors share memory, in place, so that no small gaps are left by it; returns it."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    joined = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    for tensor, place in zip(tensors, joined.split(sizes), strict=True):
        own = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.set_(own.copy_(tensor))
    return joined


def move_state(model: PreTrainedModel, optimizer: torch.optim.Optimizer, share: float) -> None:
    """Has a share of an optimizer's state be in CPU memory while gradients are computed.

    Changes `model` and `optimizer` in place: state that exists when a forward pass in training mode
    begins leaves between the layers, and is back when the backward pass is done. Raises `UserError`
    for a model of one layer, and in the first pass where no gradients pass between layers.
    """
    layers = decoder_layers(model)
    require_several(layers)
    # Of the model itself some that is frozen may be in CPU memory.
    trained = next(one for group in optimizer.param_groups for one in group["params"])
    kind = trained.device.type
    mover = _Mover(optimizer, share, len(layers), kind)
    optimizer.register_step_pre_hook(lambda *_: mover.bring_home())
    optimizer.register_step_post_hook(lambda *_: mover.note_update())

    def before_layer(number: int, layer: nn.Module, hidden: Tensor) -> None:
        # Else no backward pass is to come, though gradients may be recorded.
        if not (layer.training and torch.is_grad_enabled()):
            return
        if hidden.grad_fn is not None:
            mover.leave(number)
            hidden.grad_fn.register_prehook(lambda _: mover.come_back(number))
        elif number == len(layers) - 1:
            raise UserError(
                "optimizer.state_offload_share: between the layers of this model no gradients "
                "pass that would tell when its state is wanted again: leave it out."
            )

    def after_last() -> None:
        if layers[-1].training and torch.is_grad_enabled():
            mover.leave(len(layers))

    for number, layer in enumerate(layers):
        call_before(layer, partial(before_layer, number, layer))
    call_after(layers[-1], after_last)
