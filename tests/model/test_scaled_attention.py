"""Scaled attentions are what their formula says, and their numbers are trained and kept."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lacuna.config import UserError
from lacuna.config.attentions import SCALE
from lacuna.model.build import build_meta_model
from lacuna.model.own_attention import register
from lacuna.model.scaled_attention import keys_seen
from lacuna.parallel.context import causal_parts
from lacuna.parallel.mesh import Layout
from lacuna.parallel.partial_attention import Part, visible
from layouts import Case, configuration, outcomes, pipelined
from runs import curve, lacuna, make_world, together, train
from tiny import random_model, relative_error, tiny_config, tokenizer_of_words

KINDS = ("scaled_softmax", "scaled_softpick")


def model_folder(folder: Path, architecture: str, kind: str) -> Path:
    register(kind)
    model = random_model(tiny_config(architecture), kind)
    model.config.attn_implementation = kind
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("window", [None, 3])
def test_the_keys_that_a_query_sees_are_counted(window: int | None) -> None:
    bounds = torch.tensor([0, 5, 16, 17, 32, 32], dtype=torch.int32)
    unseeing = (torch.tensor(each, dtype=torch.int32) for each in ([0, 4, 8], [0, 0, 8]))
    cases = [(part, 2, 4) for part in causal_parts(bounds, 16, 2, 1, 15)]
    for part, rows, queries in (*cases, (Part(*unseeing, 8, 8), 1, 8)):
        seen = visible(part, rows, queries, window).sum(-1)
        assert torch.equal(keys_seen(part, rows, queries, window), seen.int())


def test_a_scaled_head_is_softmax_of_scores_times_the_logarithm() -> None:
    """Of a model of one head and layer, against scores that are scaled by hand."""
    settings = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    register("scaled_softmax")
    model = random_model(tiny_config("llama", **settings), "scaled_softmax")
    attention: Any = model.model.layers[0].self_attn
    scale = attention.get_parameter(SCALE)
    assert scale.shape == (1,)
    plain = random_model(tiny_config("llama", **settings), "eager")
    plain.load_state_dict(model.state_dict(), strict=False)
    ids = torch.arange(9)[None] + 4

    def grow(_: Any, __: Any, output: Tensor) -> Tensor:
        """Grows the queries before they are rotated, which changes no length."""
        numbers = torch.arange(1, output.shape[1] + 1)
        return output * (scale * torch.log(numbers + 1))[:, None]

    plain.model.layers[0].self_attn.q_proj.register_forward_hook(grow)
    left, right = (each(input_ids=ids).logits for each in (model, plain))
    assert relative_error({"": left}, {"": right}) < 1e-6


@pytest.mark.parametrize(
    "kind", ["scaled_softpick", pytest.param("scaled_softmax", marks=pytest.mark.slow)]
)
def test_every_layout_trains_as_one_process(kind: str, tmp_path: Path) -> None:
    model = model_folder(tmp_path, "gemma3", kind)
    [alone] = outcomes(model, [Case()])
    name = f"model.layers.1.self_attn.{SCALE}"
    assert alone.gradients[name].any()
    assert not torch.equal(alone.updated[name], load_file(model / "model.safetensors")[name])
    ring = {"context_parallel_rotate_method": "alltoall", "context_parallel_degree": 2}
    cases = [Case(Layout(dp_shard=2)), Case(Layout(cp=2)), pipelined(Layout(pp=2), 4)]
    cases.append(Case(Layout(cp=2, ring=True), parallelism=ring))
    for outcome in outcomes(model, cases):
        assert outcome.loss == pytest.approx(alone.loss, rel=1e-6)
        assert relative_error(outcome.gradients, alone.gradients) < 1e-5
        assert relative_error(outcome.updated, alone.updated) < 1e-6


def refusal(folder: Path, case: Case) -> str:
    with pytest.raises(UserError) as caught:
        build_meta_model(configuration(folder, case), tokenizer_of_words(), case.layout, "cpu")
    return str(caught.value)


def test_what_has_no_scales_is_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path, "llama", "scaled_softpick")
    settings = {"tensor_parallel_degree": 2}
    said = refusal(model, Case(Layout(tp=2), parallelism=settings))
    assert (
        f"tensor_parallel_degree: the plan of 'llama' models leaves out self_attn.{SCALE}" in said
    )
    with pytest.raises(UserError, match='"scaled_softmax" cannot be had: LlamaAttention'):
        register("scaled_softmax")
        random_model(tiny_config("llama")).set_attn_implementation("scaled_softmax")
        plain = random_model(tiny_config("llama"))
        plain.set_attn_implementation("scaled_softmax")
        plain(input_ids=torch.tensor([[4, 5]]))


@pytest.mark.slow
def test_a_run_trains_from_scratch_or_from_softmax_weights_and_its_numbers_are_kept(
    tmp_path: Path,
) -> None:
    world, softmax = make_world(tmp_path / "world"), tmp_path / "softmax"
    flags = ("--model.attention", "scaled_softpick")
    scratch, continued = tmp_path / "scratch", tmp_path / "continued"
    together(
        lambda: train(world, scratch, *flags),
        lambda: train(world, softmax, "--training.steps", 2),
    )
    loads = ("--model.config", "none", "--model.name_or_path", softmax / "hf")
    two = ("--cpus", 2, "--training.batch_size", 2)
    again = tmp_path / "again"
    together(
        lambda: train(world, continued, *flags, *loads),
        lambda: train(world, again, *flags, *loads, *two),
    )
    assert curve(again) == [pytest.approx(row, rel=1e-4) for row in curve(continued)]
    register("scaled_softpick")  # as anybody must before transformers opens such a model
    name = f"model.layers.1.self_attn.{SCALE}"
    for run in (scratch, continued):
        kept = load_file(run / "hf" / "model.safetensors")[name]
        assert kept.shape == (4,)
        assert 0 < (kept - 0.3).abs().max() < 0.1, "it began at 0.3 and has learned"
        model = AutoModelForCausalLM.from_pretrained(run / "hf")
        assert torch.equal(model.get_parameter(name), kept)
        said = lacuna("generate", run, "--prompt", "the cat", "--max-new-tokens", 6, apart=True)
        step = run / "checkpoint" / "step-8"
        assert said == lacuna(
            "generate", step, "--prompt", "the cat", "--max-new-tokens", 6, apart=True
        )
    first = curve(scratch)[0][1]
    assert first == pytest.approx(math.log(257), rel=0.05)
    loaded = ("--model.config", "none", "--model.name_or_path", scratch / "hf")
    adapted = tmp_path / "adapted"
    train(world, adapted, *loaded, "--lora.rank", 2, "--training.steps", 2)
    step = adapted / "checkpoint" / "step-2"
    lacuna("convert", step, tmp_path / "merged", "--to", "hf")
    assert "attention scaled_softpick" in lacuna("inspect", step, "--rows", 1, "--tokens", 8)
    adapters = (*loads, "--lora.rank", 2)
    told = train(world, tmp_path / "no", *flags, *adapters, status=2)
    assert "model.attention, lora.rank: the files of adapters cannot say the first" in told
    stated = softmax / "hf" / "config.json"
    settings = json.loads(stated.read_text())
    stated.write_text(json.dumps(settings | {"attn_implementation": "scaled_softpick"}))
    told = train(world, tmp_path / "no", *adapters, status=2)
    assert f"lora.rank: {softmax / 'hf'} has no {SCALE}" in told
