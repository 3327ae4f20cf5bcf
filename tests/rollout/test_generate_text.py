"""Sampling text leaves a training as it was, and says what transformers would say."""

import logging

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gguf_models import tokenizer_like
from lacuna.config import Config, UserError
from lacuna.config.sections import ModelConfig
from lacuna.model.attention import PACKED
from lacuna.rollout.generate import Printer, generate_text
from tiny import VOCABULARY, random_model, run_ranks, sharded_model, tiny_config, tokenizer_of_words

PROMPT = "w5 w6 w7"
TOKENIZER = tokenizer_of_words()


def greedy(model: PreTrainedModel) -> str:
    """What transformers' own greedy generation continues the prompt with."""
    ids = torch.tensor([[5, 6, 7]])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    return TOKENIZER.decode(output[0, 3:], skip_special_tokens=True)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mistral"])
def test_temperature_zero_is_transformers_own_greedy_generation(architecture: str) -> None:
    model = random_model(tiny_config(architecture))
    text = generate_text(model, TOKENIZER, PROMPT, 12, temperature=0, seed=1)
    assert text == greedy(model)
    assert 0 < len(text.split()) <= 12


def test_a_model_without_sdpa_generates_eagerly() -> None:
    model = random_model(tiny_config("gemma2"), PACKED)
    text = generate_text(model, TOKENIZER, PROMPT, 12, temperature=0, seed=1)
    assert text == greedy(random_model(tiny_config("gemma2"), "eager"))


@pytest.mark.parametrize("training", [True, False])
def test_mode_attention_and_random_state_are_left_alone(training: bool) -> None:
    model = random_model(tiny_config("llama", attention_dropout=0.5), PACKED).train(training)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    parameters = [parameter.clone() for parameter in model.parameters()]
    generate_text(model, TOKENIZER, PROMPT, 5, temperature=1.0, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training == training for module in model.modules())
    assert model.config._attn_implementation == PACKED
    assert not model.config.use_cache
    assert all(
        torch.equal(left, right) for left, right in zip(parameters, model.parameters(), strict=True)
    )
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
    )


def test_the_seed_alone_decides_what_is_sampled() -> None:
    model = random_model(tiny_config("llama"))
    texts = []
    for seed in (1, 2, 1):
        torch.rand(seed)  # whatever was drawn before
        texts.append(generate_text(model, TOKENIZER, PROMPT, 12, temperature=1.0, seed=seed))
    assert texts[0] == texts[2] != texts[1]


def test_an_empty_prompt_starts_from_the_first_token() -> None:
    assert generate_text(
        random_model(tiny_config("llama")), TOKENIZER, "", 4, temperature=0, seed=0
    )


def generate_on_shards(folder: str) -> list[str]:
    model = sharded_model(tiny_config("llama"), Config(model=ModelConfig(name_or_path=folder)))
    texts = [
        generate_text(model, TOKENIZER, PROMPT, 12, temperature, seed=4) for temperature in (0, 1)
    ]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "still gathered"
    ids = torch.arange(8)[None] % VOCABULARY
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return texts


def test_ranks_of_a_sharded_model_say_the_same_as_one(tmp_path: object) -> None:
    model = random_model(tiny_config("llama"))
    model.save_pretrained(tmp_path)
    expected = [
        generate_text(model, TOKENIZER, PROMPT, 12, temperature, seed=4) for temperature in (0, 1)
    ]
    assert run_ranks(2, generate_on_shards, str(tmp_path)) == [expected, expected]


def test_drawing_is_from_all_tokens_unless_fewer_are_asked_for() -> None:
    model = random_model(tiny_config("llama"))
    model.generation_config.top_k, model.generation_config.top_p = (
        1,
        0.1,
    )  # its own are not the user's
    drawn = generate_text(model, TOKENIZER, PROMPT, 12, temperature=5.0, seed=1)
    likeliest = greedy(model)
    assert drawn != likeliest
    assert (
        generate_text(model, TOKENIZER, PROMPT, 12, temperature=5.0, seed=1, top_k=1) == likeliest
    )
    assert (
        generate_text(model, TOKENIZER, PROMPT, 12, temperature=5.0, seed=1, top_p=1e-6)
        == likeliest
    )


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_last_position_ends_a_text_which_is_said(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(tiny_config(architecture, max_position_embeddings=8), seed=1)
    with caplog.at_level(logging.WARNING, "lacuna"):
        assert len(generate_text(model, TOKENIZER, PROMPT, 5, temperature=0, seed=0).split()) <= 5
        assert not caplog.messages
        assert len(generate_text(model, TOKENIZER, PROMPT, 6, temperature=0, seed=0).split()) == 5
    assert caplog.messages == ["the text ends at the last of the model's 8 positions"]
    with pytest.raises(UserError, match="the prompt has 8 tokens, and the model 8 positions"):
        generate_text(model, TOKENIZER, " ".join(["w5"] * 8), 1, temperature=0, seed=0)


@pytest.mark.parametrize("kind", ["sentencepiece", "smollm"])
def test_what_is_printed_as_it_is_made_is_what_the_whole_decodes_to(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "def read(self):\n    return 'ä 🦊 ' + 1\n\n  中文字 the end"
    tokenizer = tokenizer_like(kind)
    printer, printed = Printer(tokenizer), []
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for count in range(1, len(ids) + 1):
        printer(ids[:count])
        printed.append(capsys.readouterr().out)
    printer.end()
    assert (
        "".join(printed) + capsys.readouterr().out
        == tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    )
    assert sum(map(bool, printed)) > len(ids) / 3, "held back"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(printed)
