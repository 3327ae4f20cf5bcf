"""Rules for how completions are made and measured: held-out prompts, servers, turns."""

from urllib.parse import urlsplit

from lacuna.config.rules import Predicate, Rule, is_changed, is_given, refused_for
from lacuna.config.sections import Config

OF_DIVIDED_PIECES = (
    "beside parallelism.tensor_parallel_degree its pieces are those of divided sequences, and "
    "text is generated with whole ones; drop one of the two"
)
_SCHEMES = ("http://", "https://")
# Setting that curriculum.by_success does not go with -> where that is so, and why.
_AGAINST_SUCCESS: dict[str, tuple[Predicate, str]] = {
    "job.task": (
        lambda config: config.trains_on != "prompts",
        "only prompts are solved or not; set the second to grpo or ppo, or drop the first",
    ),
    "training.epochs": (
        lambda config: config.training.epochs,
        "prompts come as often as they teach something; use training.steps, or drop the first",
    ),
    "curriculum.difficulty_column": (
        lambda config: config.curriculum.difficulty_column,
        "they are two orders of the same prompts; keep one",
    ),
}


def has_divided_pieces(config: Config) -> bool:
    """Whether blocks in pieces take sequences that tensor-parallel ranks divide."""
    return (
        config.activation_checkpoint.mlp_chunks > 1
        and config.parallelism.tensor_parallel_degree > 1
    )


def _is_no_address(config: Config) -> bool:
    address = str(config.rollout.server)
    try:
        parts = urlsplit(address)
        return not parts.hostname or parts.port == 0 or address.split() != [address]
    except ValueError:  # such as of a port beyond all there are
        return True


COMPLETION_RULES: tuple[Rule, ...] = (
    Rule(
        ("activation_checkpoint.mlp_chunks", "validation.prompts"),
        is_given("validation.prompts", has_divided_pieces),
        OF_DIVIDED_PIECES,
    ),
    *(
        Rule(
            (setting, "validation.dataset"),
            is_changed(setting, lambda config: config.validation.resolved_source() is None),
            "without the second no held-out prompts are answered; set it, or drop the first",
        )
        for setting in ("rollout.validation_samples", "rollout.validation_temperature")
    ),
    Rule(
        ("rollout.validation_samples", "rollout.validation_temperature"),
        lambda config: (
            config.rollout.validation_samples > 1 and not config.rollout.validation_temperature
        ),
        "the likeliest tokens are the same in all completions; set the second above 0, or drop the "
        "first",
    ),
    Rule(
        ("rewards.solved_at", "validation.dataset", "curriculum.by_success"),
        is_changed(
            "rewards.solved_at",
            lambda config: (
                config.validation.resolved_source() is None and not config.curriculum.by_success
            ),
        ),
        "without one of the others nobody asks which prompts are solved; set one, or drop the "
        "first",
    ),
    *(
        Rule(("curriculum.by_success", other), is_given("curriculum.by_success", is_wrong), reason)
        for other, (is_wrong, reason) in _AGAINST_SUCCESS.items()
    ),
    Rule(
        ("curriculum.success_decay", "curriculum.by_success"),
        is_changed("curriculum.success_decay", lambda config: not config.curriculum.by_success),
        "nothing else counts successes; set the second, or drop the first",
    ),
    *(
        Rule(
            (setting, "rollout.engine"),
            is_changed(setting, lambda config: config.rollout.engine != "server"),
            "only server takes the first; set the second to it, or drop the first",
        )
        for setting in ("rollout.server", "rollout.server_folder", "rollout.server_timeout")
    ),
    Rule(
        ("rollout.cache_dtype", "rollout.engine"),
        is_changed(
            "rollout.cache_dtype",
            lambda config: config.rollout.engine not in ("auto", "pages"),
        ),
        "only pages take the first; drop one of them",
    ),
    Rule(
        ("rollout.engine", "rollout.server"),
        lambda config: config.rollout.engine == "server" and not config.rollout.server,
        "give the address of the server in the second, such as http://localhost:8000",
    ),
    Rule(
        ("rollout.server",),
        is_given(
            "rollout.server", lambda config: not str(config.rollout.server).startswith(_SCHEMES)
        ),
        "it should begin with http:// or https://",
    ),
    Rule(
        ("rollout.server",),
        is_given("rollout.server", _is_no_address),
        "it is no address; give one such as http://localhost:8000",
    ),
    Rule(
        ("rollout.engine", "rollout.server_folder"),
        lambda config: config.rollout.engine == "server" and not config.rollout.server_folder,
        "give a folder that the server can read in the second: the weights are written there",
    ),
    Rule(
        ("rollout.environment", "rollout.tools"),
        lambda config: config.rollout.environment and config.rollout.tools,
        "either replies to the model; call the functions in the first, or drop it",
    ),
    *(
        refused_for("distill", setting, "a teacher judges completions of one turn; drop the first")
        for setting in ("rollout.environment", "rollout.tools")
    ),
    Rule(
        ("rollout.turns", "rollout.environment"),
        is_changed("rollout.turns", lambda config: not config.rollout.takes_turns),
        "nothing replies to the model; set the second or rollout.tools, or drop the first",
    ),
    Rule(
        ("rewards.functions", "rollout.environment"),
        lambda config: "environment" in config.rewards.functions and not config.rollout.environment,
        "there is no environment that says what completions are worth; set the second, or leave "
        "environment out of the first",
    ),
)
