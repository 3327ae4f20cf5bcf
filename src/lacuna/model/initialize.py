"""Initial weights of a sharded model, bit-equal to transformers' own on one process, and its buffers."""

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions


def tie_weights(model: PreTrainedModel) -> None:
    """Ties in place what the model ties, unless only one end of it is on this rank's pipeline stages."""
    names = dict(model.named_parameters(remove_duplicate=False))
    if all(name in names for pair in model.all_tied_weights_keys.items() for name in pair):
        model.tie_weights()


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, shadow: PreTrainedModel, device: torch.device, seed: int) -> None:
    """Fills the sharded, materialised `model` with the weights that transformers would draw from `seed`.

    `shadow` is the same model, unsharded, on the meta device. One decoder layer of it at a time is made real on
    `device`, initialised by the model's own code, copied slice by slice and dropped, so that every rank draws the
    same numbers and none holds more than its shards and one layer. (DTensor's own random numbers are the same on
    every rank of a CPU mesh, and transformers' zeroing of the padding row does not reach a DTensor.)
    """
    torch.manual_seed(seed)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    layers = {id(layer) for child in shadow.modules() if isinstance(child, nn.ModuleList) for layer in child}

    def visit(module: nn.Module, prefix: str) -> None:
        is_layer = id(module) in layers
        if not is_layer:
            for name, child in module.named_children():
                visit(child, f"{prefix}{name}.")
        module.to_empty(device=device, recurse=is_layer)
        if is_layer:  # first the children: a parent may correct what they drew (GPT-2's c_proj)
            module.apply(shadow._init_weights)
        else:
            shadow._init_weights(module)
        for name, parameter in module.named_parameters(recurse=is_layer):
            # What is tied follows its source; what another pipeline stage holds is drawn all the same.
            if prefix + name not in model.all_tied_weights_keys and prefix + name in parameters:
                target = parameters[prefix + name]
                # No source rank: every rank has the whole, nothing is sent.
                shard = distribute_tensor(parameter, target.device_mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(shard.to_local())  # which may be on other devices
        module.to_empty(device="meta", recurse=is_layer)

    with guard_torch_init_functions():
        visit(shadow, "")
    tie_weights(model)


@torch.no_grad()
def compute_buffers(model: PreTrainedModel, shadow: PreTrainedModel, device: torch.device, loaded: bool) -> None:
    """Computes the buffers of `model` that no file holds (rotary frequencies, masks), by the model's own code.

    Unless its weights are `loaded`, those that files hold as well. `shadow` is the same model on the meta device:
    working there cannot touch weights that were just loaded. Raises `RuntimeError` when the model leaves one unset.
    """
    modules = dict(model.named_modules())
    for prefix, module in shadow.named_modules():
        if not module._buffers or prefix not in modules:  # another pipeline stage has it
            continue
        module.to_empty(device=device, recurse=False)
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        shadow._init_weights(module)
        target = modules[prefix]._buffers
        for name, buffer in module.named_buffers(recurse=False):
            kept = loaded and name not in module._non_persistent_buffers_set
            if not kept and buffer.isnan().any():
                raise RuntimeError(f"{type(model).__name__} does not compute its buffer {prefix}.{name}")
            target[name] = target[name].to(device) if kept else buffer
