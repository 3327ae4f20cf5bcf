"""A load-balancing loss that is asked for is trained as transformers trains it, or refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    Qwen3MoeForCausalLM,
    __version__,
)

from every_model import configuration_class, small_config
from lacuna.config import Config, UserError
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.data import Batch
from lacuna.model.architecture import load_model_config
from lacuna.model.build import build_model
from lacuna.model.checks import required_router
from lacuna.model.router import Router
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.train.step import accumulate_gradients, sums_of, total_counts
from layouts import (
    LENGTH,
    Case,
    Outcome,
    check_same,
    configuration,
    micro_batch,
    outcomes,
    pipelined,
    relative_error,
)
from tiny import CPU, random_model, run_ranks, tiny_config, tokenizer_of_words

KINDS = (
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "granitemoe",
    "jetmoe",
    "minimax_m2",
    "phimoe",
    "ernie4_5_moe",
)
COEFFICIENT = 0.5
SLOW = {name: pytest.mark.slow for name in ("recomputed", "some kept", "in pieces")}


def saved(kind: str, folder: Path) -> Path:
    own = small_config(configuration_class(kind), output_router_logits=True)
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(own, name):
            setattr(own, name, COEFFICIENT)
    random_model(own, "eager").save_pretrained(folder)
    return folder


def whole_rows(padded: bool) -> Batch:
    """Two rows of one document each; if `padded`, the last quarter of the second is padding."""
    batch = micro_batch(slice(0, 2))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    real = positions < torch.tensor([[LENGTH], [LENGTH * 3 // 4 if padded else LENGTH]])
    labels = batch.columns["input_ids"].roll(-1, dims=1).masked_fill(~real.roll(-1, dims=1), -100)
    labels[:, -1] = -100
    bounds = torch.tensor(
        [0, LENGTH, *([LENGTH + LENGTH * 3 // 4] if padded else []), 2 * LENGTH], dtype=torch.int32
    )
    trained = int((labels != -100).sum())
    columns = batch.columns | {"labels": labels, "position_ids": positions, "real": real}
    counts = batch.counts | {"trained_tokens": trained}
    return Batch(columns, counts, bounds, LENGTH)


def ours(folder: str, padded: bool) -> tuple[float, dict[str, Tensor]]:
    config = Config(model=ModelConfig(name_or_path=folder), training=TrainingConfig(seq_len=LENGTH))
    built = build_model(config, tokenizer_of_words(), build_mesh(Layout(), "cpu"), CPU)
    built.model.eval()  # some shake their routers while they train
    batch = whole_rows(padded)
    trained = total_counts(built, [batch])["trained_tokens"]
    loss = accumulate_gradients(built, [batch], LanguageModelling.loss, trained)[0] / trained
    return loss.item(), {
        name: one.grad for name, one in built.model.named_parameters() if one.grad is not None
    }


def held_out_and_trained(folder: str) -> list[float]:
    """The loss of held-out data before and after a step, and that of the step."""
    mesh = build_mesh(Layout(), "cpu")
    built = build_model(configuration(Path(folder), Case()), tokenizer_of_words(), mesh, CPU)
    batch = whole_rows(padded=True)
    trained = total_counts(built, [batch])["trained_tokens"]
    with torch.no_grad():
        before = sums_of(built, batch, LanguageModelling.held_out_loss)[0]
    step = accumulate_gradients(built, [batch], LanguageModelling.loss, trained)[0]
    with torch.no_grad():
        after = sums_of(built, batch, LanguageModelling.held_out_loss)[0]
    return [(each / trained).item() for each in (before, step, after)]


def test_held_out_data_has_no_such_loss(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    model, batch = AutoModelForCausalLM.from_pretrained(tmp_path), whole_rows(padded=True)
    labels = batch.columns["input_ids"].masked_fill(~batch.columns["real"], -100)
    mask = batch.columns["real"].long()
    own = model(
        input_ids=batch.columns["input_ids"],
        labels=labels,
        attention_mask=mask,
        output_router_logits=False,
    ).loss.item()
    [(before, step, after)] = run_ranks(1, held_out_and_trained, str(tmp_path))
    assert before == after == pytest.approx(own, rel=1e-5)
    assert step > own + 0.1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_total_is_that_of_transformers(kind: str, padded: bool, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    model, batch = (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"),
        whole_rows(padded),
    )
    labels = batch.columns["input_ids"].masked_fill(~batch.columns["real"], -100)
    mask = batch.columns["real"].long() if padded else None
    total = model(
        input_ids=batch.columns["input_ids"], labels=labels, attention_mask=mask, use_cache=False
    ).loss
    total.backward()
    [(loss, gradients)] = run_ranks(1, ours, str(tmp_path), padded)
    assert loss == pytest.approx(total.item(), rel=1e-5)
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert relative_error(gradients, expected) < 1e-5


@pytest.mark.slow
def test_ranks_that_share_a_step_share_its_load(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    [alone, *accumulated] = outcomes(tmp_path, [Case(), Case(accumulation=2), Case(accumulation=8)])
    ring = {"context_parallel_rotate_method": "alltoall"}
    layouts = [
        Case(Layout(dp_shard=2)),
        Case(Layout(dp_replicate=2)),
        Case(Layout(dp_shard=2), 2),
        Case(Layout(dp_shard=2), 4, zero_stage=1),
        Case(Layout(dp_shard=2), 2, recompute=ActivationCheckpointConfig(mode="full")),
        Case(Layout(cp=2, ring=True), parallelism=ring),
    ]
    for each in (*accumulated, *outcomes(tmp_path, layouts)):
        assert each.loss == pytest.approx(alone.loss, rel=1e-6)
        assert relative_error(each.gradients, alone.gradients) < 1e-5


FULL = ActivationCheckpointConfig(mode="full")
KEPT = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
PIECES = ActivationCheckpointConfig(mlp_chunks=3)
PIECES_TWICE = ActivationCheckpointConfig(mode="full", mlp_chunks=5)
TRACED = Case(compiled=True, backend="aot_eager", padded=True)
COMPILED = {
    "compiled": Case(compiled=True, padded=True),
    "recomputed": replace(TRACED, layout=Layout(dp_shard=2), accumulation=2, recompute=FULL),
    "some kept": replace(TRACED, recompute=KEPT),
    "in pieces": replace(TRACED, recompute=PIECES),
}


def four_layers(folder: Path, **changes: object) -> Outcome:
    """Writes a model whose loss is half that of balance; its step in one process."""
    asking = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    model_config = tiny_config("qwen3_moe", num_hidden_layers=4, **asking, **changes)
    random_model(model_config, "eager").save_pretrained(folder)
    [alone] = outcomes(folder, [Case(padded=True)])
    return alone


def check_all(folder: Path, cases: Sequence[Case], alone: Outcome) -> None:
    for each in outcomes(folder, [*cases]):
        assert each.gradients.keys() == alone.gradients.keys()
        check_same(each, alone)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a model with four mixtures, and its step in one process."""
    folder = tmp_path_factory.mktemp("four")
    return folder, four_layers(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in COMPILED])
def test_compiled_layers_learn_the_same(name: str, four: tuple[Path, Outcome]) -> None:
    folder, alone = four
    check_all(folder, [COMPILED[name]], alone)


def test_layers_that_are_computed_again_or_in_pieces_learn_the_same(
    four: tuple[Path, Outcome],
) -> None:
    folder, alone = four
    again = (FULL, KEPT, PIECES, PIECES_TWICE)
    cases = [Case(padded=True, recompute=each) for each in again]
    check_all(folder, [*cases, Case(accumulation=2, padded=True, recompute=PIECES)], alone)


def staged(schedule: str, **changes: Any) -> Case:
    return replace(pipelined(Layout(pp=2), 4, schedule), padded=True, **changes)


@pytest.mark.slow
def test_stages_of_a_pipeline_learn_the_same(four: tuple[Path, Outcome]) -> None:
    """With GPipe all forward passes come before the first backward pass, which computes again."""
    folder, alone = four
    schedules = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    again = [staged("GPipe", recompute=each) for each in (FULL, PIECES, PIECES_TWICE)]
    check_all(folder, [*map(staged, schedules), *again], alone)


@pytest.mark.slow
def test_a_stage_without_routers_counts_nothing(tmp_path: Path) -> None:
    alone = four_layers(tmp_path, mlp_only_layers=[0, 1])
    check_all(tmp_path, [staged("1F1B")], alone)


@pytest.mark.slow
def test_pipelines_of_four_ranks_learn_the_same(four: tuple[Path, Outcome]) -> None:
    folder, alone = four
    layouts = (
        Layout(dp_shard=2, pp=2),
        Layout(dp_shard=2, pp=2, ep=2),
        Layout(tp=2, pp=2),
        Layout(cp=2, pp=2),
    )
    check_all(folder, [replace(pipelined(one, 4), padded=True) for one in layouts], alone)


def asked(folder: Path, **settings: object) -> Router | None:
    model = ModelConfig(name_or_path=str(folder), **settings)
    return router_of(load_model_config(model, tokenizer_of_words()), model)


def router_of(model_config: PretrainedConfig, settings: ModelConfig | None = None) -> Router | None:
    return required_router("pretrain", settings or ModelConfig(), model_config, CPU)


def test_settings_ask_for_it_or_leave_it_out(tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "asks")
    random_model(tiny_config("qwen3_moe")).save_pretrained(tmp_path / "asks_not")
    assert asked(tmp_path / "asks").coefficient == COEFFICIENT
    assert asked(tmp_path / "asks", output_router_logits=False) is None
    assert asked(tmp_path / "asks_not") is None
    assert asked(tmp_path / "asks_not", output_router_logits=True).coefficient == 0.001
    assert (
        asked(
            tmp_path / "asks_not", output_router_logits=True, router_aux_loss_coef=0.1
        ).coefficient
        == 0.1
    )


def test_experts_are_counted_in_the_model_and_not_in_the_small_one_that_is_tried() -> None:
    own = small_config(configuration_class("qwen3_moe"), output_router_logits=True)
    own.num_experts = 64
    router = router_of(own)
    assert router is not None
    assert router.experts == 64


def test_a_model_without_routers_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    random_model(tiny_config("llama")).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"model\.output_router_logits: 'llama' models have no load-balancing loss"
    ):
        asked(tmp_path, output_router_logits=True)
    with pytest.raises(UserError, match=r"model\.router_aux_loss_coef: 'llama' models"):
        asked(tmp_path, router_aux_loss_coef=0.1)


OLD = pytest.mark.skipif(__version__ < "5.18", reason="its code fails without experts there")


@pytest.mark.parametrize("kind", ["llama4_text", pytest.param("doge", marks=OLD)])
def test_a_class_that_trains_no_such_loss_gets_none_and_cannot_be_asked_for_it(kind: str) -> None:
    """Llama 4 has the settings, and its code does not use them; Doge has experts if told so."""
    own = small_config(configuration_class(kind), output_router_logits=True)
    assert router_of(own) is None
    for setting, value in {"output_router_logits": True, "router_aux_loss_coef": 0.5}.items():
        with pytest.raises(UserError, match=rf"model\.{setting}: '{kind}' models have no load-bal"):
            router_of(own, ModelConfig(**{setting: value}))


def test_a_loss_that_transformers_own_code_cannot_make_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Granite-MoE's code in transformers 5.17 takes an empty list of logits for a tensor."""
    own = tiny_config("qwen3_moe", output_router_logits=True)

    def fails(*_: object, **__: object) -> None:
        raise AttributeError("'int' object has no attribute 'to'")

    monkeypatch.setattr(Qwen3MoeForCausalLM, "forward", fails)
    with pytest.raises(UserError, match="does not train by transformers' own code"):
        router_of(own)
