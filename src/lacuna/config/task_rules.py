"""Rules for the settings of tasks, such as distillation: which others they do not go with."""

from lacuna.config.conversations import ChatConfig
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.rollout_rules import ROLLOUT_RULES
from lacuna.config.rules import Rule, is_changed, is_given, only_for
from lacuna.config.scoring_rules import REWARD_RULES

STORED = "distillation.teacher_logprobs"
_NOT_STORED = "what is on disk was made without the first; drop either"


TASK_RULES: tuple[Rule, ...] = (
    Rule(
        ("job.task", "distillation.teacher"),
        lambda config: config.job.task == "distill" and not config.distillation.has_teacher,
        "there is nobody to learn from; set the second",
    ),
    *(
        Rule((setting, STORED), is_changed(setting, is_given(STORED)), _NOT_STORED)
        for setting in ("distillation.temperature", "data.predict_across_documents")
    ),
    *only_for(("distill",), "distillation", DistillationConfig),
    *only_for(("preference",), "preference", PreferenceConfig),
    *(
        Rule(
            (f"chat.{name}", "job.task"),
            is_changed(f"chat.{name}", lambda config: config.job.task == "pretrain"),
            "texts have no conversations; set the second, to sft for instance, or drop the first",
        )
        for name in ChatConfig.model_fields
    ),
    *REWARD_RULES,
    *ROLLOUT_RULES,
    Rule(
        ("distillation.beta", "distillation.divergence"),
        is_changed("distillation.beta", lambda config: config.distillation.divergence != "jsd"),
        "only jsd has a mixture; set the second to it, or drop the first",
    ),
    Rule(
        ("preference.margin", "preference.loss"),
        is_changed("preference.margin", lambda config: config.preference.loss != "simpo"),
        "only simpo has a margin; set the second to it, or drop the first",
    ),
    *(
        Rule(
            (f"preference.{name}", "preference.loss"),
            is_changed(f"preference.{name}", lambda config: config.preference.loss != "kto"),
            "only kto weighs its answers; set the second to it, or drop the first",
        )
        for name in ("desirable_weight", "undesirable_weight")
    ),
    Rule(
        ("distillation.teacher_base", "parallelism.tensor_parallel_degree"),
        lambda config: (
            config.distillation.teacher_base != "none"
            and config.parallelism.tensor_parallel_degree != 1
        ),
        "packed weights do not split; keep one",
    ),
    Rule(
        ("preference.label_smoothing", "preference.loss"),
        lambda config: (
            config.preference.label_smoothing and config.preference.loss not in ("sigmoid", "simpo")
        ),
        "only sigmoid and simpo smooth labels; drop the first",
    ),
    Rule(
        ("preference.reference", "data.streaming"),
        lambda config: config.preference.reference == "cached" and config.data.streaming,
        "a stream has no pass before training; use copy, or drop the second",
    ),
    Rule(
        ("preference.reference", "data.tokenization"),
        lambda config: (
            config.preference.reference == "cached" and config.data.tokenization == "online"
        ),
        "the pass before training needs the cache; use copy, or drop the second",
    ),
    Rule(
        ("preference.reference", "packing.long_examples", "curriculum.stages"),
        lambda config: (
            config.preference.reference == "cached"
            and config.packing.long_examples == "drop"
            and any(
                (stage.seq_len or 0) > config.training.seq_len for stage in config.curriculum.stages
            )
        ),
        "pairs that only later rows have room for have no part in the pass before training; use "
        "copy for the first",
    ),
)
