"""Recomputing activations saves memory and changes no gradient."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # registers its operation
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PreTrainedModel

from every_model import NO_SPECIMEN, configuration_class, model_types, small_config
from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model import merged_attention  # noqa: F401, which defines an operation
from lacuna.model.architecture import decoder_layers
from lacuna.model.layers.lora import add_adapters, initialize_adapters
from lacuna.parallel.grouped_experts import install_grouped_experts
from lacuna.parallel.kept_operations import KEPT, PRODUCTS, _saving_policy
from lacuna.parallel.mesh import Layout
from lacuna.parallel.recompute import recompute
from layouts import Case, check_same, outcomes, pipelined
from tiny import random_model, tiny_config

OFFLOADED = ActivationCheckpointConfig(mode="full", offload=True)
FULL = ActivationCheckpointConfig(mode="full")
EVERY_SECOND = ActivationCheckpointConfig(mode="selective", selective_ac_option="2")
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
ALL_PRODUCTS = ActivationCheckpointConfig(mode="selective", selective_ac_option="products")
HALF_OF_EVERY_THIRD = ActivationCheckpointConfig(mode="selective", selective_ac_option="op/3")
PRODUCTS_MOVED = ALL_PRODUCTS.model_copy(update={"offload": True, "offload_share": 0.6})
BUDGET = ActivationCheckpointConfig(mode="memory_budget", memory_budget=0.2)


@pytest.fixture(scope="module", params=["llama_tied", "gpt2"])
def model_config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    dropout = {"resid_pdrop": 0.1} if request.param == "gpt2" else {}
    tiny_config(request.param, **dropout).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "adapters",
    [LoraConfig(rank=3), pytest.param(LoraConfig(), marks=pytest.mark.slow)],
    ids=["adapters", "whole"],
)
def test_a_recomputed_step_is_the_same_step(model_config: Path, adapters: LoraConfig) -> None:
    modes = (
        *(ActivationCheckpointConfig(), FULL, EVERY_SECOND),
        *(BY_OPERATION, ALL_PRODUCTS, HALF_OF_EVERY_THIRD),
    )
    modes += (OFFLOADED,)
    plain, *recomputed = outcomes(
        model_config, [Case(Layout(1, 2), 2, recompute=mode, lora=adapters) for mode in modes]
    )
    for outcome in recomputed:
        check_same(outcome, plain)


@pytest.mark.slow
def test_a_recomputed_compiled_step_is_the_same_step(model_config: Path) -> None:
    modes = [EVERY_SECOND, BY_OPERATION, OFFLOADED, PRODUCTS_MOVED]
    if "resid_pdrop" not in (model_config / "config.json").read_text():
        # Which are not for models with dropout, as the other one.
        modes += [BUDGET, BUDGET.model_copy(update={"offload": True, "offload_share": 0.6})]
    into_code = Case(Layout(), 2, compiled=True)
    traced = replace(into_code, backend="aot_eager")
    for compiled, some in ((into_code, [FULL]), (traced, modes)):
        cases = [compiled, *(replace(compiled, recompute=mode) for mode in some)]
        plain, *recomputed = outcomes(model_config, cases)
        for outcome in recomputed:
            check_same(outcome, plain)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)])
def test_activations_in_cpu_memory_change_no_step_of_any_layout(
    layout: Layout, tmp_path: Path
) -> None:
    tiny_config("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    case = pipelined(layout, 4) if layout.pp > 1 else Case(layout, 2)
    cases = [
        replace(case, recompute=settings, compiled=True, backend="aot_eager")
        for settings in (PRODUCTS_MOVED, ALL_PRODUCTS)
    ]
    moved, plain = outcomes(tmp_path, cases)
    check_same(moved, plain)


def model_that_draws(how: str) -> PreTrainedModel:
    if how == "adapters":
        model = random_model(tiny_config("llama"))
        add_adapters(model, LoraConfig(rank=2, dropout=0.1), torch.float32)
        return model
    if how.endswith("pdrop"):
        return random_model(tiny_config("gpt2", **{how: 0.1}))
    return random_model(small_config(configuration_class(how)))


@pytest.mark.parametrize("how", ["resid_pdrop", "attn_pdrop", "adapters", "phimoe"])
def test_a_memory_budget_is_refused_beside_draws(how: str) -> None:
    with pytest.raises(UserError, match="memory_budget torch would compute dropout again"):
        recompute(decoder_layers(model_that_draws(how)), BUDGET)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "settings"), [(0, BY_OPERATION), (2, ALL_PRODUCTS)])
def test_every_architecture_has_the_same_gradients_where_operations_are_kept(
    rank: int, settings: ActivationCheckpointConfig
) -> None:
    differing = {}
    tried = 0
    for kind in sorted({*model_types()} - NO_SPECIMEN):
        model_config = small_config(configuration_class(kind))
        model_config.use_cache = False
        model = random_model(model_config, attention="eager").eval()
        if rank:
            add_random_adapters(model, rank)
        install_grouped_experts(model)  # transformers' own change what is kept, if there are biases
        plain = gradients(model)
        if isinstance(plain, str):  # transformers' own code does not train it here
            continue
        tried += 1
        recompute(decoder_layers(model), settings)
        kept = gradients(model)
        if isinstance(kept, str):
            differing[kind] = kept
        elif any(not torch.allclose(kept[n], plain[n], rtol=1e-4, atol=1e-6) for n in plain):
            differing[kind] = "other gradients"
    assert differing == {} and tried > 50


def gradients(model: nn.Module) -> dict[str, Tensor] | str:
    """The gradients of some loss, or what stands against them."""
    model.zero_grad()
    try:
        output: Any = model(input_ids=torch.arange(2, 48).view(2, 23) % 40, use_cache=False)
        output.logits.square().mean().backward()
    except Exception as fault:
        return repr(fault)
    return {n: one.grad for n, one in model.named_parameters() if one.grad is not None}


def llama_with_adapters(rank: int) -> PreTrainedModel:
    """A Llama of four layers that trains, all of it or, with a rank, adapters alone."""
    model = random_model(tiny_config("llama", num_hidden_layers=4)).train()
    if rank:
        add_random_adapters(model, rank)
    return model


def add_random_adapters(model: PreTrainedModel, rank: int) -> None:
    """Gives a model adapters that change something, in place, and freezes all else."""
    add_adapters(model, LoraConfig(rank=rank), torch.float32)
    initialize_adapters(model, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)


def saved_bytes(settings: ActivationCheckpointConfig, rank: int = 0, compiled: bool = False) -> int:
    """What a forward pass keeps for the backward pass, weights apart."""
    model = llama_with_adapters(rank)
    recompute(decoder_layers(model), settings)
    if compiled:
        for layer in decoder_layers(model):
            layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output: Any = model(input_ids=torch.arange(32)[None] % 60, use_cache=False)
    output.logits.sum().backward()
    return sum(kept.values())


def test_what_is_recomputed_is_not_kept() -> None:
    none, full, half = (
        saved_bytes(mode) for mode in (ActivationCheckpointConfig(), FULL, EVERY_SECOND)
    )
    assert full < half < none
    assert full < none / 3


class CountingWideProducts(TorchDispatchMode):
    """Counts the products that are computed whose factors have no dimension of less than 8."""

    count = 0

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        if operation.name() in PRODUCTS:
            self.count += min(size for factor in given[-2:] for size in factor.shape) >= 8
        return operation(*given, **(named or {}))


def wide_products(settings: ActivationCheckpointConfig | None, rank: int) -> int:
    """How many products of weights a forward and a backward pass compute."""
    model = llama_with_adapters(rank)
    if settings is not None:
        recompute(decoder_layers(model), settings)
    with CountingWideProducts() as counting:
        output: Any = model(input_ids=torch.arange(32)[None] % 60, use_cache=False)
        output.logits.sum().backward()
    return counting.count


def test_op_with_a_number_computes_products_of_every_nth_layer_again() -> None:
    counts = {
        option: wide_products(
            ActivationCheckpointConfig(mode="selective", selective_ac_option=option), 0
        )
        for option in ("products", "op", "op/1", "op/2", "op/4", "op/5")
    }
    of_four_layers = counts["op"] - counts["products"]
    assert of_four_layers > 0
    assert counts["op/1"] == counts["op"]
    assert counts["op/2"] - counts["products"] == of_four_layers / 2
    assert counts["op/4"] - counts["products"] == of_four_layers / 4
    assert counts["op/5"] == counts["products"], "there is no fifth layer"


class CountingGroupedProducts(TorchDispatchMode):
    """Counts the grouped products that are computed."""

    count = 0

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        self.count += operation.name().startswith("aten::_grouped_mm")
        return operation(*given, **(named or {}))


def test_the_first_of_two_grouped_products_is_kept_in_float8_too() -> None:
    policy = _saving_policy(True, False)
    names = ["aten::_scaled_grouped_mm"] * 2 + ["aten::_scaled_mm"] * 2 + ["aten::_grouped_mm"]
    context = SimpleNamespace(is_recompute=False)
    factors = torch.empty(6, 8), torch.empty(8, 8)
    found = [policy(context, SimpleNamespace(name=partial(str, one)), *factors) for one in names]
    kept = [one == CheckpointPolicy.MUST_SAVE for one in found]
    assert kept == [True, False, True, False, True]


def test_all_products_are_kept_but_those_of_experts() -> None:
    policy = _saving_policy(True)
    half = _saving_policy(True, False)
    context = SimpleNamespace(is_recompute=False)
    product = SimpleNamespace(name=lambda: "aten::mm")
    factors = torch.empty(6, 8), torch.empty(8, 8)
    kept = [policy(context, product, *factors) == CheckpointPolicy.MUST_SAVE for _ in range(3)]
    assert kept == [True, True, True]
    kept = [half(context, product, *factors) == CheckpointPolicy.MUST_SAVE for _ in range(3)]
    assert kept == [True, False, True]
    of_experts = SimpleNamespace(name=lambda: "aten::_grouped_mm")
    factors = torch.empty(6, 8), torch.empty(2, 8, 8)
    kept = [policy(context, of_experts, *factors) == CheckpointPolicy.MUST_SAVE for _ in range(3)]
    assert kept == [True, False, True]


@pytest.mark.parametrize("settings", [ALL_PRODUCTS, BY_OPERATION], ids=["products", "op"])
def test_adapters_change_nothing_of_what_is_kept_but_for_their_narrow_results(
    settings: ActivationCheckpointConfig,
) -> None:
    plain, adapted = (saved_bytes(settings, rank, compiled=True) for rank in (0, 2))
    tokens, layers = 32, 4
    narrow = tokens * layers * 7 * 2 * 4  # seven adapters of rank 2 in float32
    assert adapted <= plain + narrow
    computed = [wide_products(mode, rank) for rank in (0, 2) for mode in (None, settings)]
    assert computed[1] - computed[0] == computed[3] - computed[2]
    assert settings != ALL_PRODUCTS or computed[3] == computed[2]


def grouped_products(settings: ActivationCheckpointConfig) -> int:
    """How many products of experts a forward and a backward pass compute."""
    model = random_model(tiny_config("qwen3_moe")).bfloat16().train()
    install_grouped_experts(model)
    recompute(decoder_layers(model), settings)
    with CountingGroupedProducts() as counting:
        output: Any = model(input_ids=torch.arange(32)[None] % 60, use_cache=False)
        output.logits.sum().backward()
    return counting.count


def test_no_product_of_experts_is_computed_again_by_operation() -> None:
    none = grouped_products(ActivationCheckpointConfig())
    assert none > 0
    assert grouped_products(BY_OPERATION) == none < grouped_products(FULL)


def test_operations_whose_results_are_kept_are_those_of_torch_and_of_our_attentions() -> None:
    known = torch._C._dispatch_get_all_op_names()
    assert {*PRODUCTS} <= {*known}
    assert [name for name in KEPT if not any(each.startswith(name) for each in known)] == []
