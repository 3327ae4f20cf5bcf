"""Tensors that transformers keeps in float32 stay so in memory, in computation and in files."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig
from lacuna.formats.checkpoint import model_tensors
from lacuna.formats.huggingface import export_model
from lacuna.model.architecture import meta_model
from lacuna.model.build import BuiltModel, build_meta_model, build_model
from lacuna.parallel.mesh import Layout, build_mesh
from layouts import Case, configuration, outcomes, relative_error
from tiny import CPU, differing, random_model, run_ranks, tokenizer_of_words

KEPT = (
    "axk1",
    "beam",
    "deepseek_v3",
    "deepseek_v4",
    "dots1",
    "ernie4_5_moe",
    "flint",
    "glm4_moe",
    "hy_v3",
    "inkling_text",
    "mimo_v2_flash",
    "nemotron_h",
    "solar_open",
)
"""Kinds of models with tensors that transformers keeps in float32.

They are buffers, weights, and weights of parts.
"""


def saved(kind: str, folder: Path) -> Path:
    """A model of random weights, of which none is a number of bfloat16."""
    model = random_model(small_config(configuration_class(kind)), attention="eager")
    for name, buffer in model.named_buffers():
        if name in model.state_dict() and buffer.is_floating_point():
            buffer.add_(torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def dtypes(tensors: dict[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", KEPT)
def test_what_transformers_keeps_in_float32_it_keeps_here_too(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = meta_model(small_config(configuration_class(kind)), "eager", torch.bfloat16)
    assert dtypes(ours.state_dict()) == dtypes(own.state_dict())
    assert {torch.float32, torch.bfloat16} <= {*dtypes(ours.state_dict()).values()}


def built(folder: Path, case: Case) -> BuiltModel:
    return build_model(
        configuration(folder, case), tokenizer_of_words(), build_mesh(case.layout, "cpu"), CPU
    )


def kept_and_written(folder: str) -> tuple[list[str], list[str]]:
    """What differs from its files in a bfloat16 model with adapters, in memory and exported."""
    model = built(
        Path(folder), Case(precision="bfloat16", lora=LoraConfig(rank=2, targets=("o_proj",)))
    ).model
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        first = {name: file.get_tensor(name) for name in file.keys() if "e_score" in name}  # noqa: SIM118
    assert first
    memory = {name: model.state_dict()[name] for name in first}
    export_model(model, tokenizer_of_words(), f"{folder}/hf", torch.bfloat16)
    with safe_open(f"{folder}/hf/model.safetensors", "pt") as file:
        after = {name: file.get_tensor(name) for name in first}
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
    return differing(first, memory), differing(first, after)


def test_router_biases_are_exact_beside_adapters_and_in_what_leaves(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    assert run_ranks(1, kept_and_written, str(tmp_path)) == [([], [])]


def checkpoint_of_weights(folder: str) -> set[torch.dtype]:
    tensors = model_tensors(built(Path(folder), Case()).model, torch.bfloat16)
    return {tensor.dtype for name, tensor in tensors.items() if "e_score" in name}


def test_a_checkpoint_of_weights_alone_keeps_them_too(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    assert run_ranks(1, checkpoint_of_weights, str(tmp_path)) == [{torch.float32}]


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "flint"])
def test_routers_in_float32_compute_in_it_alone_and_sharded(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    [alone] = outcomes(tmp_path, [Case(precision="bfloat16")])
    [sharded] = outcomes(tmp_path, [Case(Layout(dp_shard=2), precision="bfloat16")])
    # Were a router rounded, tokens would go to other experts.
    assert sharded.loss == pytest.approx(alone.loss, rel=1e-3)
    gates = [
        {name: one for name, one in each.gradients.items() if "gate.weight" in name}
        for each in (sharded, alone)
    ]
    assert gates[0]
    assert relative_error(*gates) < 2e-2


def test_sharded_weights_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    saved("ernie4_5_moe", tmp_path)
    config = configuration(tmp_path, Case(dtype="bfloat16", precision="bfloat16"))
    build_meta_model(config, tokenizer_of_words(), Layout(), "cpu")
    with pytest.raises(
        UserError, match=r"training\.dtype: transformers keeps .*gate\.weight in float32"
    ):
        build_meta_model(config, tokenizer_of_words(), Layout(dp_shard=2), "cpu")
