"""Steps are recorded on GPUs, in memory that is taken once for all rollouts."""

import pytest
import torch
from transformers import PreTrainedModel

from lacuna.model.vocabulary import look_up_on_cpu
from lacuna.rollout import recording
from lacuna.rollout.drawing import Asked, Drawing
from lacuna.rollout.generate import complete
from lacuna.rollout.passes import Steps
from tiny import random_model, tiny_config

DEVICE = torch.device("cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def model() -> PreTrainedModel:
    return random_model(tiny_config("llama", max_position_embeddings=256)).to(DEVICE).eval()


def rollout(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps were recorded for completions of one size."""
    recorded = []
    real = recording.record
    monkeypatch.setattr(
        "lacuna.rollout.passes.record", lambda *how: recorded.append(real(*how)) or recorded[-1]
    )
    asked = [Asked([5, 6, 7 + number % 16], [number], 32) for number in range(64)]
    complete(model, asked, Drawing(1.0), [2], 64, DEVICE)
    assert None not in recorded
    return len(recorded)


def test_rollouts_take_the_same_memory_again(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = []
    for _ in range(12):
        assert rollout(model, monkeypatch)
        reserved.append(torch.cuda.memory_reserved())
    # The first ones fill what torch keeps by the stream; each of the others once took more.
    assert reserved[-1] == reserved[5]


def test_later_rollouts_record_a_step_without_making_it_before_and_say_the_same(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = Steps._step
    monkeypatch.setattr(Steps, "_step", lambda *how: made.append(how[1]) or real(*how))
    asked = [Asked([5, 6, 7 + number % 16], [number], 32) for number in range(64)]
    said = []
    counts = []
    for _ in range(3):
        made.clear()
        said.append(complete(model, asked, Drawing(1.0), [], 64, DEVICE))
        counts.append(made.count(64))
    assert counts == [2, 1, 1]
    assert said[0] == said[1] == said[2]


def test_steps_are_recorded_where_the_embedding_is_in_cpu_memory(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up_on_cpu(model.get_input_embeddings())
    assert rollout(model, monkeypatch)
