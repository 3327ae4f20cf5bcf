"""Quantised stacks of experts compute and learn as the model of what they stand for does."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PretrainedConfig, PreTrainedModel

from every_model import configuration_class, small_config
from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.layers import quantized_stacks as quantized_stacks_module
from lacuna.model.layers.bits import dequantize, dequantize_stack, quantize, quantize_stack
from lacuna.model.layers.lora import add_adapters, without_adapters
from lacuna.model.layers.quantized import pack_layers, quantize_layers, quantized_modules
from lacuna.model.layers.quantized_stacks import quantized_stacks
from lacuna.model.layers.replacement import replace_layers
from lacuna.model.layers.stacks import LoraStacks
from lacuna.model.layers.wrapping import unwrap
from lacuna.parallel.mesh import Layout
from layouts import LENGTH, Case, Outcome, check_same, outcomes, pipelined
from tiny import random_model, relative_error, tiny_config

FORMS = ("nf4", "int8")
KINDS = ("qwen3_moe", "gpt_oss", "mixtral", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3")
KINDS += ("glm4_moe", "llama4_text", "jetmoe", "nemotron_h", "inkling_text", "granitemoe")
LOADED = KINDS[:8]
OTHERS = ("afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe")
OTHERS += ("deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text", "ernie4_5_moe")
OTHERS += ("exaone_moe", "flex_olmo", "flint", "glm4_moe_lite", "glm_moe_dsa", "granitemoe_swa")
OTHERS += ("granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4")
OTHERS += ("inkling2_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4")
OTHERS += ("mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "phimoe")
OTHERS += ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text")
OTHERS += ("solar_open", "zaya")
TINY = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss")
ON_ATTENTION = LoraConfig(rank=3, targets=("*.self_attn.*",))
ON_STACKS = LoraConfig(rank=3, targets=(), parameters=("*.experts.*",))


def config_of(kind: str) -> PretrainedConfig:
    own = tiny_config(kind) if kind in TINY else small_config(configuration_class(kind))
    own.use_cache = False
    return own


@torch.no_grad()
def dequantized(model: PreTrainedModel, form: str) -> PreTrainedModel:
    """The model with the weights, in place, that its quantised ones stand for."""
    named = meta_model(model.config, "eager", torch.float32)
    quantize_layers(named.requires_grad_(False), form, [])
    for name in quantized_modules(named):
        weight = model.get_parameter(f"{name}.weight")
        weight.copy_(dequantize(quantize(weight, form), form, weight.shape, torch.float32))
    for path, module in quantized_stacks(named).items():
        for name, shape in module.dense_shapes:
            for one in model.get_parameter(f"{path}.{name}"):
                one.copy_(dequantize(quantize(one, form), form, shape, torch.float32))
    return model


def bases(kind: str, folder: Path, form: str = "nf4") -> tuple[Path, Path]:
    """Folders of a model with weights, and of what these are once quantised."""
    model = random_model(config_of(kind), "eager")
    model.save_pretrained(folder / "base")
    dequantized(model, form).save_pretrained(folder / "dense")
    return folder / "base", folder / "dense"


def trained_only(outcome: Outcome) -> Outcome:
    """The outcome without what is frozen, which is not the same as what it stands for."""
    return replace(outcome, updated={name: outcome.updated[name] for name in outcome.gradients})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4, 96, 40), (3, 33, 5), (0, 8, 8)])
def test_each_expert_of_a_stack_is_packed_by_itself(form: str, shape: tuple[int, ...]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = quantize_stack(stack, form)
    assert len(packed) == len(stack)
    dense = dequantize_stack(packed, form, shape[1:], torch.float32)
    for row, matrix, one in zip(packed, stack, dense, strict=True):
        assert torch.equal(row, quantize(matrix, form))
        assert torch.equal(one, dequantize(row, form, shape[1:], torch.float32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4, 96, 40), (3, 33, 5), (16, 512, 300), (0, 8, 8)])
def test_a_gpu_unpacks_what_a_cpu_does(form: str, shape: tuple[int, ...]) -> None:
    packed = quantize_stack(torch.randn(shape, generator=torch.Generator().manual_seed(0)), form)
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantize_stack(packed, form, shape[1:], dtype)
        found = dequantize_stack(packed.cuda(), form, shape[1:], dtype).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def pack(model: PreTrainedModel) -> None:
    """Packs the quantised weights of a model, in place."""
    whole = dict(model.named_parameters())
    pack_layers(model)
    for path, module in [*quantized_modules(model).items(), *quantized_stacks(model).items()]:
        for name in module.packed_names:
            stored = module.stored_weight(name, whole[f"{path}.{name}"])
            module.get_parameter(name).copy_(stored.view(torch.float32))


@torch.no_grad()
def dequantize_stacks(model: PreTrainedModel) -> None:
    """Gives a model plain stacks, in place: those that its quantised ones stand for."""
    for module in quantized_stacks(model).values():
        for name, shape in module.dense_shapes:
            for one in module.get_parameter(name):
                packed = quantize(one, module.form)
                one.copy_(dequantize(packed, module.form, shape, torch.float32))
        unwrap(module)


def learned(
    kind: str,
    form: str,
    on_stacks: bool,
    is_packed: bool,
    packing: Callable[[PreTrainedModel], None] = pack,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a model with random adapters beside quantised weights, and their gradients.

    Its stacks are packed, or are those that the packed ones stand for.
    """
    model = random_model(config_of(kind), "eager")
    quantize_layers(model.requires_grad_(False), form, [])
    stacks = quantized_stacks(model).items()
    names = tuple(f"{path}.{name}" for path, one in stacks for name, _ in one.dense_shapes)
    assert names
    if not is_packed:
        dequantize_stacks(model)
    adapters = LoraConfig(rank=2, targets=(), parameters=names) if on_stacks else LoraConfig(rank=2)
    add_adapters(model, adapters, torch.float32)
    packing(model)
    generator = torch.Generator().manual_seed(1)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for _, weight in sorted(trained.items()):
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    ids = torch.arange(4, 64).reshape(2, 30)
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: one.grad for name, one in trained.items() if one.grad is not None}


@pytest.mark.parametrize("on_stacks", [False, True], ids=["linear layers", "stacks"])
@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_adapters_learn_beside_packed_stacks_as_beside_what_these_stand_for(
    kind: str, on_stacks: bool
) -> None:
    for form in FORMS:
        found, expected = (learned(kind, form, on_stacks, is_packed) for is_packed in (True, False))
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert len(expected[1]) >= 4 and any(one.any() for one in expected[1].values())
        assert relative_error(found[1], expected[1]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADED)
def test_a_model_learns_beside_quantised_stacks_as_beside_what_they_stand_for(
    kind: str, tmp_path: Path
) -> None:
    base, dense = bases(kind, tmp_path)
    plain = [Case(lora=adapters) for adapters in (ON_ATTENTION, ON_STACKS)]
    quantised = [replace(case, base="nf4") for case in plain]
    for found, expected in zip(outcomes(base, quantised), outcomes(dense, plain), strict=True):
        check_same(trained_only(found), trained_only(expected))


@pytest.mark.parametrize("on_stacks", [False, True], ids=["linear layers", "stacks"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_no_stack_is_kept_between_the_passes(
    kind: str, on_stacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StorageWeakRef] = []

    def noted(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_and_note(*arguments: Any) -> Tensor:
            stack = make(*arguments)
            made.append(StorageWeakRef(stack.untyped_storage()))
            return stack

        return make_and_note

    for place, name in ((quantized_stacks_module, "dequantize_stack"), (LoraStacks, "merged")):
        monkeypatch.setattr(place, name, noted(getattr(place, name)))
    backward = Tensor.backward
    alive: list[bool] = []

    def look_and_go_back(loss: Tensor) -> None:
        alive.extend(not one.expired() for one in made)
        backward(loss)

    monkeypatch.setattr(Tensor, "backward", look_and_go_back)
    learned(kind, "nf4", on_stacks, is_packed=True)
    assert alive and not any(alive) and len(made) == 2 * len(alive)


@pytest.mark.slow
@pytest.mark.parametrize("on_stacks", [False, True], ids=["linear layers", "stacks"])
def test_compilers_keep_no_stack_either(on_stacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()

    def pack_and_compile(model: PreTrainedModel) -> None:
        for module in quantized_stacks(model).values():
            sizes.update(module.get_parameter(name).numel() for name, _ in module.dense_shapes)
        pack(model)
        for layer in decoder_layers(model):
            layer.compile(fullgraph=True, backend="aot_eager")

    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    expected = learned("qwen3_moe", "nf4", on_stacks, is_packed=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = learned("qwen3_moe", "nf4", on_stacks, is_packed=True, packing=pack_and_compile)
    assert relative_error(found[1], expected[1]) < 2e-6
    assert kept and not any(one.ndim == 3 and one.numel() in sizes for one in kept)


FULL = ActivationCheckpointConfig(mode="full")
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
TWO = Layout(dp_shard=2)
SPREAD = Layout(dp_shard=2, ep=2)
LAYOUTS = {
    1: [
        Case(recompute=FULL),
        Case(recompute=BY_OPERATION),
        Case(accumulation=2),
        Case(offload=True),
        Case(compiled=True),
    ],
    2: [
        Case(TWO),
        Case(SPREAD),
        Case(TWO, recompute=FULL),
        Case(TWO, recompute=BY_OPERATION),
        Case(TWO, compiled=True, backend="aot_eager"),
        Case(TWO, 2, zero_stage=1),
        Case(TWO, 2, zero_stage=2),
        Case(Layout(dp_replicate=2)),
        Case(Layout(cp=2)),
        pipelined(Layout(pp=2), 4),
        Case(SPREAD, 2, recompute=FULL),
        Case(SPREAD, 2, recompute=BY_OPERATION),
        Case(SPREAD, offload=True),
        Case(SPREAD, compiled=True, backend="aot_eager"),
        Case(Layout(cp=2, ep=2)),
    ],
    4: [
        Case(Layout(dp_replicate=2, dp_shard=2)),
        Case(Layout(dp_replicate=2, dp_shard=2, ep=2)),
        Case(Layout(dp_shard=4, ep=2)),
        pipelined(Layout(dp_shard=2, pp=2, ep=2), 4),
    ],
}


@pytest.mark.slow
def test_any_layout_is_one_process(tmp_path: Path) -> None:
    random_model(config_of("qwen3_moe"), "eager").save_pretrained(tmp_path)
    plain = [Case(lora=adapters, base="nf4") for adapters in (ON_ATTENTION, ON_STACKS)]
    wanted = dict(zip((ON_ATTENTION, ON_STACKS), outcomes(tmp_path, plain), strict=True))
    for of_ranks in LAYOUTS.values():
        # Stacks that nobody adapts are computed by the same code, which saves less: half will do.
        chosen = [(ON_STACKS, case) for case in of_ranks]
        chosen += [(ON_ATTENTION, case) for case in of_ranks[1::2]]
        cases = [replace(case, lora=adapters, base="nf4") for adapters, case in chosen]
        for case, outcome in zip(cases, outcomes(tmp_path, cases), strict=True):
            print(case)  # in what pytest shows where the next line fails
            check_same(trained_only(outcome), trained_only(wanted[case.lora]))


@pytest.mark.parametrize(
    ("kind", "changes", "form"),
    [
        ("qwen3_moe", {"num_experts": 3}, "nf4"),  # of which one rank has two
        pytest.param("gpt_oss", {}, "nf4", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, "int8", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_beside_the_experts_of_one_process(
    kind: str, changes: dict[str, int], form: Literal["nf4", "int8"], tmp_path: Path
) -> None:
    random_model(tiny_config(kind, **changes), "eager").save_pretrained(tmp_path)
    [alone] = outcomes(tmp_path, [Case(lora=ON_STACKS, base=form)])
    layouts = [TWO] if changes else [TWO, SPREAD]
    cases = [Case(layout, lora=ON_STACKS, base=form) for layout in layouts]
    for outcome in outcomes(tmp_path, cases):
        check_same(trained_only(outcome), trained_only(alone))


def test_a_model_without_its_adapters_is_its_quantised_base() -> None:
    model = random_model(config_of("qwen3_moe"), "eager")
    ids = torch.arange(4, 64).reshape(2, 30)
    quantize_layers(model.requires_grad_(False), "nf4", [])
    base = model(input_ids=ids).logits
    add_adapters(model, ON_STACKS.model_copy(update={"targets": ("all-linear",)}), torch.float32)
    pack(model)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    assert (model(input_ids=ids).logits - base).abs().max() > 0.01
    with without_adapters(model):
        assert torch.equal(model(input_ids=ids).logits, base)


def test_experts_that_are_trained_whole_are_not_quantised(tmp_path: Path) -> None:
    random_model(config_of("qwen3_moe"), "eager").save_pretrained(tmp_path)
    whole = LoraConfig(rank=3, targets=("*.self_attn.*",), modules=("1.mlp.experts",))
    [found] = outcomes(tmp_path, [Case(lora=whole, base="nf4")])
    stack = "model.layers.{}.mlp.experts.down_proj"
    assert found.gradients[stack.format(1)].any() and stack.format(0) not in found.gradients
    assert [found.updated[stack.format(layer)].ndim for layer in (0, 1)] == [2, 3]


@pytest.mark.parametrize("rank", [0, 3])
def test_schedules_that_would_dequantise_for_each_weight_are_refused(rank: int) -> None:
    settings = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}
    adapted = {"lora": {"rank": rank}, "quantization": {"base": "nf4"}}
    config = Config(parallelism=settings, training={"seq_len": LENGTH}, **adapted)
    model = meta_model(tiny_config("qwen3_moe"), "eager", torch.float32)
    said = "would dequantise the experts anew for each: set the second to 1F1B"
    with pytest.raises(UserError, match=said) if rank else nullcontext():
        replace_layers(model, config, False, [], Layout(pp=2), None)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("dbrx", "transformer.blocks.0.ffn.experts.mlp.w1"),
        ("recurrent_gemma", "input_gate_weight"),
        ("qwen3_moe", None),
        ("llama", None),
    ],
)
def test_what_is_left_as_it_is_is_named(
    kind: str, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model_config = tiny_config(kind) if named is None else config_of(kind)
    quantize_layers(meta_model(model_config, "eager", torch.float32), "nf4", [])
    said = [one for one in caplog.messages if "stay as they are" in one]
    assert [named in one for one in said] == [True] if named else said == []
