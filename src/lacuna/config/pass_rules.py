"""What does not go together in how passes are computed: settings, when, and why."""

from lacuna.config.rules import Rule, is_changed, is_given

_RECORDED = "compile.cuda_graphs"

PASS_RULES: tuple[Rule, ...] = (
    Rule(
        ("activation_checkpoint.mode", "compile.enable"),
        lambda config: (
            config.activation_checkpoint.mode == "memory_budget" and config.compile.enable is False
        ),
        "needs torch.compile; drop the second",
    ),
    Rule(
        ("activation_checkpoint.selective_ac_option", "activation_checkpoint.mode"),
        is_changed(
            "activation_checkpoint.selective_ac_option",
            lambda config: config.activation_checkpoint.mode == "none",
        ),
        "nothing is recomputed without the second; set it to selective, or drop the first",
    ),
    Rule(
        ("activation_checkpoint.memory_budget", "activation_checkpoint.mode"),
        is_changed(
            "activation_checkpoint.memory_budget",
            lambda config: config.activation_checkpoint.mode == "none",
        ),
        "nothing is recomputed without the second; set it to memory_budget, or drop the first",
    ),
    Rule(
        ("activation_checkpoint.offload_share", "activation_checkpoint.offload"),
        is_changed(
            "activation_checkpoint.offload_share",
            lambda config: not config.activation_checkpoint.offload,
        ),
        "nothing is moved without it; set the second",
    ),
    Rule(
        ("activation_checkpoint.mlp_chunks", "activation_checkpoint.mode"),
        lambda config: (
            config.activation_checkpoint.mlp_chunks > 1
            and config.activation_checkpoint.mode not in ("none", "full")
        ),
        "pieces are computed again whole; set mode none or full",
    ),
    Rule(
        (_RECORDED, "job.task"),
        is_given(_RECORDED, lambda config: config.job.task not in ("pretrain", "sft")),
        "only pretrain and sft have micro-batches whose passes can be recorded; drop the first",
    ),
    Rule(
        (_RECORDED, "optimizer.early_step_in_backward"),
        is_given(_RECORDED, lambda config: config.optimizer.early_step_in_backward),
        "recorded gradients stay where they are, early steps drop them; drop one",
    ),
    *(
        Rule(
            (_RECORDED, moving),
            is_given(_RECORDED, is_given(moving)),
            "what goes to CPU memory cannot be recorded; drop one",
        )
        for moving in ("activation_checkpoint.offload", "optimizer.state_offload_share")
    ),
)
