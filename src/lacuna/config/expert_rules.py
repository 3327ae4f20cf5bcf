"""The rules about what experts that are spread or counted do not go together with."""

from lacuna.config.rules import Rule, is_given, rule_for_each
from lacuna.config.sections import Config

_DEGREE = "parallelism.expert_parallel_degree"
_RATE = "model.router_bias_update_rate"
_COUNTED = (_RATE, "metrics.router")


def _is_spread(config: Config) -> bool:
    return config.parallelism.expert_parallel_degree > 1


EXPERT_RULES = (
    Rule(
        (_DEGREE, "activation_checkpoint.mlp_chunks"),
        lambda config: _is_spread(config) and config.activation_checkpoint.mlp_chunks > 1,
        "pieces are not sent to other ranks; use one of the two",
    ),
    *rule_for_each(
        _COUNTED,
        "parallelism.tensor_parallel_degree",
        lambda config: config.parallelism.tensor_parallel_degree > 1,
        "tokens of experts are not counted on ranks that split matrices; use one of the two",
    ),
    *rule_for_each(
        _COUNTED,
        "compile.enable",
        lambda config: config.compile.enable,
        "tokens of experts are not counted in compiled layers; drop the second",
    ),
    *rule_for_each(
        _COUNTED,
        "activation_checkpoint.mlp_chunks",
        lambda config: config.activation_checkpoint.mlp_chunks > 1,
        "tokens of experts are not counted in pieces of a sequence; use one of the two",
    ),
    *rule_for_each(
        _COUNTED,
        "activation_checkpoint.offload",
        lambda config: (
            config.activation_checkpoint.offload and config.activation_checkpoint.mode != "full"
        ),
        "layers whose tokens are counted are not compiled, and of such only the inputs can be "
        "moved: set activation_checkpoint.mode to full, or use one of the two",
    ),
    Rule(
        ("metrics.router", "lora.parameters"),
        is_given("lora.parameters", lambda config: config.metrics.router),
        "tokens of stacks that have adapters are not counted; use one of the two",
    ),
    Rule(
        ("metrics.router", "quantization.base"),
        lambda config: config.metrics.router and config.quantization.base != "none",
        "tokens of quantised experts are not counted; use one of the two",
    ),
    Rule(
        (_RATE, "lora.rank"),
        is_given(_RATE, lambda config: config.lora.rank > 0),
        "adapters are saved without the router's bias; use one of the two",
    ),
)
