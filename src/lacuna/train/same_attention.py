"""Whether weights of a checkpoint are read by the attention that they were trained with."""

import json
from pathlib import Path

from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.config.attentions import is_own
from lacuna.formats.checkpoint import DESCRIPTION


def require_same_attention(
    path: str, asked: str, model_config: PretrainedConfig, is_resumed: bool
) -> None:
    """Raises `UserError` where the run would attend by another function than the checkpoint's.

    Implementations of softmax are one function, and are not noted in a model's configuration. A run
    that is not resumed may begin with weights of softmax, whatever it attends by. `asked` is
    `model.attention`, where auto is what the configuration of the run's model says.
    """
    description = Path(path, DESCRIPTION, "config.json")
    if not description.exists():
        return
    noted = json.loads(description.read_text()).get("attn_implementation")
    before = noted if is_own(noted) else None
    wanted = str(model_config._attn_implementation) if asked == "auto" else asked
    now = wanted if is_own(wanted) else None
    if before == now or (before is None and not is_resumed):
        return
    mend = "leave that out" if before is None else f'set model.attention = "{before}"'
    was, becomes = (f'"{name}"' if name else "softmax" for name in (before, now))
    if is_resumed:
        raise UserError(
            f"model.attention: the run was started with {was}, and its weights would be read by "
            f"{becomes}: {mend}, or start a new run with another job.dump_folder."
        )
    raise UserError(
        f"model.attention: the weights of {path} were trained with {was}, and would be read by "
        f"{becomes}: {mend}, or begin with other weights."
    )
