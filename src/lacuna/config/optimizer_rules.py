"""What does not go together in how weights are updated: which settings, when, and why."""

from lacuna.config.rules import Rule, is_changed, is_given, rule_for_each

OF_MUON = tuple(
    f"optimizer.{name}"
    for name in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "neuron_beta2")
)

OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        ("training.max_skipped_steps", "training.skip_nan_inf"),
        is_changed("training.max_skipped_steps", lambda config: not config.training.skip_nan_inf),
        "without the second no step is skipped; set it, or drop the first",
    ),
    *(
        Rule(
            (setting, "lr_scheduler.decay_type"),
            is_changed(setting, lambda config: config.lr_scheduler.decay_type == "constant"),
            "constant does not fall; set the second to another, or drop the first "
            f"(--{setting} none takes the file's away)",
        )
        for setting in ("lr_scheduler.decay_ratio", "lr_scheduler.lr_min")
    ),
    Rule(
        ("optimizer.early_step_in_backward", "training.max_norm"),
        lambda config: config.optimizer.early_step_in_backward and config.training.max_norm,
        "early steps leave nothing to clip; set max_norm = 0",
    ),
    Rule(
        ("optimizer.early_step_in_backward", "training.skip_nan_inf"),
        lambda config: config.optimizer.early_step_in_backward and config.training.skip_nan_inf,
        "an early step cannot be skipped; drop one",
    ),
    *(
        Rule(
            ("optimizer.state_offload_share", other),
            is_changed("optimizer.state_offload_share", is_given(other)),
            reason,
        )
        for other, reason in (
            ("optimizer.early_step_in_backward", "early steps need what is away; drop one"),
            ("training.enable_cpu_offload", "the second moves all of the state; drop one"),
        )
    ),
    Rule(
        ("optimizer.state_offload_share", "parallelism.pipeline_parallel_degree"),
        is_changed(
            "optimizer.state_offload_share",
            lambda config: config.parallelism.pipeline_parallel_degree > 1,
        ),
        "in a pipeline passes forward and back take turns; drop the first",
    ),
    *rule_for_each(
        ("optimizer.early_step_in_backward", "lora.parameters"),
        "optimizer.name",
        lambda config: "Muon" in config.optimizer.names,
        "Muon takes whole steps of plain matrices, which these are not; drop one",
    ),
    Rule(
        ("optimizer.state_dtype", "optimizer.name"),
        lambda config: config.optimizer.state_dtype and "Muon" in config.optimizer.names,
        "it is AdamW's, also where Muon has the matrices; drop one",
    ),
    Rule(
        ("optimizer.state_dtype", "optimizer.implementation"),
        lambda config: config.optimizer.state_dtype and config.optimizer.implementation != "fused",
        "the first has an implementation of its own; drop the second",
    ),
    *(
        Rule(
            (setting, "optimizer.name"),
            is_changed(setting, lambda config: "Muon" not in config.optimizer.names),
            "it is Muon's; set that name, or drop it",
        )
        for setting in OF_MUON
    ),
)
