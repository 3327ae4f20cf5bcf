"""Rules for the settings of tasks, such as distillation: which others they do not go with."""

from functools import partial

from lacuna.config.fields import Section
from lacuna.config.objectives import DistillationConfig, PreferenceConfig
from lacuna.config.reinforcement import GrpoConfig, RewardsConfig, RolloutConfig
from lacuna.config.rules import Rule, is_changed, is_given, refused_for
from lacuna.config.scoring_rules import REWARD_RULES
from lacuna.config.task import TASKS

STORED = "distillation.teacher_logprobs"
_NOT_STORED = "what is on disk was made without the first; drop either"


def _only_for(task: str, section: str, kind: type[Section]) -> list[Rule]:
    """A rule for each setting of a section: it is refused with another task of lacuna's own."""
    others = {*TASKS} - {task}
    return [
        Rule(
            (f"{section}.{name}", "job.task"),
            is_changed(f"{section}.{name}", lambda config: config.job.task in others),
            f"only {task} takes the first; set the second to it, or drop the first",
        )
        for name in kind.model_fields
    ]


_not_for_grpo = partial(refused_for, "grpo")

_ROLLOUT_LAYOUT = "every rank generates with a whole model; use data parallelism alone with grpo"

GRPO_RULES: tuple[Rule, ...] = (
    *_only_for("grpo", "grpo", GrpoConfig),
    *_only_for("grpo", "rollout", RolloutConfig),
    *_only_for("grpo", "rewards", RewardsConfig),
    *(
        _not_for_grpo(f"parallelism.{name}", _ROLLOUT_LAYOUT)
        for name in (
            "tensor_parallel_degree",
            "context_parallel_degree",
            "pipeline_parallel_degree",
        )
    ),
    Rule(
        ("job.task", "rewards.functions"),
        lambda config: config.job.task == "grpo" and not config.rewards.functions,
        "nothing says what completions are worth; give exact, math, pattern, format, length or "
        "functions of your own as module:function",
    ),
    _not_for_grpo(
        "training.enable_cpu_offload",
        "generating needs the weights on the device; drop the first with grpo",
    ),
    _not_for_grpo(
        "optimizer.early_step_in_backward",
        "how many micro-batches completions make is not known before; drop the first with grpo",
    ),
    _not_for_grpo(
        "float8.enable_float8_linear",
        "one token at a time has no shape that float8 takes; drop the first with grpo",
    ),
    _not_for_grpo(
        "lora.dropout", "ratios to old probabilities would be those of dropout; set the first to 0"
    ),
    _not_for_grpo(
        "validation.dataset",
        "what completions of held-out prompts are worth is not measured yet; drop the first",
        is_given("validation.dataset"),
    ),
    _not_for_grpo("data.streaming", "prompts are read from the cache; drop the first with grpo"),
    _not_for_grpo(
        "data.tokenization",
        "prompts are read from the cache; drop the first with grpo",
        lambda config: config.data.tokenization == "online",
    ),
    _not_for_grpo(
        "data.document_mask", "completions must not see each other; leave the first on with grpo"
    ),
    _not_for_grpo(
        "data.predict_across_documents", "completions do not go on in others; drop the first"
    ),
    _not_for_grpo(
        "packing.mode",
        "completions are not cut; set the first to best_fit or none",
        lambda config: config.packing.mode == "concatenate",
    ),
    _not_for_grpo(
        "packing.long_examples", "prompts that are too long are refused; drop the first with grpo"
    ),
    _not_for_grpo(
        "training.context_len",
        "completions are not cut; set the first to training.seq_len with grpo",
        lambda config: config.training.context_len < config.training.seq_len,
    ),
    _not_for_grpo(
        "curriculum.rank_every", "prompts have no loss to be ranked by; drop the first with grpo"
    ),
    _not_for_grpo("curriculum.stages", "a stage cannot change rollouts; drop the first with grpo"),
    _not_for_grpo(
        "rollout.samples",
        "one completion has no other to be compared with; set the first to 2 or more",
        lambda config: config.rollout.samples == 1,
    ),
    _not_for_grpo(
        "rollout.max_tokens",
        "a prompt and the longest completion must fit into training.seq_len; lower the first",
        lambda config: config.rollout.max_tokens >= config.training.seq_len,
    ),
    *(
        Rule(
            (setting, "grpo.loss"),
            is_changed(setting, lambda config: config.grpo.loss == "cispo"),
            "cispo clips above alone, and keeps the gradient; drop the first",
        )
        for setting in ("grpo.epsilon", "grpo.dual_clip")
    ),
    *(
        Rule(
            (setting, "grpo.beta"),
            is_changed(setting, lambda config: not config.grpo.beta),
            "without the second nothing is compared with a reference; set it, or drop the first",
        )
        for setting in ("grpo.kl", "grpo.reference")
    ),
    Rule(
        ("grpo.importance_bound", "grpo.importance"),
        is_changed("grpo.importance_bound", lambda config: config.grpo.importance == "none"),
        "none has no bound; set the second, or drop the first",
    ),
    Rule(
        ("grpo.resample", "training.epochs"),
        lambda config: config.grpo.resample and config.training.epochs,
        "prompts that are drawn again have no common end; use training.steps, or drop the first",
    ),
    Rule(
        ("grpo.updates", "training.epochs"),
        lambda config: config.grpo.updates > 1 and config.training.epochs,
        "an epoch is one step for each batch of prompts; use training.steps, or drop the first",
    ),
)

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
    *_only_for("distill", "distillation", DistillationConfig),
    *_only_for("preference", "preference", PreferenceConfig),
    *GRPO_RULES,
    *REWARD_RULES,
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
