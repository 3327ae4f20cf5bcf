"""Feed-forward blocks in pieces compute the same, and never have a whole sequence in memory."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from every_model import NO_SPECIMEN, configuration_class, model_types, small_config
from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.architecture import decoder_layers
from lacuna.model.pieces import compute_in_pieces, token_wise_blocks
from lacuna.parallel.mesh import Layout
from layouts import Case, Outcome, check_same, outcomes, pipelined
from tiny import random_model, tiny_config

PIECES = ActivationCheckpointConfig(mlp_chunks=4)
FULL = ActivationCheckpointConfig(mode="full", mlp_chunks=4)
OFFLOADED = ActivationCheckpointConfig(mode="full", offload=True, mlp_chunks=5)
UNEVEN = ActivationCheckpointConfig(mlp_chunks=5)


def in_every_way(layout: Layout, microbatches: int = 2, **settings: Any) -> list[Case]:
    # Compiling takes long, and graphs of uneven pieces are those of even ones and more.
    modes = (OFFLOADED, UNEVEN) if settings.get("compiled") else (PIECES, FULL, OFFLOADED, UNEVEN)
    return [Case(layout, microbatches, recompute=mode, **settings) for mode in modes]


@pytest.fixture(scope="module", params=["llama_tied", "gemma3"])
def model_config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_config(request.param).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(model_config: Path) -> Outcome:
    """A step of one process."""
    [outcome] = outcomes(model_config, [Case(Layout(), 2)])
    return outcome


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(1, 2),
        pytest.param(Layout(cp=2), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2), marks=pytest.mark.slow),
    ],
    ids=["alone", "dp_shard 2", "cp 2", "tp 2"],
)
def test_a_step_in_pieces_is_the_same_step(
    model_config: Path, layout: Layout, alone: Outcome
) -> None:
    for outcome in outcomes(model_config, in_every_way(layout)):
        check_same(outcome, alone)


@pytest.mark.slow
def test_a_step_in_pieces_is_the_same_step_in_a_pipeline(tmp_path: Path) -> None:
    tiny_config("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    alone = outcomes(tmp_path, [Case(Layout(), 4)])[0]
    cases = [
        replace(pipelined(Layout(pp=2), 4, schedule), recompute=mode)
        for schedule in ("1F1B", "Interleaved1F1B")
        for mode in (PIECES, FULL)
    ]
    for outcome in outcomes(tmp_path, cases):
        check_same(outcome, alone)


@pytest.mark.slow
@pytest.mark.parametrize("model_config", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [
        {"lora": LoraConfig(rank=3)},
        {"lora": LoraConfig(rank=3), "base": "nf4"},
        {"compiled": True, "backend": "aot_eager"},
    ],
    ids=["adapters", "quantised", "compiled"],
)
def test_a_step_in_pieces_is_the_same_step_with(
    model_config: Path, settings: dict[str, Any]
) -> None:
    cases = [Case(Layout(1, 2), 2, **settings), *in_every_way(Layout(1, 2), **settings)]
    plain, *in_pieces = outcomes(model_config, cases)
    for outcome in in_pieces:
        check_same(outcome, plain)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_no_more_than_one_piece_has_its_wide_activations_in_memory(mode: str) -> None:
    model = random_model(tiny_config("llama")).train()
    layers = decoder_layers(model)
    compute_in_pieces(model, 4, 1)
    seen: list[weakref.ref[Tensor]] = []
    tokens: set[int] = set()

    def note(_: nn.Module, given: tuple[Tensor]) -> None:
        tokens.add(given[0].shape[1])
        assert sum(one() is not None for one in seen) <= 1
        seen.append(weakref.ref(given[0]))

    for layer in layers:
        layer.get_submodule("mlp.down_proj").register_forward_pre_hook(note)
    output: Any = model(input_ids=torch.arange(32)[None] % 60, use_cache=False)
    output.logits.sum().backward()
    assert tokens == {8}
    assert len(seen) == 2 * 4 * len(layers)  # forward, and again in the backward pass


def test_each_token_of_mixtures_of_experts_has_the_same_experts() -> None:
    model = random_model(tiny_config("qwen3_moe"))
    ids = torch.arange(64).view(2, 32) % 60
    whole: Any = model(input_ids=ids, use_cache=False)
    compute_in_pieces(model, 4, 1)
    pieces: Any = model(input_ids=ids, use_cache=False)
    torch.testing.assert_close(pieces.logits, whole.logits)


def test_what_has_no_such_block_is_refused() -> None:
    model = random_model(tiny_config("opt"))
    with pytest.raises(UserError, match="mlp_chunks: layers of 'opt' models have no block"):
        compute_in_pieces(model, 4, 1)


@pytest.mark.slow
def test_every_architecture_computes_the_same_in_pieces_or_has_no_blocks() -> None:
    differing, without = [], set()
    for kind in model_types():
        if kind in NO_SPECIMEN:
            continue
        model_config = small_config(configuration_class(kind))
        model_config.use_cache = False
        if not token_wise_blocks(model_config):
            without.add(kind)
            continue
        model = random_model(model_config, attention="eager")
        ids = torch.arange(2, 48).view(2, 23) % 40
        with torch.no_grad():
            whole: Any = model(input_ids=ids, use_cache=False)
            compute_in_pieces(model, 3, 1)
            pieces: Any = model(input_ids=ids, use_cache=False)
        if not torch.allclose(pieces.logits, whole.logits, rtol=1e-4, atol=1e-5):
            differing.append(kind)
    assert differing == []
    assert {"llama", "gemma3_text", "qwen3_moe", "mixtral", "gpt2"}.isdisjoint(without)
