"""The loss of models that score beside TRL's on the same batch with the same weights."""

from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.model.kind import new_model
from lacuna.model.scores import make_scoring
from lacuna.objective.reward import Reward
from lacuna.train.step import sums_of
from policies import batch_of, one_rank, policy_of
from tiny import VOCABULARY, tiny_config, tokenizer_of_words
from trl_reward import reward

pytestmark = pytest.mark.slow


def scoring(kind: str) -> PreTrainedModel:
    model_config = tiny_config(kind)
    make_scoring(model_config)
    model_config.pad_token_id = tokenizer_of_words().pad_token_id
    torch.manual_seed(1)
    return new_model(model_config, torch.float32, "sdpa")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_lacuna_is_trl(kind: str) -> None:
    model = scoring(kind)
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    pairs = [(ids(a), [*ids(b), 2], [*ids(c), 2]) for a, b, c in ((5, 3, 9), (2, 8, 1), (9, 1, 4))]
    chosen, rejected = ([one[0] + one[place] for one in pairs] for place in (1, 2))
    loss, gradients, logged = reward(model, chosen, rejected)
    objective = Reward()
    objective.check(Config(), tokenizer_of_words())
    sequences = [(one[0], one[place]) for one in pairs for place in (1, 2)]
    with one_rank():
        own = deepcopy(model)
        policy = policy_of(own)
        objective.prepare(policy, lambda: [])
        batches = [batch_of(sequences, {"chosen": [1.0, 0.0] * len(pairs)})]
        [batch] = objective.annotate(policy, batches, objective.loss)
        sums = sums_of(policy, batch, objective.loss)
        (sums[0] / batch.counts[objective.denominator]).backward()
    named = dict(zip(objective.loss.names, sums.tolist(), strict=True))
    row = objective.report(named, batch.counts)
    found = torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])
    assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert torch.dist(found, gradients) < 1e-5 * gradients.norm()
    assert row["score_accuracy"] == pytest.approx(logged["accuracy"])
    assert row["score_margin"] == pytest.approx(logged["margin"], rel=1e-4)
