"""What moves the weights: learning rates, clipping, and AdamW over a sharded model without waiting for the device."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import clip_grads_with_norm_
from transformers.pytorch_utils import Conv1D

from lacuna.config import Config
from lacuna.model.architecture import vocabulary_weights
from lacuna.model.build import BuiltModel
from lacuna.model.layers.wrapping import whole_tensor
from lacuna.parallel.pipeline import tied_weights

# Words in the names of parameters that are added, multiplied with, or looked up.
_NO_MATRICES = {"bias", "log", "d", "scale", "mix", "pos", "position", "emb", "embed", "embedding"}


def warmup_steps(config: Config, total: int) -> int:
    """Steps of warmup in a run of `total`: as given, else a tenth of them, and no more than flame's 200."""
    given = config.lr_scheduler.warmup_steps
    return min(total // 10, 200) if given is None else given


def peak_step(config: Config, total: int) -> int:
    """The step (from 0) with the highest learning rate: the last of the warmup or the first after it."""
    warmup = warmup_steps(config, total)
    around = (min(max(step, 0), total - 1) for step in (warmup - 1, warmup))
    return max(around, key=lambda step: learning_rate(config, step, total))


def learning_rate(config: Config, step: int, total: int) -> float:
    """The learning rate used in `step` (from 0) of `total`, as flame and torchtitan define it.

    Times `optimizer.lr`: (s+1)/(W+1) during W warmup steps, then 1, then over D decay steps from 1
    to `lr_scheduler.lr_min` by p = (s+1−W−stable)/(D+1): 1−p, 1−√p, or ½(1+cos πp). D is the share
    `lr_scheduler.decay_ratio` of all steps, or all after the warmup; never more than those.
    """
    peak, schedule, warmup = config.optimizer.lr, config.lr_scheduler, warmup_steps(config, total)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    left, ratio = total - warmup, schedule.decay_ratio
    decaying = max(min(left, left if ratio is None else round(total * ratio)), 0)
    progress = (step + 1 - (total - decaying)) / (decaying + 1)
    if schedule.decay_type == "constant" or progress <= 0:
        return peak
    curved = {"sqrt": 1 - math.sqrt(progress), "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return peak * (
        schedule.lr_min + (1 - schedule.lr_min) * curved.get(schedule.decay_type, 1 - progress)
    )


def is_matrix(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Whether the parameter of this name in a module is one of its matrices, or a stack of these.

    Biases, scales, positions and rates of decaying states are none, however many dimensions they
    have: those of experts are stacked, those of state-space models are one for every state.
    """
    if parameter.ndim < 2 or isinstance(module, nn.Embedding):
        return False
    if isinstance(module, nn.Linear | Conv1D | _ConvNd):
        return True
    words = {*name.lower().split("_")}
    is_vector = sum(size > 1 for size in parameter.shape) < 2
    return not (is_vector or words & _NO_MATRICES or "Norm" in type(module).__name__)


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (`is_matrix`): not on embeddings, nor heads tied to them.

    Nor on the head where only rows of new tokens are trained. With
    `optimizer.early_step_in_backward` the backward pass updates each parameter as soon as its
    gradient is complete, which then is dropped.
    """
    spared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if config.model.train_new_tokens_only:
        spared |= {id(weight) for weight in vocabulary_weights(model).values()}
    matrices = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_matrix(module, name, parameter)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if id(parameter) in matrices - spared]
    free = [parameter for parameter in trained if id(parameter) not in matrices - spared]
    settings = config.optimizer
    groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    betas = settings.beta1, settings.beta2
    kernels = {kind: settings.implementation == kind for kind in ("fused", "foreach")}
    optimizer = torch.optim.AdamW(
        groups, settings.lr, betas, settings.eps, settings.weight_decay, **kernels
    )

    def step_in_backward(_: Tensor) -> None:
        optimizer.found_inf = None  # the last step may have been skipped
        optimizer.step()  # only those that have a gradient
        optimizer.zero_grad(set_to_none=True)

    for parameter in (*decayed, *free) if settings.early_step_in_backward else ():
        parameter.register_post_accumulate_grad_hook(step_in_backward)
    return optimizer


def _norm_dtype(device: torch.device) -> torch.dtype:
    """What norms are summed in. On CPUs torch sums squares one by one: too many for float32."""
    return torch.float64 if device.type == "cpu" else torch.float32


def _norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all of them, whole or on one mesh."""
    dtype = _norm_dtype(gradients[0].device)
    return whole_tensor(
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=dtype)))
    )


def clip_gradients(built: BuiltModel, max_norm: float) -> Tensor:
    """Scales gradients down in place to a global norm of `max_norm` (0: leaves them). Returns the norm before.

    The norm is 0 when the backward pass has used the gradients up. Parameters inside and outside
    the layers lie on different meshes, of which torch takes one at a time.
    """
    counted_elsewhere = {
        id(weight) for weight in tied_weights(built.model, built.mesh) if built.mesh.rank("pp") > 0
    }
    parts: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in built.model.parameters():
        if parameter.grad is not None:
            parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    # Also where a stage of a pipeline trains nothing: its zero must be like the others' sums.
    home = torch.device("cpu") if built.config.training.enable_cpu_offload else built.device
    square = torch.zeros((), dtype=_norm_dtype(home), device=home)
    for part in parts.values():
        own = [p.grad for p in part if id(p) not in counted_elsewhere]
        if own:
            square += _norm(own).square()
    if built.pipeline is not None:
        dist.all_reduce(square, group=built.mesh.named.get_group("pp"))
    norm = square.sqrt().float()
    if max_norm > 0:
        for part in parts.values():
            clip_grads_with_norm_(part, max_norm, norm, foreach=True)
    return norm.to(built.device)


def update(
    built: BuiltModel, optimizer: torch.optim.AdamW, divisor: Tensor
) -> tuple[Tensor, Tensor]:
    """Clips and updates in place. Returns the gradient norm before clipping, and whether the step was skipped (1, 0).

    A step with nothing to learn from, a `divisor` of 0, is skipped; so is one whose norm is not
    finite, with `training.skip_nan_inf`. The fused kernel reads that on the device, so that nobody
    waits; the others have to ask.
    """
    norm = clip_gradients(built, built.config.training.max_norm)
    broken = ~torch.isfinite(norm) & built.config.training.skip_nan_inf
    skip = ((divisor == 0) | broken).float()
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
                state["step"] = torch.zeros(
                    (), device=parameter.device if group["fused"] else "cpu"
                )
                state |= {
                    moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")
                }
            tensors |= {
                f"optimizer.{names[parameter]}.{key}": value for key, value in state.items()
            }
    return tensors
