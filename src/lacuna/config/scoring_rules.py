"""Rules for models that score: which settings they cannot have."""

from lacuna.config.rules import Rule, is_given, refused_for

_WHOLE = "a sequence is scored by one rank; use data parallelism alone with reward"
_ADAPTERS = "a model that scores is trained whole so far; drop the first with reward"

REWARD_RULES: tuple[Rule, ...] = (
    *(
        refused_for("reward", f"parallelism.{name}_parallel_degree", _WHOLE)
        for name in ("tensor", "context", "pipeline", "expert")
    ),
    refused_for("reward", "lora.rank", _ADAPTERS),
    refused_for("reward", "quantization.base", _ADAPTERS),
    refused_for("reward", "model.train_new_tokens_only", _ADAPTERS),
    refused_for(
        "reward",
        "validation.prompts",
        "a model that scores goes on with no text; drop the first with reward",
        is_given("validation.prompts"),
    ),
)
