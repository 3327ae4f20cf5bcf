"""Updates the weights: clipping and AdamW over a sharded model, without waiting for the device."""

from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lacuna.config.optimizers import OptimizerConfig
from lacuna.model.architecture import vocabulary_weights
from lacuna.model.build import BuiltModel
from lacuna.model.layers.linear import is_matrix
from lacuna.model.layers.wrapping import whole_tensor
from lacuna.parallel.fsdp import local
from lacuna.parallel.pipeline import tied_weights

if TYPE_CHECKING:  # an extension
    from lacuna.train.recorded import RecordedSteps


def build_optimizer(
    model: PreTrainedModel, settings: OptimizerConfig, decay_head: bool = True
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (`is_matrix`), or what the settings ask for.

    Embeddings and heads tied to them do not decay, nor do other heads unless `decay_head`. With
    `early_step_in_backward` the backward pass updates each parameter as soon as its gradient is
    complete, and drops the gradient; with `state_offload_share` the model's passes move state.
    """
    groups = _groups_by_decay(model, decay_head)
    kernels = {kind: settings.implementation == kind for kind in ("fused", "foreach")}
    is_alone = settings.name == "AdamW" and not settings.groups
    if is_alone and settings.state_dtype is None:
        betas = settings.beta1, settings.beta2
        optimizer: torch.optim.AdamW = _plain_adamw(groups, settings)(
            groups, settings.lr, betas, settings.eps, settings.weight_decay, **kernels
        )
    elif settings.state_dtype is not None:
        from lacuna.train.small_state import adamw_of  # an extension

        optimizer = adamw_of(model, settings, groups)
    else:
        from lacuna.train.muon import muon_of  # an extension

        optimizer = muon_of(model, settings, groups, kernels)

    if settings.early_step_in_backward:
        from lacuna.train.early_step import update_in_backward  # an extension

        update_in_backward(optimizer)
    if settings.state_offload_share:
        from lacuna.train.moved_state import move_state  # an extension

        move_state(model, optimizer, settings.state_offload_share)
    return optimizer


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates what this rank has of each weight, and keeps its state as the weights are.

    Of lists of sharded tensors torch works out how each is sharded, which takes half a second
    of a first step; what is done to one number does not depend on where the others are.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fills `lists`: weights, their gradients, the averages of these, and the counts."""
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return is_complex


def _plain_adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> type[LocalAdamW]:
    """AdamW for these groups: with a kernel of lacuna's own on a GPU, or as torch computes it."""
    on_gpu = all(one.device.type == "cuda" for group in groups for one in group["params"])
    if on_gpu and settings.is_plain and find_spec("triton") is not None:
        from lacuna.train.one_kernel import OneKernelAdamW  # an extension

        return OneKernelAdamW
    return LocalAdamW


def _groups_by_decay(model: PreTrainedModel, decay_head: bool) -> list[dict[str, Any]]:
    """The trained parameters that decay, and those that do not, as torch's optimizers take them."""
    spared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if not decay_head:
        spared |= {id(weight) for weight in vocabulary_weights(model).values()}
    decaying = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_matrix(module, name, parameter)
    } - spared
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if id(parameter) in decaying]},
        {
            "params": [parameter for parameter in trained if id(parameter) not in decaying],
            "weight_decay": 0.0,
        },
    ]


def _norm_dtype(device: torch.device) -> torch.dtype:
    """The dtype that norms are summed in: float64 on CPUs, where torch adds squares one by one."""
    return torch.float64 if device.type == "cpu" else torch.float32


def _norm_of_all(gradients: list[Tensor]) -> Tensor:
    """The norm of all these gradients together, which are whole or lie on one mesh."""
    norms: dict[int, Tensor] = {}  # by place: added in one order, whatever dtypes there are
    for kind in {one.dtype for one in gradients}:  # of which torch takes one in few kernels
        places = [place for place, one in enumerate(gradients) if one.dtype == kind]
        alike = [gradients[place] for place in places]
        dtype = _norm_dtype(alike[0].device)
        norms |= zip(places, torch._foreach_norm(alike, 2.0, dtype=dtype), strict=True)
    in_order = [norms[place] for place in sorted(norms)]
    return whole_tensor(torch.linalg.vector_norm(torch.stack(in_order)))


def gradient_norm(built: BuiltModel) -> Tensor:
    """The global norm of the gradients, float32, on the device that they are on.

    It is 0 when the backward pass has used the gradients up.
    """
    tied = tied_weights(built.model, built.mesh) if built.mesh.rank("pp") > 0 else ()
    counted_elsewhere = {id(weight) for weight in tied}
    # Parameters inside and outside the layers lie on different meshes: torch takes one at a time.
    parts: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in built.model.parameters():
        if parameter.grad is not None:
            parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    # A pipeline stage that trains nothing adds a zero, of the dtype and device of the others' sums.
    home = torch.device("cpu") if built.training.enable_cpu_offload else built.device
    square = torch.zeros((), dtype=_norm_dtype(home), device=home)
    for part in parts.values():
        counted = [p for p in part if id(p) not in counted_elsewhere]
        own = [p.grad for p in counted if p.grad is not None]
        if own:
            square += _norm_of_all(own).square()
    if built.pipeline is not None:
        dist.all_reduce(square, group=built.mesh.named.get_group("pp"))
    return square.sqrt().float()


@torch.no_grad()
def _clip(model: nn.Module, optimizer: torch.optim.AdamW, max_norm: float, norm: Tensor) -> None:
    """Has gradients of this global norm be scaled down to `max_norm`, as torch's clipping does.

    AdamW's fused kernel scales them as it reads them; for the others it is done in place, to what
    this rank has of them: sharding would ask for each in the list, every time.
    """
    excess = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    if isinstance(optimizer, LocalAdamW) and optimizer.defaults["fused"]:
        optimizer.grad_scale = excess  # type: ignore[attr-defined]
        return
    own = [local(one.grad) for one in model.parameters() if one.grad is not None]
    for dtype in {one.dtype for one in own}:
        torch._foreach_div_([one for one in own if one.dtype == dtype], excess)


def update(
    built: BuiltModel,
    optimizer: torch.optim.AdamW,
    divisor: Tensor,
    recorded: "RecordedSteps | None" = None,
) -> tuple[Tensor, Tensor]:
    """Clips gradients and updates weights, in place.

    Returns the norm that the gradients had, and 1 where the step was skipped, else 0. A step with
    nothing to learn from, whose `divisor` is 0, is skipped, and with `training.skip_nan_inf` so is
    one whose norm is not finite. The fused kernel reads on the device whether to skip, so that the
    host does not wait; with the others it has to. `recorded` steps have it done in their own way.
    """
    if recorded is not None:
        return recorded.update(optimizer, divisor)
    norm = gradient_norm(built)
    if built.training.max_norm > 0:
        _clip(built.model, optimizer, built.training.max_norm, norm)
    norm = norm.to(built.device)
    broken = ~torch.isfinite(norm) & built.training.skip_nan_inf
    skip = ((divisor == 0) | broken).float()
    if optimizer.defaults["fused"]:
        # The kernel reads it. To parameters in CPU memory torch would copy it without waiting.
        optimizer.found_inf = (  # type: ignore[attr-defined]
            skip.cpu() if built.training.enable_cpu_offload else skip
        )
    if optimizer.defaults["fused"] or not skip.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    built.after_update()
    return norm, skip


class WholeWeights:
    """What `SplitWeights` is to a run whose weights are whole: nothing is to be done."""

    joined = nullcontext
    accumulate = nullcontext


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's own state as `optimizer.<parameter>.<its name for it>`.

    Before the first step it is made by a step that learns nothing, so that a checkpoint can be
    loaded into it. No parameter may have a gradient.
    """
    # Of the last update, whose gradients may not have been finite.
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = 0.0
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                parameter.grad = None
                torch._foreach_zero_([local(one) for one in optimizer.state[parameter].values()])
        group["lr"] = rate
    names: dict[Tensor, str] = {one: name for name, one in model.named_parameters()}
    return {
        f"optimizer.{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
