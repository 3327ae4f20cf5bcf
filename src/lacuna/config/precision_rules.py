"""What does not go together with weights or products of few bits: settings, when, and why."""

from lacuna.config.rules import Rule, is_changed, is_given, rule_for_each

PRECISION_RULES: tuple[Rule, ...] = (
    *(
        Rule(
            (f"float8.{name}", "float8.enable_float8_linear"),
            is_changed(f"float8.{name}", lambda config: not config.float8.enable_float8_linear),
            "does nothing without the second; set it",
        )
        for name in (
            "recipe_name",
            "filter_fqns",
            "filter_small",
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "emulate",
        )
    ),
    Rule(
        ("float8.precompute_float8_dynamic_scale_for_fsdp", "float8.enable_fsdp_float8_all_gather"),
        lambda config: (
            config.float8.precompute_float8_dynamic_scale_for_fsdp
            and not config.float8.enable_fsdp_float8_all_gather
        ),
        "scales are computed ahead only for the second; set it",
    ),
    Rule(
        ("float8.enable_fsdp_float8_all_gather", "float8.recipe_name"),
        lambda config: (
            config.float8.enable_fsdp_float8_all_gather
            and config.float8.recipe_name not in (None, "tensorwise")
        ),
        "weights are sent with one scale each; drop the first, or use tensorwise",
    ),
    *rule_for_each(
        ("training.enable_cpu_offload", "lora.dora"),
        "float8.enable_fsdp_float8_all_gather",
        is_given("float8.enable_fsdp_float8_all_gather"),
        "the first needs weights as they are; drop either",
    ),
    Rule(
        ("float8.enable_float8_linear", "parallelism.tensor_parallel_degree"),
        lambda config: (
            config.float8.enable_float8_linear and config.parallelism.tensor_parallel_degree != 1
        ),
        "split products would be rounded otherwise than whole ones; keep one",
    ),
    Rule(
        ("float8.enable_float8_linear", "quantization.base"),
        lambda config: config.float8.enable_float8_linear and config.quantization.base != "none",
        "quantised weights have products of their own; drop one of them",
    ),
    Rule(
        ("quantization.base", "lora.rank"),
        lambda config: config.quantization.base != "none" and not config.lora.rank,
        "quantised weights only learn through adapters; set the second",
    ),
    Rule(
        ("quantization.base", "lora.dora"),
        lambda config: config.quantization.base != "none" and config.lora.dora,
        "DoRA measures weights, which are packed; drop one of them",
    ),
    Rule(
        ("quantization.base", "parallelism.tensor_parallel_degree"),
        lambda config: (
            config.quantization.base != "none" and config.parallelism.tensor_parallel_degree != 1
        ),
        "packed weights do not split; keep one",
    ),
    Rule(
        ("float8.scaling_type_input",),
        lambda config: config.float8.scaling_type_input == "delayed",
        "torchao removed delayed scaling; use dynamic",
    ),
    Rule(
        ("float8.scaling_type_weight",),
        lambda config: config.float8.scaling_type_weight == "delayed",
        "torchao removed delayed scaling; use dynamic",
    ),
    Rule(
        ("float8.scaling_type_grad_output",),
        lambda config: config.float8.scaling_type_grad_output == "delayed",
        "torchao removed delayed scaling; use dynamic",
    ),
)
