"""Updates in the backward pass, so that gradients never exist all at once."""

import torch
from torch import Tensor


def update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Has the backward pass update each parameter as soon as its gradient is complete.

    The gradient is then dropped.
    """

    def step(_: Tensor) -> None:
        # The last step may have been skipped.
        optimizer.found_inf = None  # type: ignore[attr-defined]
        optimizer.step()  # updates only parameters that have a gradient
        optimizer.zero_grad(set_to_none=True)

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(step)
