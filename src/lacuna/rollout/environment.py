"""What replies to a model: an environment of the user's own, or functions that it may call."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from lacuna.config import UserError, explained
from lacuna.config.reinforcement import RolloutConfig
from lacuna.config.user_code import import_attribute
from lacuna.data.replies import Messages, given_tokens, opening
from lacuna.data.tools import descriptions_of, functions_of
from lacuna.rollout.tool_calls import ToolCalls, require_tools


class Environment(Protocol):
    """What replies to a model in one completion; `docs/tools.md` has what else it may have."""

    def reply(self, text: str) -> Messages | Awaitable[Messages | None] | None:
        """The messages that follow a turn of the model, at least one; None where it is over."""


Factory = Callable[[dict[str, Any], int], Environment]


def find_environment(rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase) -> Factory:
    """What makes the environment of a completion, of the row of its prompt and a seed.

    Raises `UserError` for one that cannot be had.
    """
    if rollout.tools:
        chat = opening(tokenizer, descriptions_of(rollout.tools), "rollout.tools")
        return partial(ToolCalls, functions_of(rollout.tools), chat)
    name = str(rollout.environment)
    problem = f"rollout.environment: {name}"
    if ":" not in name:
        raise UserError(f"{problem}: give it as module:class.")
    with explained(problem, ValueError, mend="give it as module:class"):
        found: Factory = import_attribute(name)
    if not callable(found) or (isinstance(found, type) and not hasattr(found, "reply")):
        raise UserError(
            f"{problem} has no reply(text): give a class that has, or a function that makes "
            "such an object."
        )
    mend = "let it take the row of the prompt and a seed"
    with explained(f"{problem} cannot be called with two values", TypeError, mend=mend):
        inspect.signature(found).bind({}, 0)
    return found


def check_environment(
    rollout: RolloutConfig, rewards: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises `UserError` for what turns cannot be had with.

    That is an environment that cannot be had or does not say what the reward asks of it, and a chat
    template that rewrites what was said, or does not write tools where these are asked for.
    """
    made_by = find_environment(rollout, tokenizer)
    lacks_reward = isinstance(made_by, type) and not hasattr(made_by, "reward")
    if "environment" in rewards and lacks_reward:
        raise UserError(
            f"rewards.functions: environment: {rollout.environment} has no reward(): write one, or "
            "leave environment out."
        )
    if rollout.tools:
        require_tools(opening(tokenizer, descriptions_of(rollout.tools), "rollout.tools"))
        return
    chat = opening(tokenizer, None, "rollout.environment")
    try:
        given_tokens(chat, [{"role": "user", "content": "Look again."}])
    except UserError as error:
        try:  # replies may be those of tools alone
            given_tokens(chat, [{"role": "tool", "name": "look", "content": "It is dry."}])
        except UserError:
            raise error from None
