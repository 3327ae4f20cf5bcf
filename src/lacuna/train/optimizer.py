"""AdamW over a sharded model: parameter groups, one step without waiting for the device, state for checkpoints."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lacuna.config import Config


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on embeddings (tied heads included), norms and biases."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    decayed, free = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 and id(parameter) not in embeddings else free).append(parameter)
    settings = config.optimizer
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": free, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=settings.implementation == "fused",
        foreach=settings.implementation == "foreach",
    )


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients down in place to a global norm of `max_norm` (0: leaves them). Returns the norm before."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        clip_grads_with_norm_(model.parameters(), max_norm, norm, foreach=True)
    return norm


def optimizer_step(optimizer: torch.optim.Optimizer, learning_rate: float, skip: Tensor | None) -> None:
    """One update in place, left out where `skip` (a float scalar on the device) is 1.

    The fused kernel reads `skip` on the device, so that nobody waits; the others have to ask.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if skip is None:
        optimizer.step()
    elif optimizer.defaults["fused"]:
        optimizer.grad_scale, optimizer.found_inf = None, skip
        optimizer.step()
    elif not skip.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def allocate_state(optimizer: torch.optim.AdamW) -> None:
    """Gives every parameter AdamW's state before the first step, so that a checkpoint can be loaded into it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                device = parameter.device if group["fused"] else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: `optimizer.<parameter>.<exp_avg|exp_avg_sq|step>`, not copied."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
