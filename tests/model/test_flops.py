"""FLOPs are as worked out by hand, of attention and of layers with a state."""

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config

from every_model import configuration_class, small_config
from lacuna.model.architecture import meta_model, non_embedding_parameters
from lacuna.model.flops import attention_widths, flops_of, step_flops
from tiny import tiny_config

LENGTHS = torch.tensor([4, 10])


def test_causal_attention_counts_half_the_square_and_windows_less() -> None:
    assert step_flops(0, {None: 1}, 14, LENGTHS) == 12 * (16 / 2 + 100 / 2)
    assert step_flops(0, {4: 1}, 14, LENGTHS) == 12 * (16 / 2 + (4 * 10 - 16 / 2))
    assert step_flops(0, {100: 1}, 14, LENGTHS) == step_flops(0, {None: 1}, 14, LENGTHS)


def test_a_step_costs_six_per_parameter_and_token_and_twelve_per_attended_pair() -> None:
    llama = attention_widths(tiny_config("llama"))
    assert step_flops(1000, llama, 14, LENGTHS) == 6 * 1000 * 14 + 2 * 12 * 4 * 8 * 58
    gemma = attention_widths(tiny_config("gemma3"))  # one layer with a window of 4, one without
    assert step_flops(0, gemma, 14, LENGTHS) == 12 * 4 * 16 * (40 + 58)


@pytest.mark.parametrize(
    ("model_config", "widths"),
    [
        (tiny_config("mistral"), {4: 2 * 32}),
        (tiny_config("gemma3"), {4: 64, None: 64}),
        (tiny_config("llama"), {None: 2 * 32}),
        (
            Qwen2Config(num_hidden_layers=2, sliding_window=4, use_sliding_window=False),
            {None: 2 * 4096},
        ),
        (tiny_config("mamba"), {}),
    ],
    ids=["mistral", "gemma3", "llama", "qwen2", "mamba"],
)
def test_every_layer_has_its_own_window(
    model_config: PretrainedConfig, widths: dict[int | None, int]
) -> None:
    assert attention_widths(model_config) == widths


def test_heads_are_found_under_other_names() -> None:
    assert attention_widths(tiny_config("gpt2")) == {None: 2 * 4 * 8}


@pytest.mark.parametrize(
    ("kind", "states", "attending"),
    [
        # Gated delta rules: 2 layers of 4 heads, 8 by 8, and 2 layers of attention, 4 heads of 8.
        ("qwen3_5_text", 3 * 2 * 4 * 8 * 8, 2 * 4 * 8),
        ("kimi_linear", 3 * 2 * 4 * 8 * 8, 2 * 4 * 8),
        # Mamba 2 in every layer, 4 heads of 8 by 4 states, beside attention.
        ("falcon_h1", 2 * 4 * 32 * 4, 4 * 4 * 8),
        # Lightning attention: 2 layers of 4 heads of 8, and 2 layers of attention.
        ("minimax", 2 * 2 * 4 * 8 * 8, 2 * 4 * 8),
        # Convolutions have weights alone.
        ("lfm2", 0, 2 * 4 * 8),
    ],
)
def test_states_count_as_their_recurrence_and_only_layers_that_attend_as_attention(
    kind: str, states: int, attending: int
) -> None:
    own = small_config(configuration_class(kind))
    assert attention_widths(own) == {None: attending}
    model = meta_model(own, "eager", torch.float32)
    wanted = step_flops(non_embedding_parameters(model) + states, {None: attending}, 14, LENGTHS)
    assert flops_of(model)(14, LENGTHS) == wanted
