"""Completions as they are made, and the environments that reply in them, which may fail."""

import inspect
import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from lacuna.config import OutageError, UserError, logger
from lacuna.config.conversations import ChatConfig
from lacuna.config.reinforcement import RewardsConfig
from lacuna.data.messages import read_messages
from lacuna.data.mixture import random_key
from lacuna.data.replies import Messages, given_tokens
from lacuna.data.template import Chat
from lacuna.rollout.asking import GRACE, Overdue, await_together, deadline, no_exit
from lacuna.rollout.drawing import Completion
from lacuna.rollout.environment import Environment, Factory
from lacuna.rollout.rewards import shortened, told
from lacuna.rollout.verifiers import Answered

# Tells the randomness of environments from all other that derives from the seed.
_STREAM = 3


@dataclass
class Talk:
    """A completion as it is made: what the model says and, between its turns, is given.

    Attributes:
        prompt: the tokens of its prompt.
        row: the row of data that this is from.
        where: the place of the row, for messages.
        source: the number of its source.
        key: the number of the prompt in the run, and that of the completion.
        tokens: what the model says in all turns, with the ends of those that have one.
        logprobs: with what log-probability it drew each token.
        given: what it was given, each with the number of tokens that it had said before.
        read: all that it has read and said, from the prompt on.
        texts: what it says in each turn, without the token that ends it.
        messages: what it says and is given, as messages.
        ended: whether the conversation came to its end, and nothing cut it off.
        environment: what replies; None before and where it cannot be made.
        has_failed: whether the environment failed.
    """

    prompt: list[int]
    row: dict[str, Any]
    where: str
    source: int
    key: tuple[int, int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    given: list[tuple[int, list[int]]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    ended: bool = False
    environment: Environment | None = None
    has_failed: bool = False

    @property
    def tool_errors(self) -> float:
        """How many calls of tools failed; nan where the environment does not count them."""
        counted = getattr(self.environment, "tool_errors", None)
        return float(counted) if isinstance(counted, int | float) else math.nan

    def hear(self, said: Completion, tokenizer: PreTrainedTokenizerBase) -> None:
        """Adds a turn of the model."""
        text = str(tokenizer.decode(said.tokens[:-1] if said.ended else said.tokens))
        self.read = (self.read or self.prompt) + said.tokens
        self.tokens = self.tokens + said.tokens
        self.logprobs = self.logprobs + said.logprobs
        self.texts.append(text)
        self.messages.append({"role": "assistant", "content": text})
        self.ended = said.ended

    def give(self, reply: Messages, tokens: list[int]) -> None:
        """Adds what the model is given before its next turn."""
        self.given.append((len(self.tokens), tokens))
        self.read = self.read + tokens
        self.messages += reply

    def answered(self, most: int) -> Answered:
        """What rewards are given of a completion of at most so many tokens."""
        *earlier, text = self.texts
        left = most - len(self.tokens)
        return Answered(self.row, self.where, text, left, earlier, self.environment)


class Host:
    """Makes environments and asks them, and deals with those that fail."""

    def __init__(self, factory: Factory, settings: RewardsConfig) -> None:
        """`settings` say how long a reply may take, and what becomes of one that fails."""
        self.factory = factory
        self.settings = settings
        self.failures: list[OutageError] = []

    def furnish(self, talks: Sequence[Talk], seed: int) -> None:
        """Gives each completion an environment of its own."""
        for one in talks:
            own_seed = random_key(seed, _STREAM, *one.key) % 2**32  # NumPy takes no larger ones
            one.environment = self._tried(one, partial(self.factory, deepcopy(one.row), own_seed))

    def replies(self, talks: Sequence[Talk]) -> list[tuple[Talk, Messages]]:
        """The replies to the newest turns, of those conversations that are not over."""
        seconds = self.settings.timeout_seconds
        asked = [one for one in talks if one.environment is not None]
        found = [self._tried(one, partial(_reply, one)) for one in asked]
        pending = [place for place, reply in enumerate(found) if inspect.isawaitable(reply)]
        awaited = await_together([found[place] for place in pending], seconds) if pending else []
        for place, reply in zip(pending, awaited, strict=True):
            found[place] = reply
            if isinstance(reply, BaseException):
                self._fail(asked[place], reply)
                found[place] = None
        said = [pair for pair in zip(asked, found, strict=True) if pair[1] is not None]
        read = [(one, self._tried(one, partial(_read, reply))) for one, reply in said]
        return [(one, reply) for one, reply in read if reply is not None]

    def tokens_of(self, talk: Talk, chat: Chat, reply: Messages) -> list[int] | None:
        """The tokens of a reply; None where the chat template refuses it."""
        found: list[int] | None = self._tried(talk, partial(given_tokens, chat, reply))
        return found

    def warn(self) -> None:
        """Tells of the failures, where they did not stop the run."""
        if self.failures:
            count = len(self.failures)
            logger.warning("%s (%d samples are left out)", self.failures[-1], count)

    def _tried(self, talk: Talk, call: Callable[[], Any]) -> Any:
        """What a call returns; None where it fails or takes too long."""
        try:
            with deadline(self.settings.timeout_seconds, again=GRACE), no_exit():
                return call()
        except (Exception, Overdue) as error:  # whatever the user's own lines raise
            self._fail(talk, error)
            return None

    def _fail(self, talk: Talk, error: BaseException) -> None:
        """Notes a failure, or raises `OutageError` that names the sample where it stops the run."""
        said = ""
        if talk.texts:
            said = f" after {shortened(talk.texts[-1])!r}"
        failure = OutageError(
            f"rollout.environment: it fails on {talk.where}{said} ({told(error)}): mend it, "
            "or set rewards.on_error = skip."
        )
        if self.settings.on_error == "stop":
            raise failure from error
        talk.has_failed = True
        self.failures.append(failure)


def _reply(talk: Talk) -> Any:
    assert talk.environment is not None
    return talk.environment.reply(talk.texts[-1])


def _read(reply: Any) -> Messages:
    """The messages of a reply. Raises `UserError` for what is none."""
    messages = read_messages(reply, "its reply", ChatConfig())
    if not messages:
        raise UserError("its reply has no message: return None where the conversation is over")
    if any(message["role"] == "assistant" for message in messages):
        raise UserError("its reply has a message of the assistant, for which the model speaks")
    json.dumps(messages, ensure_ascii=False).encode("utf-8")  # as the run folder keeps them
    return messages
