"""What moves the weights: learning rates, clipping, and AdamW over a sharded model without waiting for the device."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_

from lacuna.config import Config
from lacuna.model.architecture import vocabulary_weights
from lacuna.model.build import BuiltModel
from lacuna.model.lora import whole_tensor
from lacuna.parallel.pipeline import tied_weights


def learning_rate(config: Config, step: int, total: int) -> float:
    """The learning rate used in `step` (from 0) of `total`, as flame and torchtitan define it.

    Times `optimizer.lr`: (s+1)/(W+1) during W warmup steps, then 1, then over D decay steps from 1 to
    `lr_scheduler.lr_min` by p = (s+1−W−stable)/(D+1): 1−p, 1−√p, or ½(1+cos πp). D is the share
    `lr_scheduler.decay_ratio` of all steps, or all after the warmup; never more than those.
    """
    peak, schedule = config.optimizer.lr, config.lr_scheduler
    if step < schedule.warmup_steps:
        return peak * (step + 1) / (schedule.warmup_steps + 1)
    left, ratio = total - schedule.warmup_steps, schedule.decay_ratio
    decaying = max(min(left, left if ratio is None else round(total * ratio)), 0)
    progress = (step + 1 - (total - decaying)) / (decaying + 1)
    if schedule.decay_type == "constant" or progress <= 0:
        return peak
    curved = {"sqrt": 1 - math.sqrt(progress), "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return peak * (schedule.lr_min + (1 - schedule.lr_min) * curved.get(schedule.decay_type, 1 - progress))


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on embeddings (tied heads included), norms and biases.

    Nor on the head where only rows of new tokens are trained. With `optimizer.early_step_in_backward` the backward pass
    updates each parameter as soon as its gradient is complete, which then is dropped.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if config.model.train_new_tokens_only:
        embeddings |= {id(weight) for weight in vocabulary_weights(model).values()}
    decayed, free = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 and id(parameter) not in embeddings else free).append(parameter)
    settings = config.optimizer
    groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    betas = settings.beta1, settings.beta2
    kernels = {kind: settings.implementation == kind for kind in ("fused", "foreach")}
    optimizer = torch.optim.AdamW(groups, settings.lr, betas, settings.eps, settings.weight_decay, **kernels)

    def step_in_backward(_: Tensor) -> None:
        optimizer.found_inf = None  # the last step may have been skipped
        optimizer.step()  # only those that have a gradient
        optimizer.zero_grad(set_to_none=True)

    for parameter in (*decayed, *free) if settings.early_step_in_backward else ():
        parameter.register_post_accumulate_grad_hook(step_in_backward)
    return optimizer


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all of them, whole or on one mesh. On CPUs torch sums squares one by one: too many for float32."""
    dtype = torch.float64 if gradients[0].device.type == "cpu" else torch.float32
    return whole_tensor(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=dtype))))


def clip_gradients(built: BuiltModel, max_norm: float) -> Tensor:
    """Scales gradients down in place to a global norm of `max_norm` (0: leaves them). Returns the norm before.

    The norm is 0 when the backward pass has used the gradients up. Parameters inside and outside the layers lie on
    different meshes, of which torch takes one at a time.
    """
    counted_elsewhere = {id(weight) for weight in tied_weights(built.model, built.mesh) if built.mesh.rank("pp") > 0}
    parts: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in built.model.parameters():
        if parameter.grad is not None:
            parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = [_norm([p.grad for p in part if id(p) not in counted_elsewhere]) for part in parts.values()]
    square = sum((norm.square() for norm in norms), torch.zeros(()))
    if built.pipeline is not None:
        dist.all_reduce(square, group=built.mesh.named.get_group("pp"))
    norm = square.sqrt().float()
    if max_norm > 0:
        for part in parts.values():
            clip_grads_with_norm_(part, max_norm, norm, foreach=True)
    return norm.to(built.device)


def update(built: BuiltModel, optimizer: torch.optim.AdamW, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Clips and updates in place. Returns the gradient norm before clipping, and whether the step was skipped (1, 0).

    A step without trained tokens is skipped; so is one whose norm is not finite, with `training.skip_nan_inf`. The
    fused kernel reads that on the device, so that nobody waits; the others have to ask.
    """
    norm = clip_gradients(built, built.config.training.max_norm)
    broken = ~torch.isfinite(norm) & built.config.training.skip_nan_inf
    skip = ((trained == 0) | broken).float()
    if optimizer.defaults["fused"]:
        optimizer.found_inf = skip
    if optimizer.defaults["fused"] or not skip.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, skip


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: `optimizer.<parameter>.<exp_avg|exp_avg_sq|step>`, not copied.

    Before the first step it is made, as AdamW would, so that a checkpoint can be loaded into it.
    """
    names, tensors = {parameter: name for name, parameter in model.named_parameters()}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                state |= {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
            tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in state.items()}
    return tensors
