"""Feed-forward blocks of fla's layers compute the same in plain PyTorch, compiled or not."""

# ruff: noqa: E402

import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# The variable must be there before anything imports Triton.
if importlib.util.find_spec("fla") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs flash-linear-attention and TRITON_INTERPRET=1", allow_module_level=True)

import fla_on_cpu

fla_on_cpu.interpret()

from fla_small import ONE_HEAD, OWN_SIZES, config_of, interpreted_steps
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.data.fla_models import MODEL_TYPES
from lacuna.model.architecture import decoder_layers
from lacuna.model.layers.linear import plain_linears
from lacuna.model.linear_attention import bounds_choices
from lacuna.parallel import feed_forward
from lacuna.parallel.mesh import Layout
from layouts import Case
from tiny import random_model, relative_error, run_ranks


@pytest.mark.slow
def test_compiled_blocks_train_as_flas_own(tmp_path: Path) -> None:
    model_config = config_of(tmp_path, "gla", **ONE_HEAD)
    bounds_choices("auto", model_config, "cpu", Layout())
    random_model(model_config, "eager").save_pretrained(tmp_path)
    by_operation = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
    compiled = [Case(compiled=True), Case(compiled=True, recompute=by_operation)]
    [[alone, *others]] = run_ranks(1, interpreted_steps, tmp_path, [Case(), *compiled])
    for outcome in others:
        assert outcome.loss == pytest.approx(alone.loss, rel=1e-6)
        # Rounding of 1e-7 grows in the gradients of GLA's gates.
        assert relative_error(outcome.gradients, alone.gradients) < 1e-4


def test_plain_blocks_compute_what_flas_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind of model, without attention, which the interpreter takes long for."""
    monkeypatch.setattr(feed_forward, "_compiled", lambda: feed_forward.normed_swiglu)
    found = set()
    for kind in sorted(MODEL_TYPES - {"yoco"}):  # which is refused for its two lists of layers
        model_config = config_of(tmp_path / kind, kind, **OWN_SIZES.get(kind, {}))
        bounds_choices("auto", model_config, "cpu", Layout())
        for layer in decoder_layers(random_model(model_config, "eager").train())[:1]:
            if type(getattr(layer, "mlp", None)).__name__ == "GatedMLP":
                without_attention(layer, kind)
                own = values_of(layer)
                feed_forward.compile_feed_forward([layer], ActivationCheckpointConfig())
                assert relative_error(values_of(layer), own) < 1e-5, kind
                found.add(kind)
    assert len(found) > 30


def without_attention(layer: nn.Module, kind: str) -> None:
    """Has all parts of a layer but its feed-forward block and norms hand on a half, in place."""
    others = {"mom": (None, None, None)}.get(kind, (None, (None, None)))

    def half(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return hidden_states / 2 if kind == "cat" else (hidden_states / 2, *others)

    for name, part in layer.named_children():
        if "norm" not in name and name != "mlp":
            part.forward = half


def values_of(layer: Any) -> dict[str, Tensor]:
    """What a layer makes of noise, and the gradients of its squares."""
    torch.manual_seed(0)
    given = torch.randn(1, 8, layer.mlp.hidden_size, requires_grad=True)
    asked = [*inspect.signature(layer.forward).parameters.values()][1:]
    needed = [one.name for one in asked if one.default is one.empty and one.kind != one.VAR_KEYWORD]
    made = layer(given, **dict.fromkeys(needed))
    while isinstance(made, tuple):
        made = made[0]
    weights = {"given": given}
    for name, weight in layer.named_parameters():
        if name.startswith(("mlp", "attn_norm", "mixer_norm")):
            weights[name] = weight
    gradients = torch.autograd.grad(made.square().sum(), [*weights.values()])
    return {"made": made} | dict(zip(weights, gradients, strict=True))


def test_layers_whose_weights_flas_kernels_take_are_not_plain(tmp_path: Path) -> None:
    """Adapters and products in few bits would be passed by."""
    left_out = {"gla": {"mlp.down_proj"}, "hgrn2": {"mlp.down_proj", "attn.o_proj"}}
    for kind, names in left_out.items():
        model_config = config_of(tmp_path / kind, kind, **OWN_SIZES.get(kind, {}))
        bounds_choices("auto", model_config, "cpu", Layout())
        layer = decoder_layers(random_model(model_config, "eager"))[0]
        linear = {name for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
        assert linear - plain_linears(layer).keys() == names
