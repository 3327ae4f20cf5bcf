"""Experts in float8: which stacks, padded groups exactly, and the same in every layout."""

import inspect
import itertools
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from test_float8 import check_near, float8
from torch import Tensor, nn
from transformers import MixtralConfig

from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig, Float8Config, ParallelismConfig
from lacuna.config.sections import TrainingConfig
from lacuna.model.architecture import meta_model
from lacuna.model.layers.float8 import (
    chosen_layers,
    chosen_stacks,
    groups_lose,
    tokens_of_experts,
)
from lacuna.model.layers.stacks import add_stack_adapters
from lacuna.model.layers.wrapping import Wrapper
from lacuna.parallel.expert_stacks import stacks_of
from lacuna.parallel.grouped_experts import (
    OWN_PRODUCT,
    _even_groups,
    install_grouped_experts,
)
from lacuna.parallel.mesh import Layout
from layouts import Case, Outcome, outcomes, pipelined
from tiny import random_model, relative_error, tiny_config

BY_ROWS = ("rowwise", "rowwise_with_gw_hp")
CPU = torch.device("cpu")


def experts_alone(kind: str) -> Any:
    """The experts of a tiny model's first mixture, with random weights."""
    # GPUs want multiples of 16, of which gpt_oss has its own.
    sizes = {} if kind == "gpt_oss" else {"moe_intermediate_size": 48}
    model = random_model(tiny_config(kind, **sizes), "eager").float()
    install_grouped_experts(model)
    experts: Any = stacks_of([model])[0]
    torch.manual_seed(0)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.2)
    return experts


def with_gradients(experts: Any, backend: str = "") -> dict[str, Tensor]:
    """Outputs of 19 tokens and all gradients; the last expert has no token."""
    generator = torch.Generator().manual_seed(1)
    down = experts.down_proj
    width = down.shape[2 if experts.is_transposed else 1]
    hidden = torch.randn(19, width, generator=generator).to(down).requires_grad_()
    scores = torch.rand(19, experts.num_experts - 1, generator=generator)
    weights, chosen = (one.to(down.device) for one in scores.topk(2))
    weights.requires_grad_()
    experts.zero_grad()
    how: Any = {"fullgraph": True, "dynamic": True, "backend": backend}
    run = torch.compile(experts, **how) if backend else experts
    outputs = run(hidden, chosen, weights)
    outputs.backward(torch.randn(outputs.shape, generator=generator).to(outputs))
    found = {name: one.grad for name, one in experts.named_parameters()}
    return {**found, "": outputs.detach(), "hidden": hidden.grad, "weights": weights.grad}


def test_groups_are_padded_to_multiples_of_16_and_no_expert_has_none() -> None:
    numbers = torch.tensor([0] * 17 + [2] * 16 + [3], dtype=torch.int32)
    places, ends, count = _even_groups(numbers, torch.tensor([17, 17, 33, 34, 34]).int())
    assert ends.tolist() == [32, 48, 64, 80, count] and count % 16 == 0 and count > 80
    assert places.tolist() == [*range(17), *range(48, 64), 64]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_padded_groups_change_nothing(kind: str) -> None:
    from transformers.integrations.moe import _grouped_linear

    experts = experts_alone(kind)
    expected = with_gradients(experts)

    def product(name: str, rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
        assert not ends.diff().remainder(16).any() and ends[-1] == len(rows)
        return _grouped_linear(rows, stack, ends, is_transposed=experts.is_transposed)

    setattr(experts, OWN_PRODUCT, product)
    assert relative_error(with_gradients(experts), expected) < 1e-6


def rounded(values: Tensor, dim: int) -> Tensor:
    """By the definition: the largest value of a row times a power of two is at most 448."""
    largest = values.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("recipe", BY_ROWS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_each_product_is_of_rounded_rows_and_columns(kind: str, recipe: str) -> None:
    pytest.importorskip("torchao")
    from lacuna.model.layers.float8_stacks import wrap_stacks

    experts = experts_alone(kind)
    wrap_stacks(experts, ["gate_up_proj"], recipe, emulate=True)
    torch.manual_seed(3)
    stack = experts.gate_up_proj
    inputs, outs = (1, 2) if experts.is_transposed else (2, 1)
    rows = torch.randn(48, stack.shape[inputs], requires_grad=True)
    ends = torch.tensor([16, 32] + [48] * (len(stack) - 2), dtype=torch.int32)
    gradient = torch.randn(48, stack.shape[outs])
    product = experts.grouped_product("gate_up_proj", rows, stack, ends)
    product.backward(gradient)
    exact = recipe == "rowwise_with_gw_hp"
    for number in range(3):
        own = slice(16 * number, 16 * number + 16)
        matrix = stack[number].detach()
        matrix = matrix if experts.is_transposed else matrix.mT  # [in, out]
        made = rounded(rows[own].detach(), 1) @ rounded(matrix, 0)
        torch.testing.assert_close(product[own].detach(), made)
        back = rounded(gradient[own], 1) @ rounded(matrix, 1).mT
        torch.testing.assert_close(rows.grad[own], back)
        pair = rows[own].detach(), gradient[own]
        left, right = pair if exact else (rounded(one, 0) for one in pair)
        found = stack.grad[number] if experts.is_transposed else stack.grad[number].mT
        torch.testing.assert_close(found, left.mT @ right)
    assert not stack.grad[3:].any()
    down = experts.down_proj
    rows = torch.randn(48, down.shape[inputs])
    matrix = down[0] if experts.is_transposed else down[0].mT
    made = experts.grouped_product("down_proj", rows, down, ends)[:16]
    torch.testing.assert_close(made, rows[:16] @ matrix)  # not named


def can_multiply_groups() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


ON_GPU = pytest.mark.skipif(not can_multiply_groups(), reason="needs a GPU of Hopper's kind")


@ON_GPU
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", BY_ROWS)
@pytest.mark.parametrize("by_inputs", [False, True])
def test_a_gpu_computes_the_emulated_values(by_inputs: bool, recipe: str, compiled: bool) -> None:
    pytest.importorskip("torchao")
    from lacuna.model.layers.float8_stacks import _How, _Product

    torch._dynamo.reset()
    torch.manual_seed(0)
    ends = torch.tensor([32, 48, 176, 192], device="cuda", dtype=torch.int32)
    shape = (4, 256, 384) if by_inputs else (4, 384, 256)
    exact = recipe == "rowwise_with_gw_hp"
    made = []
    stack = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(192, 256, device="cuda", dtype=torch.bfloat16)
    rows[32:48] = 0  # an expert of padding alone
    gradient = torch.randn(192, 384, device="cuda", dtype=torch.bfloat16)
    for emulate in (True, False):
        how = _How(by_inputs, emulate, exact)
        given = rows.clone().requires_grad_(), stack.clone().requires_grad_()
        run: Any = _Product.apply
        if compiled and not emulate:
            run = torch.compile(lambda *all_of: _Product.apply(*all_of), fullgraph=True)
        product = run(*given, ends, how)
        product.backward(gradient)
        made.append({"": product.detach(), "rows": given[0].grad, "stack": given[1].grad})
    assert not made[1]["stack"][1].any()
    for name, values in made[0].items():
        assert relative_error({"": made[1][name]}, {"": values}) < 5e-3


# torch 2.11 compiles no grouped products in float32, and lost gradients of a compiled function that
# changed its output in place.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_compiled_experts_have_the_gradients_of_the_uncompiled(kind: str, device: str) -> None:
    pytest.importorskip("torchao")
    from lacuna.model.layers.float8_stacks import wrap_stacks

    torch._dynamo.reset()
    experts = experts_alone(kind).to(device, torch.bfloat16)
    exact = with_gradients(experts)
    wrap_stacks(experts, ["gate_up_proj", "down_proj"], "rowwise", emulate=device == "cpu")
    alone = with_gradients(experts)
    assert 1e-3 < relative_error(alone, exact) < 0.1
    compiled = with_gradients(experts, "aot_eager" if device == "cpu" else "inductor")
    for name, values in alone.items():
        assert relative_error({"": compiled[name]}, {"": values}) < 2e-2


def mixtral(**sizes: Any) -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 512} | sizes
    model = meta_model(MixtralConfig(num_hidden_layers=2, **sizes), "sdpa", torch.float32)
    install_grouped_experts(model)
    return model


def test_stacks_that_gain_by_it_are_chosen() -> None:
    model = mixtral()

    def names(tokens: int, **settings: Any) -> list[list[str]]:
        wanted = float8(**({"filter_small": True} | settings))
        return [*chosen_stacks(model, wanted, tokens, CPU).values()]

    both = ["gate_up_proj", "down_proj"]
    assert names(16384) == [both, both]  # two of eight experts: 4,096 for each
    assert names(8192) == []
    assert names(64, filter_small=False) == [both, both]
    assert names(16384, filter_fqns=("layers.0", "down")) == [["gate_up_proj"]]
    assert names(16384, filter_fqns=("experts",)) == []
    assert chosen_layers(model, float8(filter_fqns=("gate_up_proj",)))
    with pytest.raises(UserError, match="'gate_down' matches no layer"):
        chosen_layers(model, float8(filter_fqns=("gate_down",)))
    assert groups_lose(1536, 2048, 1e6) and not groups_lose(14336, 4096, 4096)


def test_stacks_that_no_grouped_products_compute_are_left_out() -> None:
    wanted = float8(), 16384, CPU
    odd = mixtral(hidden_size=4104)
    assert chosen_stacks(odd, *wanted) == {}
    loops = mixtral()
    assert len(chosen_stacks(loops, *wanted)) == 2
    loops.config._experts_implementation = "eager"
    assert chosen_stacks(loops, *wanted) == {}
    dense = meta_model(tiny_config("llama"), "sdpa", torch.float32)
    assert chosen_stacks(dense, *wanted) == {}


@pytest.mark.parametrize(
    ("capability", "modules"), [((8, 9), 0), ((9, 0), 2), ((10, 0), 2), ((12, 0), 0)]
)
def test_some_gpus_have_no_grouped_products_in_float8(
    capability: tuple[int, int], modules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    chosen = chosen_stacks(mixtral(), float8(emulate=False), 16384, torch.device("cuda"))
    assert len(chosen) == modules


@pytest.mark.parametrize(
    ("layout", "pieces", "accumulation", "rows"),
    [
        (Layout(), 1, 2, 4),
        (Layout(dp_shard=2), 1, 1, 4),
        (Layout(dp_shard=2, ep=2), 1, 1, 8),
        (Layout(cp=2, ep=2), 1, 1, 4),
        (Layout(), 2, 1, 2),
        (Layout(pp=2), 1, 1, 2),  # a micro-batch for each stage
        (Layout(pp=2), 1, 8, 4),
    ],
)
def test_the_tokens_that_reach_experts_together_are_counted(
    layout: Layout, pieces: int, accumulation: int, rows: int
) -> None:
    cut = ParallelismConfig(pipeline_parallel_degree=layout.pp, pipeline_parallel_schedule="1F1B")
    first = TrainingConfig(batch_size=4, seq_len=96, gradient_accumulation_steps=accumulation)
    longer = first.model_copy(update={"batch_size": 16, "seq_len": 48})
    shorter = first.model_copy(update={"seq_len": 32})
    assert tokens_of_experts([first, longer], cut, pieces, layout) == rows * 96
    assert tokens_of_experts([first, shorter], cut, pieces, layout) == rows * 32


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    random_model(tiny_config(request.param), "eager").save_pretrained(folder)
    return folder


def only_experts(recipe: str) -> Float8Config:
    """Float8 in nothing but experts."""
    return float8(recipe, filter_fqns=("attn",))


def check_experts(outcome: Outcome, exact: Outcome) -> None:
    """The gradients of experts are near to exact ones, and are not these."""
    for name, gradient in exact.gradients.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            found = {"": outcome.gradients[name]}
            assert 1e-3 < relative_error(found, {"": gradient}) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", BY_ROWS)
def test_experts_learn_the_same_in_every_layout(model: Path, recipe: str) -> None:
    pytest.importorskip("torchao")
    again = ActivationCheckpointConfig(mode="full")
    by_operation = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
    settings = only_experts(recipe)
    exact, one, *alone = outcomes(
        model,
        [
            Case(),
            Case(float8=settings, accumulation=2),
            Case(float8=settings, accumulation=2, recompute=again),
            Case(float8=settings, accumulation=2, recompute=by_operation),
        ],
    )
    check_experts(one, exact)
    for outcome in alone:
        check_near(outcome, one)
    cut = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    layouts = [Case(Layout(1, 2)), Case(Layout(pp=2), 2, parallelism=cut)]
    if recipe == "rowwise_with_gw_hp":  # rowwise, an expert's tokens of a rank share scales
        layouts += [Case(Layout(dp_shard=2, ep=2)), Case(Layout(cp=2), 2)]
    with_experts = [Case(**{**vars(case), "float8": settings}) for case in layouts]
    for outcome in outcomes(model, with_experts):
        check_near(outcome, one)


@pytest.mark.slow
def test_experts_learn_the_same_in_copies_of_shards_zero_bubbles_and_pieces(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchao")
    random_model(tiny_config("qwen3_moe", num_hidden_layers=4), "eager").save_pretrained(tmp_path)
    settings = only_experts("rowwise_with_gw_hp")
    pieces = ActivationCheckpointConfig(mode="full", mlp_chunks=2)
    budget = ActivationCheckpointConfig(mode="memory_budget", memory_budget=0.3)
    one, *alone = outcomes(
        tmp_path,
        [
            Case(float8=settings),
            Case(float8=settings, recompute=pieces),
            Case(float8=settings, recompute=budget, compiled=True, backend="aot_eager"),
        ],
    )
    [copies] = outcomes(tmp_path, [Case(Layout(2, 2, ep=2), float8=settings)])
    zero_bubbles = pipelined(Layout(pp=2), 4, "ZBVZeroBubble")
    [staged] = outcomes(tmp_path, [replace(zero_bubbles, float8=settings)])
    for outcome in (*alone, copies, staged):
        check_near(outcome, one)


@pytest.mark.slow
def test_adapters_of_experts_learn_through_float8(model: Path) -> None:
    pytest.importorskip("torchao")
    lora = LoraConfig(rank=3, parameters=("*.experts.*",), targets=())
    settings = only_experts("rowwise_with_gw_hp")
    exact, one = outcomes(model, [Case(lora=lora), Case(lora=lora, float8=settings)])
    assert one.gradients.keys() == exact.gradients.keys()
    assert 1e-3 < relative_error(one.gradients, exact.gradients) < 0.3
    [spread] = outcomes(model, [Case(Layout(dp_shard=2, ep=2), lora=lora, float8=settings)])
    check_near(spread, one)


@pytest.mark.parametrize("adapted", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("cast", ["gate_up_proj", "down_proj"])
def test_adapters_do_not_decide_which_stacks_are_cast(adapted: str, cast: str) -> None:
    pytest.importorskip("torchao")
    from lacuna.model.layers.float8_stacks import wrap_stacks

    experts = experts_alone("qwen3_moe")
    wrap_stacks(experts, [cast], "rowwise", emulate=True)
    alone = with_gradients(experts)
    add_stack_adapters(experts, [f".{adapted}"], 2, 1.0, torch.float32)
    for name, weight in experts.named_parameters():
        if name.endswith("lora_B"):
            nn.init.zeros_(weight)  # which changes nothing
        elif name.endswith("lora_A"):
            nn.init.normal_(weight)
    assert torch.equal(with_gradients(experts)[""], alone[""])


def test_no_two_wrappers_keep_different_things_under_one_name() -> None:
    pytest.importorskip("torchao")
    for name in (
        "casting",
        "dora",
        "float8_product",
        "float8_stacks",
        "quantized",
        "quantized_stacks",
    ):
        import_module(f"lacuna.model.layers.{name}")
    kinds: list[type[Wrapper]] = [Wrapper]
    for kind in kinds:
        kinds += kind.__subclasses__()
    own = [(name, kind) for kind in kinds for name in inspect.get_annotations(kind)]
    assert ("in_float8", "Float8Stacks") in [(name, kind.__name__) for name, kind in own]
    parameters = {"weight", "bias", "lora_A", "lora_B"}  # which are the modules'
    for (name, kind), (other_name, other) in itertools.combinations(own, 2):
        is_related = issubclass(kind, other) or issubclass(other, kind)
        # No two of one place go around one module (`wrap`).
        is_apart = kind.__dict__.get("place", 0) == other.__dict__.get("place", 1)
        allowed = is_related or is_apart or name in parameters
        assert name != other_name or allowed, (name, kind, other)
