"""Any sequence classifier with one label is a reward, written to by its own chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lacuna.config import OutageError, UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.reinforcement import RewardsConfig
from lacuna.rollout.reward_models import RewardModel, load_models
from lacuna.rollout.rewards import score
from lacuna.rollout.verifiers import Answered, find_rewards
from rewarded import completions, flags, write_prompts
from runs import train, write_model
from tiny import CPU

OWN_TEMPLATE = (
    "{% for one in messages %}[{{ one.role }}] {{ one.content }}{{ eos_token }}{% endfor %}"
)


def write_scores(folder: Path, labels: int = 1, **settings: Any) -> Path:
    """A tiny model that scores, whose tokenizer has a chat template and pads with a token."""
    write_model(folder, num_labels=labels, pad_token_id=0, **settings)
    torch.manual_seed(3)
    model_config = LlamaConfig.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(model_config)
    with torch.no_grad():
        model.score.weight.mul_(30)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = OWN_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scores(tmp_path_factory.mktemp("judge"))


def opened(folder: Path, batch_size: int = 2) -> RewardModel:
    return RewardModel(str(folder), ChatConfig(), batch_size, trust_remote_code=False)


def by_transformers(folder: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits.item()


def test_texts_follow_each_other_and_conversations_have_its_own_template(judge: Path) -> None:
    asked = [{"role": "user", "content": "why"}]
    answers = [
        Answered({"prompt": "one two"}, "data, row 1", " three", left=0),
        Answered({"messages": asked}, "data, row 2", "because", left=0),
        Answered({"prompt": asked}, "data, row 3", "because of it all", left=0),
    ]
    model = opened(judge)
    load_models([model], CPU)
    wanted = [
        by_transformers(judge, "one two three<end>"),
        by_transformers(judge, "[user] why<end>[assistant] because<end>"),
        by_transformers(judge, "[user] why<end>[assistant] because of it all<end>"),
    ]
    assert model(answers) == pytest.approx(wanted, abs=1e-5)
    assert len({round(one, 3) for one in wanted}) == 3


def test_a_model_may_take_longer_than_functions_may(judge: Path) -> None:
    settings = RewardsConfig(functions=(str(judge),), timeout_seconds=1e-4)
    model = opened(judge)
    load_models([model], CPU)
    answers = [Answered({"prompt": "one"}, "data, row 1", " two", left=0)]
    [found] = score({str(judge): model}, answers, settings)[str(judge)]
    assert found == pytest.approx(by_transformers(judge, "one two<end>"), abs=1e-5)


def test_models_without_padding_score_one_at_a_time(tmp_path: Path) -> None:
    judge = write_scores(tmp_path)
    model_config = LlamaConfig.from_pretrained(judge)
    model_config.pad_token_id = None
    model_config.save_pretrained(judge)
    model = opened(judge, batch_size=8)
    load_models([model], CPU)
    answers = [Answered({"prompt": "a"}, "row", text, left=0) for text in ("b", "c d e")]
    assert model(answers) == pytest.approx(
        [by_transformers(judge, f"a{x.text}<end>") for x in answers]
    )


def test_what_is_no_single_score_is_refused_by_name(tmp_path: Path) -> None:
    three = write_scores(tmp_path / "three", labels=3)
    with pytest.raises(UserError, match=r"three has 3 labels, and a reward is one number"):
        opened(three)
    causal = write_model(tmp_path / "causal")
    LlamaForCausalLM(LlamaConfig.from_pretrained(causal)).save_pretrained(causal)
    with pytest.raises(UserError, match=r"causal is no sequence classifier"):
        opened(causal)
    with pytest.raises(UserError, match=r"nowhere cannot be opened"):
        opened(tmp_path / "nowhere")


def test_a_completion_beyond_its_positions_is_named(tmp_path: Path) -> None:
    judge = write_scores(tmp_path, max_position_embeddings=8)
    settings = RewardsConfig(functions=(str(judge),))
    functions = find_rewards(settings, lambda name: opened(Path(name)))
    load_models([*functions.values()], CPU)
    answers = [Answered({"prompt": "a"}, "data, row 7", "b" * 20, left=0)]
    with pytest.raises(OutageError, match=r"data, row 7.*22 tokens are more than the 8"):
        score(functions, answers, settings)


def test_a_run_learns_from_a_model_that_scores(world: Path, judge: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path)
    judged = ("--rewards.functions", f"{judge},length", "--training.steps", 2)
    train(world, tmp_path / "run", *flags(prompts, *judged))
    found = completions(tmp_path / "run")
    for row in [row for row in found if row["prompt"].startswith("ask")][:4]:
        wanted = by_transformers(judge, f"{row['prompt']}{row['completion']}<end>")
        assert row["scores"][str(judge)] == pytest.approx(wanted, abs=1e-4)
    assert len({row["scores"][str(judge)] for row in found}) > 10
    with_three = write_scores(tmp_path / "three", labels=3)
    own = flags(prompts, "--rewards.functions", with_three, "--rewards.length_margin", 32)
    assert "3 labels" in train(world, tmp_path / "none", *own, status=2)


def test_a_model_with_an_attention_of_its_own_scores_by_it(tmp_path: Path) -> None:
    judge = write_scores(tmp_path / "judge")
    answers = [Answered({"prompt": "one two"}, "data, row 1", " three four", left=0)]
    scores = []
    for attention in ("sdpa", "softpick"):
        stated = judge / "config.json"
        settings = json.loads(stated.read_text())
        stated.write_text(json.dumps(settings | {"attn_implementation": attention}))
        model = opened(judge)
        load_models([model], CPU)
        scores += model(answers)
    assert abs(scores[0] - scores[1]) > 1e-3
