"""Makes fla's models known to transformers where a configuration asks for one of them."""

import importlib.util
from typing import Any

from transformers import PretrainedConfig

from lacuna.config import UserError

# The model types that fla 0.6.0 registers, known by name so that a missing fla can be told.
MODEL_TYPES = frozenset(
    (
        *("abc", "bitnet", "cat", "comba", "cyclic_flow_attention", "delta_net", "deltaformer"),
        *("forgetting_transformer", "gated_deltanet", "gated_deltaproduct", "gla", "gsa", "hgrn"),
        *("hgrn2", "kda", "lightnet", "linear_attn", "log_linear_mamba2", "mamba", "mamba2"),
        *("mamba3", "mesa_net", "mla", "moba", "mom", "nsa", "parallax", "path_attn"),
        *("precond_gated_deltanet", "precond_kda", "raven", "retnet", "rodimus", "rwkv6", "rwkv7"),
        *("samba", "stickbreaking_attn", "transformer", "wall_transformer", "yoco"),
    )
)
# Of these names transformers has models of its own, which have none of the settings below.
SHARED_TYPES = frozenset(("bitnet", "mamba", "mamba2"))
_OWN_SETTINGS = frozenset(("fuse_norm", "fuse_cross_entropy", "fuse_swiglu"))


def is_meant(description: dict[str, Any]) -> bool:
    """Whether a configuration, as read from its file, is one of fla's.

    Where fla and transformers use one name for two models, it is fla's if it has fla's settings.
    """
    kind = description.get("model_type")
    if kind in SHARED_TYPES:
        return not _OWN_SETTINGS.isdisjoint(description)
    return kind in MODEL_TYPES


def register_models(source: str) -> None:
    """Imports fla, which registers its models, if the configuration at `source` is one of fla's.

    `source` is a file, a folder or a name on the Hub. Raises `UserError` where fla is missing. What
    cannot be read is left to transformers, which says why.
    """
    try:
        description, _ = PretrainedConfig.get_config_dict(source)
    except (OSError, ValueError):
        return
    if not is_meant(description) or description.get("auto_map"):
        return
    missing = [name for name in ("fla", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"model: {source!r} is a {description['model_type']!r} model of flash-linear-attention,"
            f" which needs the package {' and '.join(missing)}: "
            "pip install -e '.[fla]' -c constraints.txt."
        )
    importlib.import_module("fla.models")
