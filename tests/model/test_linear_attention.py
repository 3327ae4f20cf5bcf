"""fla's models train as they do by fla's own code on documents alone, in every layout they have."""

# ruff: noqa: E402

import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

# The variable must be there before anything imports Triton.
if importlib.util.find_spec("fla") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs flash-linear-attention and TRITON_INTERPRET=1", allow_module_level=True)

import fla_on_cpu

fla_on_cpu.interpret()

from fla.modules.l2warp import l2_warp

from first_weights import drawn_otherwise
from fla_small import HYBRID, ONE_HEAD, OWN_SIZES, config_of, folder_of, interpreted_steps
from lacuna.cli import main
from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.data.fla_models import MODEL_TYPES
from lacuna.model.added_losses import require_no_added_loss
from lacuna.model.architecture import meta_model
from lacuna.model.fla_softmax import use_our_softmax_attention
from lacuna.model.flops import step_flops
from lacuna.model.linear_attention import bounds_choices, find_bounds, products_and_widths
from lacuna.model.pieces import compute_in_pieces
from lacuna.objective.language_modelling import (
    ChatModelling,
    cross_entropy,
    warped_cross_entropy,
)
from lacuna.parallel.mesh import Layout
from layouts import Case, Outcome, alone_loss, check_same, merge, pipelined
from runs import make_world, rows
from tiny import CPU, VOCABULARY, random_model, relative_error, run_ranks

ALONE = Case(Layout())
TWO_RANKS = {
    "dp_shard 2": Case(Layout(dp_shard=2)),
    "dp_replicate 2": Case(Layout(dp_replicate=2)),
    "pp 2": pipelined(Layout(pp=2), 4),
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a GLA with a layer of softmax attention in a window, and random weights."""
    folder = tmp_path_factory.mktemp("hybrid")
    model_config = config_of(folder, "gla", **HYBRID)
    bounds_choices("auto", model_config, "cpu", Layout())
    random_model(model_config, "eager").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(hybrid: Path) -> Outcome:
    [[outcome]] = run_ranks(1, interpreted_steps, hybrid, [ALONE])
    return outcome


def test_packed_documents_train_as_by_flas_own_code_alone(hybrid: Path, alone: Outcome) -> None:
    model = AutoModelForCausalLM.from_pretrained(hybrid, dtype=torch.float32)
    assert alone.loss == pytest.approx(alone_loss(model, alone.tokens), rel=1e-5)
    theirs = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert relative_error(alone.gradients, theirs) < 1e-5


def test_two_ranks_train_as_one(hybrid: Path, alone: Outcome) -> None:
    results = run_ranks(2, interpreted_steps, hybrid, [*TWO_RANKS.values()])
    for of_ranks in zip(*results, strict=True):
        check_same(merge(of_ranks), alone)


@pytest.mark.slow
def test_four_ranks_and_recomputation_train_as_one(hybrid: Path, alone: Outcome) -> None:
    recompute = ActivationCheckpointConfig(mode="full")
    cases = [Case(Layout(2, 2), recompute=recompute), pipelined(Layout(dp_shard=2, pp=2), 4)]
    results = run_ranks(4, interpreted_steps, hybrid, cases)
    for of_ranks in zip(*results, strict=True):
        check_same(merge(of_ranks), alone)


@pytest.mark.slow
def test_layers_that_hand_on_more_than_hidden_states_are_sharded_and_recomputed(
    tmp_path: Path,
) -> None:
    model_config = config_of(tmp_path, "rwkv7", **OWN_SIZES["rwkv7"], **ONE_HEAD)
    random_model(model_config, "eager").save_pretrained(tmp_path)
    [[alone]] = run_ranks(1, interpreted_steps, tmp_path, [ALONE])
    recompute = ActivationCheckpointConfig(mode="full")
    shared = [Case(Layout(dp_shard=2), recompute=recompute)]
    [[first], [second]] = run_ranks(2, interpreted_steps, tmp_path, shared)
    check_same(merge((first, second)), alone)


@pytest.mark.parametrize(
    "kind",
    ["transformer", "gla", "retnet", "delta_net", pytest.param("rwkv7", marks=pytest.mark.slow)],
)
def test_documents_in_a_row_are_as_they_are_alone(tmp_path: Path, kind: str) -> None:
    model_config = config_of(tmp_path, kind, **OWN_SIZES.get(kind, {}), **ONE_HEAD)
    names = bounds_choices("auto", model_config, "cpu", Layout())
    found = find_bounds(names, model_config, "packed", 64, CPU, torch.float32, Layout())
    assert found == "lacuna_bounds"


@pytest.mark.parametrize("kind", sorted(MODEL_TYPES))
def test_first_weights_are_those_that_fla_draws(tmp_path: Path, kind: str) -> None:
    """Also where constructors draw them (RWKV6, RWKV7, MoM), or outer modules do (YOCO)."""
    use_our_softmax_attention()
    assert drawn_otherwise(config_of(tmp_path, kind, **OWN_SIZES.get(kind, {}))) == []


def test_a_leak_between_documents_is_found(tmp_path: Path) -> None:
    model_config = config_of(tmp_path, "gla")
    with pytest.raises(UserError, match=r"data.document_mask: .*packing.mode = \"none\""):
        find_bounds(("lacuna_untold",), model_config, "packed", 64, CPU, torch.float32, Layout())


def test_what_these_models_cannot_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_config = config_of(tmp_path, "gla")
    for layout, setting in ((Layout(tp=2), "tensor"), (Layout(cp=2), "context")):
        with pytest.raises(UserError, match=f"parallelism.{setting}_parallel_degree"):
            bounds_choices("auto", model_config, "cpu", layout)
    with pytest.raises(UserError, match='model.attention: "sdpa"'):
        bounds_choices("sdpa", model_config, "cpu", Layout())
    with pytest.raises(UserError, match="activation_checkpoint.mlp_chunks: fla's feed-forward"):
        compute_in_pieces(meta_model(model_config, None, torch.float32), 2, 1)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="need a GPU, and this run is on the CPU"):
        bounds_choices("auto", model_config, "cpu", Layout())


def test_losses_of_flas_own_code_are_refused(tmp_path: Path) -> None:
    own = OWN_SIZES["mom"] | ONE_HEAD
    left_out = config_of(tmp_path, "mom", **own)
    bounds_choices("auto", left_out, "cpu", Layout())
    require_no_added_loss(left_out, CPU)
    asks = config_of(tmp_path, "mom", **{name: own[name] for name in own if "loss" not in name})
    with pytest.raises(UserError, match="weighted by aux_loss_scale in its"):
        require_no_added_loss(asks, CPU)


@pytest.mark.parametrize("asks", [True, False])
def test_the_penalty_is_trained_where_the_configuration_asks_for_it(
    asks: bool, tmp_path: Path
) -> None:
    own = config_of(tmp_path, "gla", use_l2warp=asks)
    objective = ChatModelling()
    objective.prepare(SimpleNamespace(model=SimpleNamespace(config=own)), list)
    assert objective.loss.of is (warped_cross_entropy if asks else cross_entropy)


def test_large_logits_are_pulled_back_as_by_fla() -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(12, 9, requires_grad=True)
    labels = torch.randint(9, (12,))
    theirs = l2_warp(F.cross_entropy(logits, labels), logits[None])
    ours = warped_cross_entropy(logits, {"labels": labels})["loss"] / 12
    plain = cross_entropy(logits, {"labels": labels})["loss"] / 12
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    found, wanted, without = (
        torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (ours, theirs, plain)
    )
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(found, without, rtol=1e-5, atol=1e-8)


def test_flops_count_the_states_and_the_windows(tmp_path: Path) -> None:
    """GLA reads and writes a state of 8 × 16 in each of two heads; softmax has its window."""
    model_config = config_of(tmp_path, "gla", **HYBRID)
    bounds_choices("auto", model_config, "cpu", Layout())
    model = meta_model(model_config, "eager", torch.float32)
    products, widths = products_and_widths(model)
    weights = sum(weight.numel() for weight in model.parameters()) - VOCABULARY * 32
    assert products == weights + 2 * 2 * 8 * 16
    assert widths == {8: 32}
    lengths = torch.tensor([100])
    assert step_flops(products, widths, 100, lengths) == 600 * products + 12 * 32 * (800 - 32)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Path]:
    folder = make_world(tmp_path / "world")
    own = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256, "num_hidden_layers": 1}
    folder_of(folder / "model", "delta_net", **own, **ONE_HEAD)
    yield folder


@pytest.mark.slow
def test_a_run_exports_a_model_that_generates_and_trains_on(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--training.steps", "2", "--training.batch_size", "1", "--checkpoint.interval", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", f"{world}/run.toml", *flags, "--job.dump_folder", str(first)]) == 0
    assert math.isfinite(rows(first)[-1]["loss"])
    capsys.readouterr()
    assert main(["generate", str(first), "--prompt", "the cat", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out
    loads = ["--model.name_or_path", f"{first}/hf", "--job.dump_folder", str(second)]
    plain = ["train", "--data.dataset", f"{world}/train.jsonl", "--training.seq_len", "32"]
    assert main([*plain, *flags, *loads]) == 0
    assert rows(second)[0]["loss"] < rows(first)[0]["loss"]
