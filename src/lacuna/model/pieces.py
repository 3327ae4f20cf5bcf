"""Feed-forward blocks computed piece by piece, so that long rows need less memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError
from lacuna.model.architecture import decoder_layers, is_from_fla
from lacuna.model.specimen import LENGTH, specimen_and_layers
from lacuna.parallel.backbone import backbone
from lacuna.parallel.mixtures import mixtures_in
from lacuna.parallel.tensor import gathered_blocks, layer_styles

SETTING = "activation_checkpoint.mlp_chunks"
_CPU = torch.device("cpu")


def compute_in_pieces(model: PreTrainedModel, pieces: int, tensor_parallel: int) -> None:
    """Has a model's feed-forward blocks work through the sequence in pieces, in place.

    The pieces follow one another, and each is computed again in the backward pass, so that only one
    piece at a time has its wide activations in memory. Results and gradients are the same, but for
    the order in which the gradients of weights are summed. It costs one more forward pass of the
    blocks. `tensor_parallel` ranks are to share each block, which is not split yet. Raises
    `UserError` for layers that have no such block.
    """
    if is_from_fla(model.config):
        raise UserError(
            f"{SETTING}: fla's feed-forward blocks are not computed in pieces: have them be "
            'recomputed instead, by activation_checkpoint.mode = "selective" and '
            'selective_ac_option = "op".'
        )
    blocks = token_wise_blocks(model.config)
    layers = decoder_layers(model)
    if tensor_parallel > 1 and any(mixtures_in(layer, model.config) for layer in layers):
        raise UserError(
            f"{SETTING}, parallelism.tensor_parallel_degree: pieces of a mixture of experts are "
            "not computed by ranks that split matrices: use one of the two."
        )
    if tensor_parallel > 1:
        gathered = gathered_blocks(layer_styles(model.config))
        blocks = {block for block in blocks if block[0] in gathered}
    if not blocks:
        raise UserError(
            f"{SETTING}: layers of {model.config.model_type!r} models have no block that computes "
            "each token by itself; leave it out."
        )
    parts = [part for layer in layers for part in layer.named_modules()]
    # Layers may share one.
    for module in {module: None for name, module in parts if (name, type(module)) in blocks}:
        module.tell_piece = None  # whom to tell of pieces, if anybody must know
        module.forward = _in_pieces(module, module.forward, pieces, tensor_parallel)


def token_wise_blocks(model_config: PretrainedConfig) -> set[tuple[str, type[nn.Module]]]:
    """The blocks of decoder layers that compute each token by itself: their names and classes.

    A block has parts of its own, and makes hidden states [B, T, width] of one such tensor and
    nothing else. A model in small tells: half of the sequence must give half of the result.
    """
    model, layers = specimen_and_layers(model_config, None, LENGTH, _CPU, least=1)
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        one = [value for value in (*given, *named.values()) if value is not None]
        if len(given) == len(one) == 1 and _is_sequence(given[0]) and _is_sequence(made):
            seen[module] = given[0], made

    candidates = {
        module: (name, type(module))
        for layer in layers
        for name, module in layer.named_modules()
        if name and _is_block(module)
    }
    hooks = [one.register_forward_hook(note, with_kwargs=True) for one in candidates]
    with torch.no_grad():
        backbone(model)(input_ids=torch.arange(LENGTH)[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        others = {
            block
            for module, block in candidates.items()
            if module not in seen or not _is_token_wise(module, *seen[module])
        }
    found = {*candidates.values()} - others
    names = {name for name, _ in found}
    # A part of a block that is found works in the block's pieces.
    return {
        (name, kind)
        for name, kind in found
        if not any(name.startswith(f"{other}.") for other in names)
    }


def _is_block(module: nn.Module) -> bool:
    is_norm = "Norm" in type(module).__name__
    has_parts = any(True for _ in module.children())
    return has_parts and not is_norm and any(True for _ in module.parameters())


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3 and value.shape[:2] == (1, LENGTH)


def _is_token_wise(block: nn.Module, whole: Tensor, result: Tensor) -> bool:
    """Whether the two halves of a sequence [1, T, width], by themselves, give its result."""
    halves = torch.cat([block(half) for half in whole.chunk(2, dim=1)], dim=1)
    return torch.allclose(halves, result, rtol=1e-4, atol=1e-5)


def _in_pieces(
    module: nn.Module, forward: Callable[..., Tensor], pieces: int, tensor_parallel: int
) -> Callable[..., Tensor]:
    # Layers may name what they leave out, such as a cache.
    def piecewise(hidden: Tensor, *absent: None, **named: Any) -> Tensor:
        made = []
        for index, part in enumerate(_pieces_of(hidden, pieces, tensor_parallel)):
            tell: Any = module.tell_piece
            compute = forward if tell is None else partial(tell, forward, index, pieces)
            made.append(checkpoint(compute, part, *absent, use_reentrant=False, **named))
        return torch.cat(made, dim=1)

    return piecewise


def _pieces_of(hidden: Tensor, pieces: int, tensor_parallel: int) -> list[Tensor]:
    """Cuts hidden states [B, T, width] along the sequence.

    Tensor-parallel ranks keep one slice of the sequence each of what a block makes, so that each
    piece has a part of every slice. Blocks may view what they are given in other shapes, so that a
    piece of several rows is a tensor of its own.
    """
    slices = [one.chunk(pieces, dim=1) for one in hidden.chunk(tensor_parallel, dim=1)]
    if tensor_parallel == 1:
        return [one.contiguous() for one in slices[0]]
    return [torch.cat(parts, dim=1) for parts in zip(*slices, strict=True)]
