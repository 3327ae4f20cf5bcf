"""What all settings together say of the samples: which of them decide, and what must be known."""

from typing import Any

from lacuna.config.sections import Config

# What a resumed run must keep, so that a step trains on the same samples.
# train_new_tokens_only is one because AdamW goes on moving what it has moved.
_DECIDING: dict[str, Any] = {
    "job": {"task"},
    "model": {"new_tokens", "train_new_tokens_only"},
    "data": True,
    "chat": True,
    "packing": True,
    "training": {"seq_len", "context_len", "varlen", "seed"},
    "curriculum": {"difficulty_column", "rank_every"},
}
_NOT_DECIDING: dict[str, Any] = {
    "data": {"num_workers", "prefetch_factor", "max_broken_records", "retries"}
}


def deciding_settings(config: Config) -> dict[str, str]:
    """The settings that decide which samples a step trains on, as Python shows them, by name."""
    tables = config.model_dump(include=_DECIDING, exclude=_NOT_DECIDING)
    found = {
        f"{section}.{name}": repr(value)
        for section, table in tables.items()
        for name, value in table.items()
    }
    if config.job.task == "distill" and config.trains_on == "prompts":
        found["distillation.data"] = "prompts"
    return found


def needs_all_documents(config: Config) -> bool:
    """Whether a run must know all documents, or what comes next, before its first step."""
    judged = config.judged_answers
    reasons = (
        config.training.epochs,
        config.curriculum.difficulty_column,
        config.curriculum.rank_every,
        config.distillation.teacher_logprobs,
        config.trains_on == "prompts",
        judged is not None and (judged.loss == "kto" or judged.reference == "cached"),
    )
    return any(reasons)
