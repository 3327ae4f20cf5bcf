"""Products in float8: in which layers, near to exact ones, and the same in every layout."""

from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.documents import CurriculumConfig, CurriculumStage
from lacuna.config.machine import ActivationCheckpointConfig, Float8Config
from lacuna.config.sections import TrainingConfig
from lacuna.model.architecture import meta_model
from lacuna.model.build import build_meta_model
from lacuna.model.layers.float8 import (
    check_float8,
    chosen_layers,
    has_uneven_products,
    loses,
)
from lacuna.parallel.mesh import Layout
from layouts import Case, Outcome, configuration, outcomes, steps
from runs import curve, make_world, stop_after, train, weights
from tiny import (
    random_model,
    relative_error,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
GATHER = {"enable_fsdp_float8_all_gather": True}
AHEAD = GATHER | {"precompute_float8_dynamic_scale_for_fsdp": True}


def float8(recipe: str = "tensorwise", **settings: Any) -> Float8Config:
    """Emulated, in layers of any size."""
    emulated: dict[str, Any] = {"filter_small": False, "emulate": True, **settings}
    return Float8Config(enable_float8_linear=True, recipe_name=recipe, **emulated)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float8")
    random_model(tiny_config("llama_tied", num_hidden_layers=4)).save_pretrained(folder)
    return folder


def check_near(outcome: Outcome, other: Outcome, error: float = 1e-5) -> None:
    assert outcome.loss == pytest.approx(other.loss, rel=error)
    assert outcome.norm == pytest.approx(other.norm, rel=error)
    assert relative_error(outcome.gradients, other.gradients) < error
    assert relative_error(outcome.updated, other.updated) < error


def test_layers_that_lose_by_it_are_left_out_and_so_is_the_head() -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 4096}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1}
    llama = meta_model(LlamaConfig(**sizes, **heads), "sdpa", torch.float32)

    def ends(**settings: Any) -> set[str]:
        chosen = chosen_layers(llama, float8(**({"filter_small": True} | settings)))
        return {name.rpartition(".")[2] for name in chosen}

    assert ends() == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert ends(recipe="rowwise") == {"gate_proj", "up_proj"}
    assert ends(filter_fqns=("attn", "up*")) == {"gate_proj", "down_proj"}
    assert ends(filter_small=False) >= {"k_proj", "v_proj"}
    assert "lm_head" not in ends(filter_small=False)
    # Names of what is left out anyway; torchtitan's examples have its own for the head.
    assert ends(filter_fqns=("lm_head", "output", "embed_tokens")) == ends()
    with pytest.raises(UserError, match="'atn' matches no layer"):
        ends(filter_fqns=("atn",))


def test_sizes_that_are_no_multiples_of_16_are_left_out() -> None:
    odd = meta_model(tiny_config("llama", intermediate_size=56), "sdpa", torch.float32)
    assert {name.split(".")[-2] for name in chosen_layers(odd, float8())} == {"self_attn"}


def test_stacks_of_experts_are_no_linear_layers() -> None:
    mixed = meta_model(tiny_config("qwen3_moe"), "sdpa", torch.float32)
    assert {name.split(".")[-2] for name in chosen_layers(mixed, float8())} == {"self_attn"}


@pytest.mark.parametrize(
    ("lengths", "pieces", "cp", "packing", "wanted"),
    [
        ([48], 1, 1, "auto", False),
        ([40], 1, 1, "auto", True),
        ([96], 1, 2, "auto", False),
        ([96], 1, 4, "auto", True),
        ([256], 8, 1, "auto", False),
        ([192], 8, 1, "auto", True),  # 24 tokens a piece
        ([256], 8, 2, "auto", False),
        ([128], 1, 1, "none", False),
        ([128], 8, 1, "auto", False),
        ([128], 8, 1, "none", True),  # rows may have 64 tokens
        ([64, 96], 1, 1, "auto", False),
        ([64, 72], 1, 1, "auto", True),  # in a later stage of the curriculum
    ],
)
def test_products_are_padded_where_some_have_no_multiple_of_16_tokens(
    lengths: list[int], pieces: int, cp: int, packing: str, wanted: bool
) -> None:
    cut = {"context_parallel_degree": cp}
    form = Config(packing={"mode": packing}, parallelism=cut).row_form
    stages = [TrainingConfig(seq_len=length) for length in lengths]
    assert has_uneven_products(stages, form, pieces, cp) == wanted


@pytest.mark.parametrize(("length", "pads"), [(96, False), (72, True)])
def test_products_of_every_stage_of_a_curriculum_count(
    model: Path, length: int, pads: bool
) -> None:
    pytest.importorskip("torchao")
    config = configuration(model, Case(float8=float8()))
    training = config.training.model_copy(update={"seq_len": 64, "global_batch_size": 4})
    curriculum = CurriculumConfig(stages=(CurriculumStage(from_step=5, seq_len=length),))
    config = config.model_copy(update={"training": training, "curriculum": curriculum})
    built = build_meta_model(config, tokenizer_of_words(), Layout(), "cpu")
    recipes = [one.recipe for one in built.modules() if hasattr(one, "recipe")]
    assert recipes and all(recipe.pad_inner_dim == pads for recipe in recipes)


def test_small_products_lose_more_by_rows_than_by_tensors() -> None:
    assert not loses(2048, 2048, "tensorwise") and loses(2048, 2048, "rowwise")
    assert not loses(8192, 2048, "rowwise") and loses(1024, 4096, "tensorwise")


def test_a_cpu_computes_it_only_emulated() -> None:
    with pytest.raises(UserError, match=r"float8 needs a GPU.*float8\.emulate"):
        check_float8(float8(emulate=False), TrainingConfig(), torch.device("cpu"))
    check_float8(float8(), TrainingConfig(), torch.device("cpu"))


def test_a_gpu_must_be_able_to(monkeypatch: pytest.MonkeyPatch) -> None:
    real = float8(emulate=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(UserError, match=r"compute capability 8\.6, and float8 products need 8\.9"):
        check_float8(real, TrainingConfig(), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_float8(real, TrainingConfig(), torch.device("cuda"))
    exact = TrainingConfig(mixed_precision_param="float32")
    with pytest.raises(UserError, match="mixed_precision_param"):
        check_float8(real, exact, torch.device("cuda"))


def test_without_torchao_it_is_said_how_to_get_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lacuna.model.layers.float8.find_spec", lambda _: None)
    config = configuration(model, Case(float8=float8()))
    with pytest.raises(UserError, match=r"pip install -e '.\[float8\]'"):
        build_meta_model(config, tokenizer_of_words(), Layout(), "cpu")


def test_a_model_without_a_layer_that_gains_is_refused(model: Path) -> None:
    pytest.importorskip("torchao")
    config = configuration(model, Case(float8=float8(filter_small=True)))
    with pytest.raises(UserError, match="no linear layer of the model would gain"):
        build_meta_model(config, tokenizer_of_words(), Layout(), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_near_to_exact_products_and_the_same_in_every_layout(
    model: Path, recipe: str
) -> None:
    pytest.importorskip("torchao")
    again = ActivationCheckpointConfig(mode="full")
    by_operation = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
    exact, one, *alone = outcomes(
        model,
        [
            Case(),
            Case(float8=float8(recipe), accumulation=2),
            Case(float8=float8(recipe), accumulation=2, recompute=again),
            Case(float8=float8(recipe), accumulation=2, recompute=by_operation),
        ],
    )
    assert 1e-3 < relative_error(one.gradients, exact.gradients) < 0.25
    assert one.loss == pytest.approx(exact.loss, rel=1e-2)
    for outcome in alone:
        check_near(outcome, one)
    # Each rank has the micro-batches of one rank, since they share scales.
    ways: list[dict[str, Any]] = [{}] if recipe != "tensorwise" else [{}, GATHER, AHEAD]
    sharded = [Case(Layout(1, 2), float8=float8(recipe, **way)) for way in ways]
    sharded += [Case(Layout(2, 1), float8=float8(recipe, **ways[-1]))]
    for schedule in ("1F1B", "InterleavedZeroBubble"):
        cut = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
        sharded += [Case(Layout(pp=2), 2, parallelism=cut, float8=float8(recipe))]
    if recipe != "tensorwise":  # whose scale is of all tokens of a rank
        sharded += [Case(Layout(cp=2), 2, float8=float8(recipe))]
    for outcome in outcomes(model, sharded):
        check_near(outcome, one)


@pytest.mark.slow
def test_adapters_learn_beside_frozen_float8_layers(model: Path) -> None:
    pytest.importorskip("torchao")
    lora = LoraConfig(rank=3)
    exact, one = outcomes(
        model, [Case(lora=lora), Case(lora=lora, float8=float8(), accumulation=2)]
    )
    assert one.gradients.keys() == exact.gradients.keys()
    assert 1e-3 < relative_error(one.gradients, exact.gradients) < 0.25
    for outcome in outcomes(model, [Case(Layout(1, 2), lora=lora, float8=float8(**AHEAD))]):
        check_near(outcome, one)


def quickly_compiled(model: Path, cases: list[Case]) -> list[Outcome]:
    """The graph is the same whoever makes code of it, which takes long."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")
    return steps(model, cases)


@pytest.mark.slow
def test_layers_compile_as_one_graph(model: Path) -> None:
    pytest.importorskip("torchao")
    cases = [Case(float8=float8(), compiled=compiled) for compiled in (False, True)]
    [[one, compiled]] = run_ranks(1, quickly_compiled, model, cases)
    check_near(compiled, one)


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit_and_its_export_is_a_plain_model(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    world = make_world(tmp_path / "world")
    settings = ("--float8.enable_float8_linear", "--float8.emulate", "--float8.filter_small=false")
    settings += ("--cpus", "2", "--training.batch_size", "2")
    settings += ("--float8.enable_fsdp_float8_all_gather",)
    settings += ("--float8.precompute_float8_dynamic_scale_for_fsdp",)
    train(world, tmp_path / "whole", *settings)
    stop_after(2, world, tmp_path / "parts", *settings)
    train(world, tmp_path / "parts", *settings)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "hf")
    assert {type(one).__name__ for one in opened.modules()} >= {"Linear", "LlamaRMSNorm"}
    # In another layout, and without float8: names and dtypes are the same.
    stop_after(2, world, tmp_path / "other", *settings)
    train(world, tmp_path / "other")
    assert len(curve(tmp_path / "other")) == len(curve(tmp_path / "whole"))
