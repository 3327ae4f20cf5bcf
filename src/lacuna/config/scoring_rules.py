"""Rules for models that score: which settings they cannot have."""

from lacuna.config.rules import Rule, is_given, refused_for

_LAYER = "score"

REWARD_RULES: tuple[Rule, ...] = (
    Rule(
        ("lora.modules", "job.task"),
        lambda config: (
            config.job.task == "reward" and config.lora.rank and _LAYER not in config.lora.modules
        ),
        f"the layer that scores has to learn too; name it in the first: {_LAYER}",
    ),
    refused_for(
        "reward",
        "model.train_new_tokens_only",
        "the layer that scores has no rows of tokens; drop the first with reward",
    ),
    refused_for(
        "reward",
        "validation.prompts",
        "a model that scores goes on with no text; drop the first with reward",
        is_given("validation.prompts"),
    ),
)
