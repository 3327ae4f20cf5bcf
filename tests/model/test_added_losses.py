"""Losses that a model's own code adds to the cross-entropy are refused, and no others."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from every_model import configuration_class, model_types, small_config
from lacuna.config import UserError
from lacuna.config.sections import ModelConfig
from lacuna.model import specimen
from lacuna.model.added_losses import require_no_added_loss
from lacuna.model.architecture import load_model_config
from runs import make_world, train
from tiny import CPU, random_model, tiny_config, tokenizer_of_words

# Kinds of which no model in small can be made, so that no run gets as far either.
UNMADE = ("blt", "hrm_text", "longcat_flash")


def balanced_dbrx() -> PretrainedConfig:
    try:
        return small_config(configuration_class("dbrx"), output_router_logits=True)
    except ValueError:
        pytest.skip("transformers 5.17 does not read the tables that it writes of DBRX")


def z_loss_bamba() -> PretrainedConfig:
    return small_config(configuration_class("bamba"), z_loss_coefficient=0.1)


@pytest.mark.parametrize(
    ("make", "setting"),
    [(z_loss_bamba, "z_loss_coefficient"), (balanced_dbrx, "ffn_config.moe_loss_weight")],
)
def test_a_loss_that_would_be_left_out_is_refused_by_its_weight(
    make: Callable[[], PretrainedConfig], setting: str
) -> None:
    own = make()
    with pytest.raises(UserError, match=rf"weighted by {re.escape(setting)} in its configuration"):
        require_no_added_loss(own, CPU)
    *parts, name = setting.split(".")
    setattr(own.ffn_config if parts else own, name, 0.0)
    require_no_added_loss(own, CPU)


def test_dbrx_is_not_said_to_have_no_such_loss(tmp_path: Path) -> None:
    random_model(balanced_dbrx()).save_pretrained(tmp_path)
    asked = {"name_or_path": str(tmp_path), "output_router_logits": True}
    with pytest.raises(UserError, match="no load-balancing loss that lacuna knows of: leave it"):
        load_model_config(ModelConfig(**asked), tokenizer_of_words())
    left_out = load_model_config(
        ModelConfig(**(asked | {"output_router_logits": False})), tokenizer_of_words()
    )
    require_no_added_loss(left_out, CPU)


def test_a_loss_that_no_setting_turns_off_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = LlamaForCausalLM.forward

    def with_more(self: nn.Module, **named: object) -> CausalLMOutput:
        output = forward(self, **named)
        output.loss = output.loss + 0.1
        return output

    require_no_added_loss(tiny_config("llama"), CPU)
    assert caplog.text == ""
    monkeypatch.setattr(LlamaForCausalLM, "forward", with_more)
    monkeypatch.setattr(specimen, "_found", {})
    require_no_added_loss(tiny_config("llama"), CPU)
    assert "the loss of LlamaForCausalLM's own code is another" in caplog.text


def test_a_run_is_refused_before_its_first_step(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    own = small_config(configuration_class("bamba"), vocab_size=257, z_loss_coefficient=0.1)
    own.save_pretrained(world / "bamba")
    words = ("--model.config", world / "bamba", "--model.tokenizer_path", world / "model")
    for more in ((), ("--dry-run",)):
        said = train(world, tmp_path / "run", *words, *more, status=2)
        assert "weighted by z_loss_coefficient in its configuration" in said


@pytest.mark.slow
def test_no_model_is_refused_for_what_it_does_not_add() -> None:
    for kind in model_types():
        if kind not in UNMADE:
            require_no_added_loss(small_config(configuration_class(kind)), CPU)
