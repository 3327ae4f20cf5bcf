"""Rules for the tasks whose models learn from their own completions."""

from lacuna.config.completion_rules import (
    COMPLETION_RULES,
    OF_DIVIDED_PIECES,
    has_divided_pieces,
)
from lacuna.config.reinforcement import GrpoConfig, PpoConfig, RewardsConfig, RolloutConfig
from lacuna.config.rules import Predicate, Rule, is_changed, is_given, only_for, refused_for
from lacuna.config.sections import SECTIONS, Config

_TASKS = ("grpo", "ppo")

# Settings that a task which generates cannot have unless they are at their defaults, and why.
_REFUSED = {
    "training.enable_cpu_offload": "generating needs the weights on the device; drop the first",
    "optimizer.early_step_in_backward": "how many micro-batches completions make is not known "
    "before; drop the first",
    "float8.enable_float8_linear": "one token at a time has no shape that float8 takes; drop the "
    "first",
    "lora.dropout": "ratios to old probabilities would be those of dropout; set the first to 0",
    "data.streaming": "prompts are read from the cache; drop the first",
    "data.document_mask": "completions must not see each other; leave the first on",
    "data.predict_across_documents": "completions do not go on in others; drop the first",
    "packing.long_examples": "prompts that are too long are refused; drop the first",
    "curriculum.rank_every": "prompts have no loss to be ranked by; drop the first",
    "curriculum.stages": "a stage cannot change rollouts; drop the first",
    **dict.fromkeys(
        (
            "parallelism.pipeline_parallel_degree",
            "parallelism.expert_parallel_degree",
        ),
        "every rank generates with a whole model; use data, context or tensor parallelism",
    ),
}
# The same of settings that cannot have some values.
_REFUSED_VALUES: dict[str, tuple[Predicate, str]] = {
    "data.tokenization": (
        lambda config: config.data.tokenization == "online",
        "prompts are read from the cache; drop the first",
    ),
    "packing.mode": (
        lambda config: config.packing.mode == "concatenate",
        "completions are not cut; set the first to best_fit or none",
    ),
    "training.context_len": (
        lambda config: config.training.context_len < config.training.seq_len,
        "completions are not cut; set the first to training.seq_len",
    ),
    "activation_checkpoint.mlp_chunks": (has_divided_pieces, OF_DIVIDED_PIECES),
    "rollout.max_tokens": (
        lambda config: config.rollout.max_tokens >= config.training.seq_len,
        "a prompt and the longest completion must fit into training.seq_len; lower the first",
    ),
}
# The same of distillation on prompts alone, or for reasons of its own.
_REFUSED_WITH_TEACHER = {
    "lora.dropout": "generating and training would find other probabilities; set the first to 0",
    "distillation.alpha": "the cross-entropy of what the model itself says teaches nothing; drop "
    "the first",
    "distillation.teacher_logprobs": "what the model will say is not known before; set "
    "distillation.teacher alone",
}


def _distils_from_prompts(config: Config) -> bool:
    return config.job.task == "distill" and config.trains_on == "prompts"


def _distils_from_data(config: Config) -> bool:
    return config.job.task == "distill" and config.trains_on != "prompts"


def _with_prompts(is_wrong: Predicate) -> Predicate:
    return lambda config: _distils_from_prompts(config) and is_wrong(config)


ROLLOUT_RULES: tuple[Rule, ...] = (
    *only_for(("grpo",), "grpo", GrpoConfig),
    *only_for(("ppo",), "ppo", PpoConfig),
    *only_for(("ppo",), "critic_parallelism", SECTIONS["critic_parallelism"]),
    *only_for((*_TASKS, "distill"), "rollout", RolloutConfig),
    *only_for((*_TASKS, "distill"), "rewards", RewardsConfig),
    *(
        Rule(
            (f"{section}.{name}", "distillation.data"),
            is_changed(f"{section}.{name}", _distils_from_data),
            "only prompts are answered by the model; set the second to it, or drop the first",
        )
        for section, kind in (("rollout", RolloutConfig), ("rewards", RewardsConfig))
        for name in kind.model_fields
    ),
    *(
        refused_for(task, setting, f"{reason} with {task}")
        for task in _TASKS
        for setting, reason in _REFUSED.items()
    ),
    *(
        refused_for(task, setting, f"{reason} with {task}", is_wrong)
        for task in _TASKS
        for setting, (is_wrong, reason) in _REFUSED_VALUES.items()
    ),
    *(
        Rule(
            (setting, "distillation.data"),
            is_changed(setting, _distils_from_prompts),
            f"{reason} with prompts",
        )
        for setting, reason in (_REFUSED | _REFUSED_WITH_TEACHER).items()
    ),
    *(
        Rule((setting, "distillation.data"), _with_prompts(is_wrong), f"{reason} with prompts")
        for setting, (is_wrong, reason) in _REFUSED_VALUES.items()
    ),
    *(
        Rule(
            (setting, "rewards.functions"),
            is_given(
                setting,
                lambda config: _distils_from_prompts(config) and not config.rewards.functions,
            ),
            "nothing says what completions are worth; set the second, or drop the first",
        )
        for setting in ("validation.dataset", "curriculum.by_success")
    ),
    Rule(
        ("job.task", "rewards.functions"),
        lambda config: config.job.task in _TASKS and not config.rewards.functions,
        "nothing says what completions are worth; give exact, math, code, pattern, format, length, "
        "a model that scores, or functions of your own as module:function",
    ),
    *COMPLETION_RULES,
    refused_for(
        "grpo",
        "rollout.samples",
        "one completion has no other to be compared with; set the first to 2 or more",
        lambda config: config.rollout.samples == 1,
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
    *(
        Rule(
            (f"{task}.importance_bound", f"{task}.importance"),
            is_changed(f"{task}.importance_bound", has_no_importance),
            "none has no bound; set the second, or drop the first",
        )
        for task, has_no_importance in (
            ("grpo", lambda config: config.grpo.importance == "none"),
            ("ppo", lambda config: config.ppo.importance == "none"),
        )
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
    Rule(
        ("ppo.updates", "training.epochs"),
        lambda config: (
            config.job.task == "ppo" and config.ppo.updates > 1 and config.training.epochs
        ),
        "an epoch is one step for each batch of prompts; use training.steps, or set the first to 1",
    ),
    *(
        Rule(
            (setting, "ppo.beta"),
            is_changed(setting, lambda config: not config.ppo.beta),
            "without the second nothing is compared with a reference; set it, or drop the first",
        )
        for setting in ("ppo.kl_target", "ppo.reference")
    ),
    *(
        refused_for(
            "ppo",
            f"critic_parallelism.{setting}",
            "a critic is shared out by data, tensor or context parallelism; drop the first",
        )
        for setting in (
            "pipeline_parallel_degree",
            "expert_parallel_degree",
            "enable_async_tensor_parallel",
        )
    ),
    Rule(
        ("ppo.critic_lr", "optimizer.lr"),
        lambda config: config.ppo.critic_lr and not config.optimizer.lr,
        "the schedule is one for both; set the second above 0, or drop the first",
    ),
)
