"""Turns are drawn behind exactly what was drawn and given before, in any company; failures told."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lacuna.config import Config, OutageError
from lacuna.config.reinforcement import RewardsConfig, RolloutConfig
from lacuna.data.chat import end_of_turn
from lacuna.objective.grpo import grpo_targets
from lacuna.objective.sample_batches import logprobs_of_samples
from lacuna.objective.sample_rows import lay_out
from lacuna.rollout.groups import Sample
from lacuna.rollout.sampling import generate
from lacuna.rollout.talks import Talk
from lacuna.rollout.turns import go_on
from policies import one_rank, policy_of
from talking import talker, talking_model

TOKENIZER = talker()
END = TOKENIZER.eos_token_id
PROMPTS = [TOKENIZER(f"user {n} plus 2 <end> assistant").input_ids for n in range(4)]
KEYS = [11, 12, 13, 14]
SEED = 3
LONGEST = 64


class Echo:
    """Says how many words it has heard, and who it is, and goes on."""

    heard = 0

    def __init__(self, row: dict[str, Any], seed: int) -> None:
        self.seed = seed
        self.row = row

    def reply(self, text: str) -> list[dict[str, Any]] | None:
        self.heard += len(text.split())
        return [{"role": "user", "content": f"{self.heard % 60} is {self.seed % 60}"}]


class Late(Echo):
    """Waits for another of its kind; for the second prompt, without end."""

    waiting = 0

    async def reply(self, text: str) -> list[dict[str, Any]] | None:
        Late.waiting += 1
        while Late.waiting < 2 or self.row["number"] == 1:
            await asyncio.sleep(0.01)
        return [{"role": "tool", "content": "is"}]


class Leaving(Echo):
    async def reply(self, text: str) -> list[dict[str, Any]] | None:
        raise SystemExit(3)


class Stuck(Echo):
    def reply(self, text: str) -> list[dict[str, Any]] | None:
        time.sleep(60 if self.row["number"] == 2 else 0)
        return None


class Unmade(Echo):
    def __init__(self, row: dict[str, Any], seed: int) -> None:
        raise KeyError("no such room")


class Odd(Echo):
    """Replies by what is no reply."""

    def reply(self, text: str) -> Any:
        return self.row["reply"]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def talks_of(
    environment: type[Echo],
    places: tuple[int, ...] = (0, 1, 2, 3),
    longest: int = LONGEST,
    rewards: RewardsConfig | None = None,
    row: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Talk]:
    """Conversations of the prompts in these places, three of each."""
    own = {"samples": 3, "max_tokens": 24, "turns": 4, "batch_size": 5} | settings
    rollout = RolloutConfig(environment=f"{__name__}:{environment.__name__}", **own)
    policy = policy_of(talking_model().eval(), config_of())
    ends = end_of_turn(TOKENIZER)
    prompts = [PROMPTS[place] for place in places]
    keys = [KEYS[place] for place in places]
    said = generate(policy, prompts, keys, rollout, ends, SEED)
    talks = [
        Talk(PROMPTS[place], {"number": place} | (row or {}), f"row {place}", 0, (key, number))
        for place, key in zip(places, keys, strict=True)
        for number in range(3)
    ]
    for talk, one in zip(talks, [one for group in said for one in group], strict=True):
        talk.hear(one, TOKENIZER)
    how = (rewards or RewardsConfig(), longest, ends, SEED, TOKENIZER, None)
    go_on(policy, talks, rollout, *how)
    return talks


def config_of() -> Config:
    return Config(training={"seq_len": LONGEST, "batch_size": 2})


def sample_of(talk: Talk) -> Sample:
    return Sample(talk.prompt, talk.tokens, talk.logprobs, talk.ended, given=talk.given)


def test_what_was_drawn_is_read_as_it_was_with_the_reply_as_the_template_writes_it() -> None:
    talks = talks_of(Echo)
    assert {2, 4} <= {len(one.texts) for one in talks}
    for one in talks:
        sample = sample_of(one)
        assert one.prompt + sample.after == one.read
        assert [token for token, own in zip(sample.after, sample.is_own, strict=True) if own] == (
            one.tokens
        )
        turns = [*one.texts]
        heard = 0
        expected = TOKENIZER.decode(one.prompt)
        for message in one.messages:
            if message["role"] == "assistant":
                expected += f" {turns.pop(0)} <end>"
                heard += len(message["content"].split())
            else:
                assert message["content"].startswith(f"{heard % 60} is ")
                expected += f" user {message['content']} <end> assistant"
        # Only a turn that was cut off has no end.
        whole = TOKENIZER.decode(one.read) + ("" if one.read[-1] == END else " <end>")
        assert whole.split() == expected.split()
        roles = [message["role"] for message in one.messages]
        assert roles == (["assistant", "user"] * 4)[: 2 * len(one.texts) - 1]


def test_training_finds_the_probabilities_of_all_turns() -> None:
    config = config_of()
    samples = [sample_of(one) for one in talks_of(Echo, temperature=0.7)]
    assert any(len(one.given) == 3 for one in samples)
    policy = policy_of(talking_model().eval(), config)
    targets = grpo_targets(config.grpo, config.rollout)
    laid = lay_out(samples, config.training, config.row_form, config.data, 0, targets)
    assert sum(batch.counts["trained_tokens"] for batch in laid.batches) == sum(
        len(one.tokens) for one in samples
    )
    found = logprobs_of_samples(policy, laid, samples, 0.7)
    for sample, own in zip(samples, found, strict=True):
        assert own == pytest.approx(sample.sampled, abs=1e-4)


def test_a_conversation_depends_neither_on_its_company_nor_on_the_engine() -> None:
    together = talks_of(Echo)
    one_by_one = [talk for place in range(4) for talk in talks_of(Echo, (place,))]
    padded = talks_of(Echo, engine="padded")
    for one, other, third in zip(together, one_by_one, padded, strict=True):
        assert one.read == other.read == third.read and one.given == other.given
        assert one.logprobs == pytest.approx(third.logprobs, abs=1e-4)
    assert len({tuple(one.read) for one in together}) == 12
    assert len({one.messages[1]["content"] for one in together if one.given}) > 3


def test_a_conversation_is_cut_off_where_tokens_or_turns_or_the_row_end() -> None:
    for one in talks_of(Echo, max_tokens=10, turns=3):
        assert len(one.tokens) <= 10 and not one.ended
        assert len(one.tokens) == 10 or len(one.texts) == 3 or one.tokens[-1] == END
    short = talks_of(Echo, longest=32)
    assert max(len(one.read) for one in short) <= 32
    assert any(len(one.read) == 32 and one.tokens[-1] != END for one in short)
    assert not any(one.ended for one in short)
    assert all(one.read[-1] in one.tokens[-1:] for one in short), "nothing is given at the end"


def test_a_token_that_ends_all_text_ends_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    other = TOKENIZER.convert_tokens_to_ids("7")
    monkeypatch.setattr("lacuna.rollout.turns.end_token", lambda chat: other)
    talks = talks_of(Echo)
    assert all(not one.given for one in talks) and any(one.ended for one in talks)
    assert all(one.environment.heard == len(one.texts[0].split()) for one in talks if one.ended)


def test_environments_are_made_of_the_row_and_a_seed_of_their_own() -> None:
    row: dict[str, Any] = {"kept": []}
    talks = talks_of(Echo, row=row)
    assert len({one.environment.seed for one in talks}) == 12
    assert all(one.environment.row["kept"] is not row["kept"] for one in talks)
    assert [one.environment.seed for one in talks_of(Echo)] == [
        one.environment.seed for one in talks
    ]


SKIP = RewardsConfig(on_error="skip", timeout_seconds=0.5)


def test_asynchronous_replies_are_awaited_together_and_those_too_late_are_left_out() -> None:
    talks = talks_of(Late, rewards=SKIP)
    assert all(one.given for one in talks if one.row["number"] != 1 and one.ended)
    failed = {one.row["number"] for one in talks if one.has_failed}
    assert failed == {1}
    with pytest.raises(OutageError, match=r"fails on row 1 after '.*' \(it takes longer than rew"):
        talks_of(Late, rewards=RewardsConfig(timeout_seconds=0.5))


@pytest.mark.parametrize(
    ("environment", "row", "said"),
    [
        (Leaving, {}, r"fails on row .*\(it called sys.exit\(3\)\)"),
        (Stuck, {}, r"fails on row 2 after '.*' \(it takes longer than rewards.timeout_seconds"),
        (Unmade, {}, r"fails on row 0 after .*KeyError: 'no such room'.*on_error = skip"),
        (Odd, {"reply": "yes"}, r" \(its reply: should be a list, not 'yes'\)"),
        (Odd, {"reply": []}, "no message: return None where the conversation is over"),
        (Odd, {"reply": [{"role": "user"}]}, "its reply, message 1, content: should be text"),
        (Odd, {"reply": [{"role": "assistant", "content": "a"}]}, "for which the model speaks"),
        (Odd, {"reply": [{"role": "user", "content": "a", "x": {1}}]}, "not JSON serializable"),
    ],
)
def test_an_environment_that_fails_is_named_with_its_sample(
    environment: type[Echo], row: dict[str, Any], said: str
) -> None:
    with pytest.raises(OutageError, match=said):
        talks_of(environment, row=row, rewards=RewardsConfig(timeout_seconds=0.5))
    talks = talks_of(environment, row=row, rewards=SKIP, places=(2,))
    assert any(one.has_failed for one in talks)
    assert all(one.has_failed or not one.ended for one in talks)
