"""Keys and values are in pages where a small model is exact with that; else it is said why not."""

import pytest

from lacuna.rollout.generate import generate_text
from lacuna.rollout.paged_probe import reason_against_pages
from tiny import CPU, random_model, tiny_config, tokenizer_of_words

EXACT = ("llama", "qwen3", "gemma", "gemma3", "mistral", "gpt2", "neox", "cohere", "granite")
EXACT += ("phi", "opt", "olmo2", "qwen3_moe", "qwen2_moe")
INEXACT = {
    "gemma2": "a mask, a soft cap or sinks",
    "gpt_oss": "a mask, a soft cap or sinks",
    "deepseek_v3": "another width",
    "mamba": "",
    "falcon": "",
    "bloom": "",
}


@pytest.mark.parametrize("architecture", EXACT)
def test_models_that_are_exact_with_pages_have_them(architecture: str) -> None:
    assert reason_against_pages(random_model(tiny_config(architecture)), CPU) is None


@pytest.mark.parametrize("architecture", INEXACT)
def test_models_that_are_not_are_known_before_they_speak(architecture: str) -> None:
    attention = "eager" if architecture in ("gemma2", "mamba", "gpt_oss", "bloom") else "sdpa"
    model = random_model(tiny_config(architecture), attention)
    reason = reason_against_pages(model, CPU)
    assert reason is not None and INEXACT[architecture] in reason
    text = generate_text(model, tokenizer_of_words(), "w5 w6", 4, temperature=0, seed=1)
    assert len(text.split()) <= 4


def test_rotations_that_follow_the_longest_position_are_no_case_for_pages() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = random_model(tiny_config("llama", rope_parameters=rope))
    assert "longest position" in str(reason_against_pages(model, CPU))
