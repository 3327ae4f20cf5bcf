"""What cannot be moved to CPU memory between the passes is refused."""

from torch import nn

from lacuna.config import UserError


def require_several(layers: nn.ModuleList) -> None:
    """Raises `UserError` for a model of one layer, whose optimizer's state would never leave."""
    if len(layers) == 1:
        raise UserError(
            "optimizer.state_offload_share: state leaves between layers, and this model has one: "
            "leave it out."
        )


def require_compiled(mode: str, compiled: bool) -> None:
    """Raises `UserError` where layers are neither recomputed whole nor `compiled`."""
    if mode != "full" and not compiled:
        raise UserError(
            "activation_checkpoint.offload: these layers are not compiled as a whole, and of such "
            "only their inputs can be moved: set activation_checkpoint.mode = full, or "
            "compile.enable = true where layers can be compiled."
        )
