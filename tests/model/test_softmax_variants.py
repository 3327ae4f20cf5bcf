"""Softmax beside sinks and with gates is what its formula says, in every layout and exported."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.attentions import SINKS
from lacuna.model.attention_choice import attention_choices
from lacuna.model.build import build_meta_model
from lacuna.model.learned_attention import GATE
from lacuna.model.own_attention import OwnAttention, register
from lacuna.model.own_attention_choice import require_exact
from lacuna.model.softmax_variants import beside_sinks
from lacuna.parallel.mesh import Layout
from lacuna.parallel.partial_attention import Part
from lacuna.rollout.inspection import inspect_model
from layouts import Case, configuration, outcomes, pipelined
from runs import SOURCE, curve, lacuna, make_world, refused, together, train
from tiny import CPU, random_model, relative_error, tiny_config, tokenizer_of_words

KINDS = ("softmax_plus_one", "softmax_sinks", "gated_softmax", "head_gated_softmax")
LEARNED = {
    "softmax_plus_one": None,
    "softmax_sinks": SINKS,
    "gated_softmax": f"{GATE}.weight",
    "head_gated_softmax": f"{GATE}.weight",
}
HERE = Path(__file__).name.removesuffix(".py")
BOTH = OwnAttention(beside_sinks, documents=True, windows=True, sinks=True, gate="heads")
IDS = torch.arange(9)[None] * 5 + 4


def model_folder(folder: Path, architecture: str, kind: str) -> Path:
    register(kind)
    model = random_model(tiny_config(architecture), kind)
    model.config.attn_implementation = kind
    model.save_pretrained(folder)
    return folder


def beside(kind: str, architecture: str = "llama") -> tuple[Any, Any]:
    """A model of a kind of attention, and one of plain softmax with the same other weights."""
    register(kind)
    model = random_model(tiny_config(architecture), kind)
    plain = random_model(tiny_config(architecture), "eager")
    plain.load_state_dict(model.state_dict(), strict=False)
    return model, plain


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_a_row_are_as_they_are_alone(architecture: str, kind: str) -> None:
    model_config = tiny_config(architecture)
    [name] = attention_choices(kind, True, model_config, "cpu", torch.float32, Layout())
    for rows_like in ("packed", "padded", "whole"):
        require_exact(name, model_config, rows_like, 64, CPU, torch.bfloat16)


@pytest.mark.parametrize("kind", ["gated_softmax", "head_gated_softmax"])
def test_gates_are_the_sigmoid_of_a_linear_map_of_the_layers_input(kind: str) -> None:
    """Against softmax whose output is multiplied, before its projection, by hooks."""
    model, plain = beside(kind)
    inputs: list[Tensor] = []

    def keep(_: Any, __: Any, named: dict[str, Any]) -> None:
        inputs.append(named["hidden_states"])

    def multiply(gate: Any, _: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
        gates = torch.sigmoid(inputs[-1] @ gate.weight.T)
        return (arguments[0] * gates.repeat_interleave(32 // gates.shape[-1], dim=-1),)

    for ours, theirs in zip(model.model.layers, plain.model.layers, strict=True):
        gate = ours.self_attn.attention_gate
        assert gate.weight.shape == ((32 if kind == "gated_softmax" else 4), 32)
        theirs.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
        theirs.self_attn.o_proj.register_forward_pre_hook(
            lambda *call, gate=gate: multiply(gate, *call)
        )
    left, right = (each(input_ids=IDS).logits for each in (model, plain))
    assert relative_error({"": left}, {"": right}) < 1e-6


def test_sinks_take_weight_as_gpt_oss_has_them() -> None:
    """Against transformers' own attention of GPT-OSS beside its sinks."""
    plain = random_model(tiny_config("gpt_oss", layer_types=["full_attention"] * 2), "eager")
    module: Any = plain.model.layers[0].self_attn
    query, key, value = (torch.randn(1, heads, 9, 16) for heads in (4, 2, 2))
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    theirs, _ = eager_attention_forward(module, query, key, value, mask, 0.3)
    bounds = torch.tensor([0, 9], dtype=torch.int32)
    told = (one.transpose(1, 2) for one in (query, key, value))
    ours = beside_sinks(*told, Part(bounds, bounds, 9, 9), 0.3, None, module.sinks)
    torch.testing.assert_close(ours, theirs)


def test_plus_one_is_the_example_and_learned_sinks_begin_there() -> None:
    sys.path.append(str(SOURCE.parent / "examples"))
    try:
        register("own_attention:SOFTMAX_PLUS_ONE")
    finally:
        sys.path.pop()
    model, _ = beside("softmax_plus_one")
    learned, _ = beside("softmax_sinks")
    found = [learned(input_ids=IDS).logits]
    with torch.no_grad():
        for layer in learned.model.layers:
            layer.self_attn.attention_sinks.zero_()
    learned.load_state_dict(model.state_dict(), strict=False)
    found.append(learned(input_ids=IDS).logits)
    expected = model(input_ids=IDS).logits
    model.set_attn_implementation("own_attention:SOFTMAX_PLUS_ONE")
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    torch.testing.assert_close(found[1], expected)
    assert not torch.allclose(found[0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_what_inspect_sees_is_the_weights_without_the_gates(kind: str) -> None:
    model, plain = beside(kind)
    before = model(input_ids=IDS).logits
    [layer, _] = inspect_model(model, [IDS[0]])
    assert torch.equal(model(input_ids=IDS).logits, before)
    [softmax, _] = inspect_model(plain, [IDS[0]])
    if "gated" in kind:
        assert layer.first == pytest.approx(softmax.first)
    else:
        assert all(ours < theirs for ours, theirs in zip(layer.first, softmax.first, strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind == "head_gated_softmax" else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_every_layout_trains_as_one_process(kind: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path, "gemma3", kind)
    [alone] = outcomes(model, [Case()])
    name = f"model.layers.1.self_attn.{LEARNED[kind]}"
    if LEARNED[kind] is not None:
        assert alone.gradients[name].any()
        assert not torch.equal(alone.updated[name], load_file(model / "model.safetensors")[name])
    cases = [Case(Layout(dp_shard=2)), Case(Layout(cp=2)), pipelined(Layout(pp=2), 4)]
    if "gated" in kind:
        ring = {"context_parallel_rotate_method": "alltoall", "context_parallel_degree": 2}
        cases.append(Case(Layout(cp=2, ring=True), parallelism=ring))
    for outcome in outcomes(model, cases):
        assert outcome.loss == pytest.approx(alone.loss, rel=1e-6)
        assert relative_error(outcome.gradients, alone.gradients) < 1e-5
        assert relative_error(outcome.updated, alone.updated) < 1e-6


def test_an_attention_of_ones_own_may_learn_both(tmp_path: Path) -> None:
    kind = f"{HERE}:BOTH"
    model_config = tiny_config("qwen3")
    [name] = attention_choices(kind, True, model_config, "cpu", torch.float32, Layout())
    require_exact(name, model_config, "packed", 64, CPU, torch.float32)
    register(kind)
    model = random_model(tiny_config("llama"), kind)
    before = model(input_ids=IDS).logits
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.attention_gate.weight.zero_()
            layer.self_attn.attention_sinks.fill_(-1e4)
            layer.self_attn.o_proj.weight.mul_(2)  # gates are one half, and sinks take nothing
    plain = random_model(tiny_config("llama"), "eager")
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.o_proj.weight.div_(2)
    ours, theirs = (each(input_ids=IDS).logits for each in (model, plain))
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(before, ours)


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_adapters_learn_beside_gates_that_the_model_has(base: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path, "llama", "gated_softmax")
    case = Case(lora=LoraConfig(rank=2), base=base)  # type: ignore[arg-type]
    [alone] = outcomes(model, [case])
    assert any(GATE in name and gradient.any() for name, gradient in alone.gradients.items())
    [two] = outcomes(model, [replace(case, layout=Layout(dp_shard=2))])
    assert two.loss == pytest.approx(alone.loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax_sinks", "gated_softmax"])
def test_compiled_layers_train_as_they_are_written(kind: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path, "llama", kind)
    plain, compiled = outcomes(model, [Case(), Case(compiled=True)])
    assert relative_error(compiled.gradients, plain.gradients) < 1e-5


def refusal(folder: Path, case: Case) -> str:
    with pytest.raises(UserError) as caught:
        build_meta_model(configuration(folder, case), tokenizer_of_words(), case.layout, "cpu")
    return str(caught.value)


@pytest.mark.parametrize("kind", ["softmax_sinks", "gated_softmax"])
def test_layouts_that_would_split_what_is_learned_are_refused(kind: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path, "llama", kind)
    case = Case(Layout(tp=2), parallelism={"tensor_parallel_degree": 2})
    said = refusal(model, case)
    assert f"the plan of 'llama' models leaves out self_attn.{LEARNED[kind]}" in said
    if kind == "softmax_sinks":
        ring = {"context_parallel_rotate_method": "alltoall", "context_parallel_degree": 2}
        said = refusal(model, Case(Layout(cp=2, ring=True), parallelism=ring))
        assert 'rotate_method = "allgather"' in said


@pytest.mark.slow
def test_a_run_trains_from_scratch_and_what_it_learned_is_kept(tmp_path: Path) -> None:
    world, softmax = make_world(tmp_path / "world"), tmp_path / "softmax"
    sinks, gates = tmp_path / "sinks", tmp_path / "gates"
    gated = ("--model.attention", "gated_softmax")
    looks = ("--validation.dataset", world / "validation.jsonl", "--metrics.attention", 8)
    together(
        lambda: train(world, gates, *gated, *looks),
        lambda: train(world, softmax, "--training.steps", 2),
    )
    loads = ("--model.config", "none", "--model.name_or_path")
    train(world, sinks, "--model.attention", "softmax_sinks", *loads, softmax / "hf")
    for run, kind in ((sinks, "softmax_sinks"), (gates, "gated_softmax")):
        register(kind)
        name = f"model.layers.1.self_attn.{LEARNED[kind]}"
        kept = load_file(run / "hf" / "model.safetensors")[name]
        assert 0 < kept.abs().max() < 0.2
        model = AutoModelForCausalLM.from_pretrained(run / "hf")
        assert torch.equal(model.get_parameter(name), kept)
        words = ("--prompt", "the cat", "--max-new-tokens", 6)
        said = lacuna("generate", run, *words, apart=True)
        step = run / "checkpoint" / "step-8"
        assert said == lacuna("generate", step, *words, apart=True)
        again = tmp_path / "again" / kind
        train(world, again, *loads, run / "hf", "--training.steps", 2, "--optimizer.lr", 1e-9)
        assert curve(again)[0][1] < curve(run)[0][1], "it goes on from what it was"
    told = train(world, tmp_path / "no", *gated, *loads, softmax / "hf", status=2)
    assert f"lacks ['model.layers.0.self_attn.{GATE}.weight'" in told
    told = refused("convert", gates, tmp_path / "gguf", "--to", "gguf")
    assert "gated_softmax" in told


def test_models_with_other_attentions_are_made_as_before() -> None:
    register("softmax_sinks")
    model = AutoModelForCausalLM.from_config(small_config(configuration_class("reformer")))
    assert not any(name.endswith(SINKS) for name, _ in model.named_parameters())
