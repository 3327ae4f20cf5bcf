"""The attentions that a run may ask for: transformers', lacuna's, and functions of the user's."""

from lacuna.config.errors import did_you_mean
from lacuna.config.user_code import import_attribute

# Softmax over the keys, by different kernels.
SOFTMAX = (
    "auto",
    "sdpa",
    "eager",
    "varlen",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
)
# Something else than softmax, by name -> where it is declared.
OTHER = {
    "softpick": "lacuna.model.softpick:SOFTPICK",
    "rectified": "lacuna.model.softpick:RECTIFIED",
    "scaled_softmax": "lacuna.model.softpick:SCALED_SOFTMAX",
    "scaled_softpick": "lacuna.model.softpick:SCALED_SOFTPICK",
    "softmax_plus_one": "lacuna.model.softmax_variants:SOFTMAX_PLUS_ONE",
    "softmax_sinks": "lacuna.model.softmax_variants:SOFTMAX_SINKS",
    "gated_softmax": "lacuna.model.softmax_variants:GATED_SOFTMAX",
    "head_gated_softmax": "lacuna.model.softmax_variants:HEAD_GATED_SOFTMAX",
}
# Parameters of attentions that files of softmax weights lack; the run then begins them itself.
SCALE = "attention_scale"
SINKS = "attention_sinks"
# How transformers' name of one of these begins while a model is trained.
TRAINED = "lacuna_own:"


def is_own(attention: str | None) -> bool:
    """Whether this is the name of an attention that is not softmax, lacuna's or a user's."""
    name = attention or ""
    # Names of kernels on the Hub have a slash, and may have a colon.
    return name in OTHER or (":" in name and "/" not in name)


def known_attention(name: str) -> str:
    """The name itself, if there is such an attention. Raises `ValueError` otherwise."""
    if ":" in name:
        import_attribute(name)
    elif name not in (*SOFTMAX, *OTHER):
        alike = did_you_mean(name, (*SOFTMAX, *OTHER))
        mend = alike or "; choose one, or an attention of your own as module:name"
        raise ValueError(f"only {', '.join((*SOFTMAX, *OTHER))} are available{mend}")
    return name
