"""Completions of several turns: the model speaks, an environment replies, and so on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from lacuna.config.reinforcement import RewardsConfig, RolloutConfig
from lacuna.data.mixture import random_key
from lacuna.data.replies import end_token, opening
from lacuna.data.template import Chat
from lacuna.data.tools import descriptions_of
from lacuna.model.build import BuiltModel
from lacuna.rollout.drawing import Asked
from lacuna.rollout.environment import find_environment
from lacuna.rollout.failures import raised_on_all
from lacuna.rollout.sampling import STREAM, say
from lacuna.rollout.talks import Host, Talk


def go_on(
    policy: BuiltModel,
    talks: Sequence[Talk],
    rollout: RolloutConfig,
    rewards: RewardsConfig,
    longest: int,
    ends: Sequence[int],
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    exchange: dist.ProcessGroup | None,
) -> None:
    """Goes on, in place, with completions of which the model has said the first turn.

    Each turn is drawn behind exactly the tokens that were drawn and given before, `longest` with
    the prompt. Its draws depend on the seed, the key of the completion and the number of the turn
    alone. Every rank must call it; they tell each other by the group `exchange` how long they go
    on. Raises `OutageError` on all ranks where an environment fails, unless `rewards.on_error` is
    skip.
    """
    where = "rollout.tools" if rollout.tools else "rollout.environment"
    chat = opening(tokenizer, descriptions_of(rollout.tools), where)
    host = Host(find_environment(rollout, tokenizer), rewards)
    with raised_on_all(exchange):
        host.furnish(talks, seed)
    active = [one for one in talks if one.ended]
    for turn in range(1, rollout.turns + 1):
        with raised_on_all(exchange):
            most = rollout.max_tokens if turn < rollout.turns else 0
            going = _given(host, chat, active, most, longest)
        if not _some_rank_goes_on(len(going), exchange):
            break
        asked = [
            Asked(one.read, [random_key(seed, STREAM, *one.key, turn)], room) for one, room in going
        ]
        heard = say(policy, asked, rollout, ends, exchange, is_changed=False)
        for (one, _), [said] in zip(going, heard, strict=True):
            one.hear(said, tokenizer)
        active = [one for one, _ in going if one.ended]
    host.warn()


def _given(
    host: Host, chat: Chat, active: Sequence[Talk], most: int, longest: int
) -> list[tuple[Talk, int]]:
    """Gives, in place, the `active` conversations their replies.

    Returns those in which there is room for another turn, and the room: of the `most` tokens that
    the model may say, and the `longest` conversation.
    """
    going = []
    for one, reply in host.replies(active):
        # A token that ends all text, and not only a turn, is the model's own end.
        if one.tokens[-1] != end_token(chat):
            continue
        tokens = host.tokens_of(one, chat, reply)
        if tokens is None:
            continue
        one.ended = False  # unless there is another turn, the reply was not the end
        room = min(most - len(one.tokens), longest - len(one.read) - len(tokens))
        if room > 0:
            one.give(reply, tokens)
            going.append((one, room))
    return going


def _some_rank_goes_on(count: int, exchange: dist.ProcessGroup | None) -> bool:
    """Whether any rank has a conversation that goes on; this one has `count`."""
    total = torch.tensor(count)
    dist.all_reduce(total, group=exchange)
    return bool(total)
