"""Rules for the tasks whose models learn from their own completions."""

from functools import partial

from lacuna.config.reinforcement import GrpoConfig, PpoConfig, RewardsConfig, RolloutConfig
from lacuna.config.rules import Rule, is_changed, is_given, only_for, refused_for

_TASKS = ("grpo", "ppo")


def _rules_of(task: str) -> tuple[Rule, ...]:
    """What a task that generates cannot have."""
    wrong = partial(refused_for, task)
    return (
        *(
            wrong(
                f"parallelism.{name}",
                f"every rank generates with a whole model; use data parallelism alone with {task}",
            )
            for name in (
                "tensor_parallel_degree",
                "context_parallel_degree",
                "pipeline_parallel_degree",
            )
        ),
        wrong(
            "training.enable_cpu_offload",
            f"generating needs the weights on the device; drop the first with {task}",
        ),
        wrong(
            "optimizer.early_step_in_backward",
            "how many micro-batches completions make is not known before; drop the first with "
            f"{task}",
        ),
        wrong(
            "float8.enable_float8_linear",
            f"one token at a time has no shape that float8 takes; drop the first with {task}",
        ),
        wrong(
            "lora.dropout",
            "ratios to old probabilities would be those of dropout; set the first to 0",
        ),
        wrong(
            "validation.dataset",
            "what completions of held-out prompts are worth is not measured yet; drop the first",
            is_given("validation.dataset"),
        ),
        wrong("data.streaming", f"prompts are read from the cache; drop the first with {task}"),
        wrong(
            "data.tokenization",
            f"prompts are read from the cache; drop the first with {task}",
            lambda config: config.data.tokenization == "online",
        ),
        wrong(
            "data.document_mask",
            f"completions must not see each other; leave the first on with {task}",
        ),
        wrong(
            "data.predict_across_documents", "completions do not go on in others; drop the first"
        ),
        wrong(
            "packing.mode",
            "completions are not cut; set the first to best_fit or none",
            lambda config: config.packing.mode == "concatenate",
        ),
        wrong(
            "packing.long_examples",
            f"prompts that are too long are refused; drop the first with {task}",
        ),
        wrong(
            "training.context_len",
            f"completions are not cut; set the first to training.seq_len with {task}",
            lambda config: config.training.context_len < config.training.seq_len,
        ),
        wrong(
            "curriculum.rank_every",
            f"prompts have no loss to be ranked by; drop the first with {task}",
        ),
        wrong("curriculum.stages", f"a stage cannot change rollouts; drop the first with {task}"),
        wrong(
            "rollout.max_tokens",
            "a prompt and the longest completion must fit into training.seq_len; lower the first",
            lambda config: config.rollout.max_tokens >= config.training.seq_len,
        ),
    )


ROLLOUT_RULES: tuple[Rule, ...] = (
    *only_for(("grpo",), "grpo", GrpoConfig),
    *only_for(("ppo",), "ppo", PpoConfig),
    *only_for(_TASKS, "rollout", RolloutConfig),
    *only_for(_TASKS, "rewards", RewardsConfig),
    *_rules_of("grpo"),
    *_rules_of("ppo"),
    Rule(
        ("job.task", "rewards.functions"),
        lambda config: config.job.task in _TASKS and not config.rewards.functions,
        "nothing says what completions are worth; give exact, math, pattern, format, length, "
        "a model that scores, or functions of your own as module:function",
    ),
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
    refused_for(
        "ppo",
        "parallelism.expert_parallel_degree",
        "a critic scores on one rank; use data parallelism alone with ppo",
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
    Rule(
        ("ppo.critic_lr", "optimizer.lr"),
        lambda config: config.ppo.critic_lr and not config.optimizer.lr,
        "the schedule is one for both; set the second above 0, or drop the first",
    ),
)
