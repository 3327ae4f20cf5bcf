"""What is told of attention and hidden states is what they are, for softmax and for others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from every_model import configuration_class, model_types, small_config
from lacuna.config import UserError
from lacuna.model.architecture import decoder_layers
from lacuna.model.own_attention import OwnAttention, register
from lacuna.rollout import inspection
from lacuna.rollout.inspection import inspect_model, look
from tiny import random_model, tiny_config

HERE = Path(__file__).name.removesuffix(".py")
TOKENS = 12
ROWS = (torch.arange(2 * TOKENS) * 7 % 90 + 4).view(2, TOKENS)


def first_value(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> Tensor:
    """All queries attend to the first token alone."""
    values = value[:, :1].repeat_interleave(query.shape[2] // value.shape[2], dim=2)
    return values.expand(-1, query.shape[1], -1, -1)


SINK = OwnAttention(first_value, documents=False, windows=True)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "gpt_oss"])
def test_softmax_is_told_as_transformers_returns_it(architecture: str) -> None:
    attention = "eager" if architecture == "gpt_oss" else "sdpa"
    model = random_model(tiny_config(architecture), attention)
    layers = inspect_model(model, ROWS)
    assert model.config._attn_implementation == attention
    plain = random_model(tiny_config(architecture), "eager")
    first, largest = torch.zeros(2, 4), torch.zeros(2)
    for row in ROWS:
        output = plain(input_ids=row[None], output_attentions=True, output_hidden_states=True)
        first += torch.stack([each[0, :, :, 0].mean(1) for each in output.attentions]) / 2
        found = output.hidden_states[1].abs().max()  # after the last comes a norm
        largest[0] = torch.maximum(largest[0], found)
    told = torch.tensor([layer.first for layer in layers])
    torch.testing.assert_close(told, first)
    assert layers[0].largest == pytest.approx(largest[0].item(), rel=1e-5)
    assert layers[0].sinks[0] >= layers[0].sinks[1]
    assert (layers[0].sparsity > 0) == (architecture == "gemma3"), "only of pairs in no window"


@pytest.mark.parametrize("kind", ["softpick", "rectified", "scaled_softmax"])
def test_other_attentions_are_seen_without_a_change(kind: str) -> None:
    register(kind)
    model = random_model(tiny_config("gemma3"), kind)
    before = model(input_ids=ROWS[:1]).logits
    layers = inspect_model(model, ROWS)
    assert model.config._attn_implementation == kind
    assert torch.equal(model(input_ids=ROWS[:1]).logits, before)
    full = layers[1]  # the other has a window
    if kind == "scaled_softmax":
        assert full.sparsity == 0
    else:
        assert 0.2 < full.sparsity < 0.8
    own_states = [layer.kurtosis for layer in layers]
    softmax = inspect_model(random_model(tiny_config("gemma3")), ROWS)
    assert own_states != pytest.approx([layer.kurtosis for layer in softmax], rel=1e-3)


def test_a_sink_is_found() -> None:
    name = f"{HERE}:SINK"
    register(name)
    for layer in inspect_model(random_model(tiny_config("llama"), name), ROWS):
        assert layer.first == [1.0] * 4 and layer.sinks == [1.0, 1.0]
        assert layer.sparsity == pytest.approx(1 - TOKENS / (TOKENS * (TOKENS + 1) / 2))


@pytest.mark.parametrize("kind", ["softmax_sinks", "gated_softmax", "scaled_softpick"])
def test_attention_of_a_half_precise_model_is_computed_in_float32(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    register(kind)
    model = random_model(tiny_config("llama"), kind)
    whole = inspect_model(model, ROWS)
    attend, asked = inspection.attend_to_mask, set()

    def noted(name: str, own: OwnAttention, module: Any, *tensors: Any, **named: Any) -> Any:
        asked.update(tensor.dtype for tensor in tensors[:3])
        return attend(name, own, module, *tensors, **named)

    monkeypatch.setattr(inspection, "attend_to_mask", noted)
    half = inspect_model(model.to(torch.bfloat16), ROWS)
    assert asked == {torch.float32}, "flash kernels take no values of the width of a row"
    for one, other in zip(whole, half, strict=True):
        assert other.first == pytest.approx(one.first, abs=0.02)
        assert other.kurtosis == pytest.approx(one.kurtosis, rel=0.05)


def test_states_are_measured_by_their_moments() -> None:
    model = random_model(tiny_config("llama"))
    [layer, _] = inspect_model(model, ROWS[:1])
    states = model(input_ids=ROWS[:1], output_hidden_states=True).hidden_states[1].detach().double()
    centred = states - states.mean()
    assert layer.kurtosis == pytest.approx(
        float(centred.pow(4).mean() / centred.pow(2).mean() ** 2), rel=1e-5
    )


def test_a_model_that_shows_no_attention_is_refused() -> None:
    with pytest.raises(UserError, match="MambaForCausalLM does not show its attention"):
        inspect_model(random_model(tiny_config("mamba"), "eager"), ROWS)


def seen_and_returned(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's attention on the first token, as it is looked at and as transformers tells."""
    model_config = small_config(configuration_class(kind))
    model_config.use_cache = False
    model = random_model(model_config, "eager")
    ids = torch.arange(TOKENS) + 4
    [numbers] = look(model, decoder_layers(model), [ids], "x", one_by_one=True)
    seen = [layer[3:][layer[3:] > -torch.inf].float() for layer in numbers]
    output = model(input_ids=ids[None], use_cache=False, output_attentions=True)
    returned = [one for one in output.attentions if one is not None]
    return [layer for layer in seen if len(layer)], [one[0, :, :, 0].mean(1) for one in returned]


@pytest.mark.parametrize("kind", ["llama4_text", "gemma4_text", "qwen3_next"])
def test_layers_are_seen_where_only_an_inner_model_records_them(kind: str) -> None:
    seen, returned = seen_and_returned(kind)
    assert seen
    torch.testing.assert_close(seen, returned)


def test_a_run_cannot_look_at_models_of_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "is_from_fla", lambda _: True)
    with pytest.raises(UserError, match=r"metrics\.attention: models of fla do not show"):
        inspection.require_visible_attention(tiny_config("llama"))


@pytest.mark.slow
def test_every_model_is_seen_right_or_refused() -> None:
    found = 0
    for kind in model_types():
        try:
            seen, returned = seen_and_returned(kind)
        except (UserError, AttributeError) as error:  # some configurations have no decoder layers
            assert "does not show" in str(error) or "layers" in str(error), kind
            continue
        torch.testing.assert_close(seen, returned, msg=kind)
        found += 1
    assert found > 120
