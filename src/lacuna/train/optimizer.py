"""AdamW over a sharded model: parameter groups, one step without waiting for the device, state for checkpoints."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from lacuna.config import Config
from lacuna.model.build import BuiltModel
from lacuna.parallel.pipeline import tied_weights


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
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": free, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=settings.implementation == "fused",
        foreach=settings.implementation == "foreach",
    )
    if settings.early_step_in_backward:
        step_in_backward(optimizer)
    return optimizer


def step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Lets the backward pass update each parameter as soon as its gradient is complete, which then is dropped."""

    def update(_: Tensor) -> None:
        optimizer.step()  # only those that have a gradient
        optimizer.zero_grad(set_to_none=True)

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(update)


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all of them, on one mesh. On CPUs torch sums squares one by one, which float32 is too short for."""
    dtype = torch.float64 if gradients[0].device.type == "cpu" else torch.float32
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=dtype)))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(built: BuiltModel, max_norm: float) -> Tensor:
    """Scales gradients down in place to a global norm of `max_norm` (0: leaves them). Returns the norm before.

    The norm is 0 when the backward pass has used the gradients up. Parameters inside and outside the layers lie on
    different meshes, of which torch takes one at a time.
    """
    inside = {id(parameter) for stage in built.stages for layer in stage.layers for parameter in layer.parameters()}
    counted_elsewhere = {id(weight) for weight in tied_weights(built.model, built.mesh) if built.mesh.rank("pp") > 0}
    trained = [parameter for parameter in built.model.parameters() if parameter.grad is not None]
    parts = [[parameter for parameter in trained if (id(parameter) in inside) == is_inside] for is_inside in (0, 1)]
    norms = [
        _norm([parameter.grad for parameter in part if id(parameter) not in counted_elsewhere])
        for part in parts
        if part
    ]
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=built.device)
    if built.pipeline is not None:
        dist.all_reduce(square, group=built.mesh.pipeline)
    norm = square.sqrt().float()
    if max_norm > 0:
        for part in parts:
            clip_grads_with_norm_(part, max_norm, norm, foreach=True)
    return norm.to(built.device)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets it for every parameter, in place; before the backward pass, which may be what updates them."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_step(optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
    """One update in place, left out where `skip` (a float scalar on the device) is 1.

    The fused kernel reads `skip` on the device, so that nobody waits; the others have to ask.
    """
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
