"""Layers that take the same input make one product for the time of a rollout, and no other text."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from transformers import PreTrainedModel, Qwen2Config

from lacuna.config.adapters import LoraConfig
from lacuna.model.architecture import decoder_layers
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.lora import add_adapters
from lacuna.rollout import generate
from lacuna.rollout.drawing import Asked, Completion, Drawing
from lacuna.rollout.engine import complete_in_pages
from lacuna.rollout.gathered import cast_once
from lacuna.rollout.generate import complete, generating
from lacuna.rollout.joined import joined, of_one_input
from tiny import CPU, VOCABULARY, compiled_by, random_model, tiny_config

ASKED = [Asked([5, 6, 7, 8 + row], [row, 9 * row + 1], 9) for row in range(4)]
ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
FEED_FORWARD = ["mlp.gate_proj", "mlp.up_proj"]
EXPERT = ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]
# What a layer of each kind joins.
JOINED = {
    "llama": [ATTENTION, FEED_FORWARD],
    "qwen2": [ATTENTION, FEED_FORWARD],
    "qwen3": [ATTENTION, FEED_FORWARD],
    "gemma3": [ATTENTION, FEED_FORWARD],
    "gpt2": [],
    "phi": [[*ATTENTION, "mlp.fc1"]],
    "cohere": [[*ATTENTION, *FEED_FORWARD]],
    "qwen3_moe": [ATTENTION],
    "qwen2_moe": [ATTENTION, EXPERT],
}
PRECISIONS = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


def casting_model(
    architecture: str, stored: torch.dtype = torch.float32, computed: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """A model whose weights are cast whenever they are used."""
    if architecture == "qwen2":  # as Llama, with biases
        sizes = tiny_config("llama").to_dict()
        model_config = Qwen2Config(**{name: sizes[name] for name in sizes if "_size" in name})
        model_config.num_hidden_layers = 2
        model_config.num_attention_heads, model_config.num_key_value_heads = 4, 2
        model_config.use_cache = False
    else:
        model_config = tiny_config(architecture)
    model = random_model(model_config, seed=3).to(stored)
    compute_in(model, computed)
    return model


def state_of(model: PreTrainedModel) -> list[object]:
    """The class and the attributes of every module, and all parameters and their values."""
    found: list[object] = []
    for name, module in model.named_modules():
        found += [name, type(module), sorted(module.__dict__), len(module._forward_pre_hooks)]
    for name, weight in model.named_parameters():
        found += [name, id(weight), weight.dtype, weight.requires_grad, weight.double().sum()]
    return found


def said_by(
    model: PreTrainedModel, groups: list[list[str]], compiled: bool = False
) -> list[list[Completion]]:
    """What a model says while these groups of layers are joined."""
    with generating(model, in_pages=True), joined(model, groups), cast_once(model):
        return complete_in_pages(model, ASKED, Drawing(0.8), [2], 64, CPU, False, compiled, size=4)


def assert_same(found: list[list[Completion]], wanted: list[list[Completion]]) -> None:
    for group, other in zip(found, wanted, strict=True):
        for one, two in zip(group, other, strict=True):
            assert one.tokens == two.tokens
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-6)


def groups_of(model: PreTrainedModel) -> list[list[str]]:
    with generating(model, in_pages=True):
        return of_one_input(model, CPU)


@pytest.mark.parametrize(("stored", "computed"), PRECISIONS)
@pytest.mark.parametrize("architecture", JOINED)
def test_joined_layers_say_the_same(
    architecture: str, stored: torch.dtype, computed: torch.dtype
) -> None:
    model = casting_model(architecture, stored, computed)
    before = state_of(model)
    groups = groups_of(model)
    path = "model.layers" if JOINED[architecture] else ""
    assert groups == [
        [f"{path}.{number}.{name}" for name in names]
        for number in range(2)
        for names in JOINED[architecture]
    ]
    assert_same(said_by(model, groups), said_by(model, []))
    assert state_of(model) == before


def test_rows_of_one_matrix_are_what_is_cast() -> None:
    model = casting_model("llama")
    groups = groups_of(model)
    wanted = model.model.layers[0].self_attn.k_proj.weight
    with generating(model, in_pages=True), joined(model, groups), cast_once(model):
        for names in groups:
            own = [model.get_submodule(name) for name in names]
            whole = own[0].product.weight
            assert whole.nbytes == whole.untyped_storage().nbytes()
            for module in own:
                assert module.product is own[0].product
                assert module.weight.untyped_storage().data_ptr() == whole.data_ptr()
        assert torch.equal(model.model.layers[0].self_attn.k_proj.weight, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_cast_are_left(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(tiny_config("llama")).to(dtype)
    monkeypatch.setattr("lacuna.rollout.joined.prompt_logits", None)  # nothing is tried
    assert groups_of(model) == []


def test_code_that_does_not_take_parts_of_a_product_gets_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = casting_model("llama")
    key = model.model.layers[1].self_attn.k_proj
    key.register_forward_hook(lambda _, __, found: found.view(-1).view(found.shape))
    before = state_of(model)
    with caplog.at_level("INFO", "lacuna"):
        assert groups_of(model) == []
    assert "products are not joined" in caplog.text
    assert state_of(model) == before


@pytest.mark.parametrize("way", ["by keyword", "changed in place"])
def test_layers_whose_input_is_given_otherwise_or_changed_are_left(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the code of a user's own model may do."""
    model = casting_model("llama", torch.bfloat16, torch.float32)
    mlp = model.model.layers[1].mlp

    def by_keyword(x: torch.Tensor) -> torch.Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(input=x)) * mlp.up_proj(input=x))

    def changed_in_place(x: torch.Tensor) -> torch.Tensor:
        gate = mlp.act_fn(mlp.gate_proj(x))
        return mlp.down_proj(gate * mlp.up_proj(x.mul_(0.5)))

    monkeypatch.setattr(mlp, "forward", by_keyword if way == "by keyword" else changed_in_place)
    groups = groups_of(model)
    names = [ATTENTION, FEED_FORWARD]
    assert (
        groups
        == [
            [f"model.layers.{number}.{name}" for name in own]
            for number in range(2)
            for own in names
        ][:3]
    )
    assert_same(said_by(model, groups), said_by(model, []))


def test_rollouts_join_and_leave_a_model_as_it_was_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = casting_model("qwen3", torch.bfloat16, torch.float32).train()
    before = state_of(model)
    wanted = said_by(model, [])
    seen = []

    def noted(model: PreTrainedModel, *given: object, **options: object) -> list[list[Completion]]:
        seen.append(sum("Joined" in type(module).__name__ for module in model.modules()))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return complete_in_pages(model, *given, **options)

    monkeypatch.setattr(generate, "complete_in_pages", noted)
    for whole in (True, False):
        assert_same(complete(model, ASKED, Drawing(0.8), [2], 64, CPU, whole=whole), wanted)
        assert state_of(model) == before
    with pytest.raises(KeyboardInterrupt):
        complete(model, ASKED, Drawing(0.8), [2], 64, CPU, whole=True)
    assert state_of(model) == before
    assert seen == [10, 0, 10]
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert model(torch.tensor([[5, 6, 7]])).logits.shape[-1] == VOCABULARY


def adapted_model(dtype: torch.dtype, targets: tuple[str, ...]) -> PreTrainedModel:
    """One as GRPO has it on a GPU: frozen in the dtype of products, with float32 adapters."""
    model = random_model(tiny_config("llama"), seed=3).to(dtype)
    add_adapters(model, LoraConfig(rank=4, targets=targets), torch.float32)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.normal_(0, 0.3, generator=generator)
    compute_in(model, dtype)
    return model


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([[5, 6, 7]]), use_cache=False).logits.float().logsumexp(-1).sum()


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj", "up_proj")])
def test_frozen_weights_are_moved_once_and_their_adapters_joined(targets: tuple[str, ...]) -> None:
    model = adapted_model(torch.bfloat16, targets)
    before = state_of(model)
    names = [f"model.layers.{n}.{name}" for n in range(2) for name in (*ATTENTION, *FEED_FORWARD)]
    own = [model.get_submodule(name) for name in names]
    wanted = said_by(model, [])
    loss_of(model).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.requires_grad]
    model.zero_grad()
    groups = groups_of(model)
    assert [name for group in groups for name in group] == names
    places = [module.weight.data_ptr() for module in own]
    for _ in range(2):
        assert_same(said_by(model, groups), wanted)
        assert [module.weight.data_ptr() for module in own] == places
    assert state_of(model) == before
    for module in own:
        assert module.weight.is_contiguous() and module.weight.data_ptr() % 16 == 0
        assert module.weight.untyped_storage().nbytes() <= 3 * 48 * 32 * 2
    loss_of(model).backward()
    again = [weight.grad for weight in model.parameters() if weight.requires_grad]
    assert all(torch.equal(one, two) for one, two in zip(again, gradients, strict=True))


def test_weights_that_learn_are_not_moved() -> None:
    model = adapted_model(torch.float32, ("all-linear",))  # which casts no adapter
    places = [weight.data_ptr() for weight in model.parameters()]
    wanted = said_by(model, [])
    assert_same(said_by(model, groups_of(model)), wanted)
    assert [weight.data_ptr() for weight in model.parameters()] == places


def compile_noting_products(model: PreTrainedModel) -> list[int]:
    """Compiles a model's layers; how many products each graph has that asks for no gradients."""
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
    of_graphs: list[int] = []

    def note(graph: GraphModule, _: object) -> Callable[..., Any]:
        of_graphs.append(sum(node.target in products for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    noting = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, inference_compiler=note)
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, backend=noting)
    return of_graphs


@pytest.mark.slow
def test_compiled_adapters_make_one_narrow_product() -> None:
    torch._dynamo.reset()
    model = adapted_model(torch.bfloat16, ("all-linear",))
    wanted = said_by(model, [])
    groups = groups_of(model)
    of_graphs = compile_noting_products(model)
    with compiled_by("aot_eager"):
        assert_same(said_by(model, groups, compiled=True), wanted)
        # Four of weights, four of narrow factors, and seven of wide ones.
        assert of_graphs == [15, 15], "in reading prompts, and in a step"
        loss_of(model).backward()
        graphs = counters["stats"]["unique_graphs"]
        for _ in range(2):
            assert_same(said_by(model, groups, compiled=True), wanted)
            loss_of(model).backward()
    assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "products"), [("llama", 4), ("qwen2", 4), ("phi", 3), ("qwen2_moe", 6)]
)
@pytest.mark.parametrize(("stored", "computed"), PRECISIONS)
def test_compiled_layers_make_one_product(
    architecture: str, products: int, stored: torch.dtype, computed: torch.dtype
) -> None:
    torch._dynamo.reset()
    model = casting_model(architecture, stored, computed)
    wanted = said_by(model, [])
    groups = groups_of(model)
    of_graphs = compile_noting_products(model)
    with compiled_by("aot_eager"):
        assert_same(said_by(model, groups, compiled=True), wanted)
        assert of_graphs == [products, products], "in reading prompts, and in a step"
        graphs = counters["stats"]["unique_graphs"]
        assert_same(said_by(model, groups, compiled=True), wanted)
    assert counters["stats"]["unique_graphs"] == graphs, "the next rollout compiles nothing"
