"""torchtitan's trainer beside ours: its driver in benchmarks/ makes the same steps of a run."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from runs import SOURCE, environment, lacuna, write_model

# torchtitan imports triton, which torch's CPU build lacks: pip install torchtitan==0.2.2 triton.
INSTALLED = find_spec("torchtitan") and find_spec("triton")
# They may be in folders of their own.
FOLDERS = [
    str(Path(str(found.origin)).parents[1])
    for found in map(find_spec, ("torchtitan", "triton", "torchao"))
    if found
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="torchtitan or triton is not installed"),
]

SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN3 = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": None,
    "eos_token_id": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TWO = ("--cpus", 2, "--training.batch_size", 2)
SELECTIVE = ("--activation_checkpoint.mode", "selective")


def losses(world: Path, folder: Path, *flags: object) -> tuple[list[float], list[float], Any]:
    """The losses of steps 1, 4, 5 and 6, ours and torchtitan's, and all of what that measured."""
    # Ours decays matrices only, torchtitan all parameters.
    words = ("--steps", 1, "--output", folder, "--optimizer.weight_decay", 0)
    words += ("--data.document_mask", "false", "--job.name", "tiny", "--against", "torchtitan")
    told = environment(PYTHONPATH=os.pathsep.join([str(SOURCE), *FOLDERS]))
    lacuna("bench", world / "run.toml", *words, *flags, env=told, timeout=240)
    record = json.loads((folder / "tiny.json").read_text())
    own = [record["lacuna"]["first_loss"]]
    own += [window["loss"] for window in record["lacuna"]["windows"]]
    peer = record["torchtitan"]
    assert len(peer["losses"]) == 6
    assert record["ratio"]["tokens_per_second"] > 0
    return own, [peer["losses"][0], *peer["losses"][-3:]], peer


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (*TWO, *SELECTIVE, "--activation_checkpoint.selective_ac_option", "op"),
        (*TWO, "--parallelism.data_parallel_replicate_degree", 2),
        (*SELECTIVE, "--training.gradient_accumulation_steps", 2, "--training.max_norm", 0),
        ("--compile.enable", "true", "--activation_checkpoint.mode", "full"),
    ],
)
def test_the_steps_of_a_llama_have_the_same_losses(
    flags: tuple[object, ...], world: Path, tmp_path: Path
) -> None:
    """Other weights, rows, clipping or learning rates would differ in the second digit."""
    own, peer, measured = losses(world, tmp_path, *flags)
    assert peer == pytest.approx(own, abs=1e-5)
    arguments = measured["arguments"]
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    recomputed = given.get("--activation_checkpoint.mode", "none")
    assert arguments["activation_checkpoint"]["mode"] == recomputed
    assert arguments["compile"]["enable"] is ("--compile.enable" in flags)
    copies = given.get("--parallelism.data_parallel_replicate_degree", 1)
    assert arguments["parallelism"]["data_parallel_shard_degree"] == given.get("--cpus", 1) / copies


def test_scaled_rotations_and_epsilons_are_given(world: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", rope_parameters=SCALED, rms_norm_eps=1e-4)
    own, peer, _ = losses(world, tmp_path, "--model.config", model)
    assert peer == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize(("tied", "flags"), [(True, ()), (False, TWO)])
def test_the_steps_of_a_qwen3_have_the_same_losses(
    tied: bool, flags: tuple[object, ...], world: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    Qwen3Config(**(QWEN3 | {"tie_word_embeddings": tied})).save_pretrained(model)
    own, peer, _ = losses(world, tmp_path, "--model.config", model, *flags)
    assert peer == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize(
    ("normalised", "flags"),
    [
        (False, ()),
        (True, (*SELECTIVE, "--activation_checkpoint.selective_ac_option", "op")),
        (True, (*TWO, "--parallelism.expert_parallel_degree", 2, *SELECTIVE)),
        (True, ("--compile.enable", "true", "--training.gradient_accumulation_steps", 2)),
    ],
)
def test_the_steps_of_a_mixture_have_the_same_losses(
    normalised: bool, flags: tuple[object, ...], world: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    settings = QWEN3 | EXPERTS | {"norm_topk_prob": normalised}
    Qwen3MoeConfig(**settings).save_pretrained(model)
    own, peer, measured = losses(world, tmp_path, "--model.config", model, *flags)
    assert peer == pytest.approx(own, abs=1e-5)
    spread = 2 if "--parallelism.expert_parallel_degree" in flags else 1
    assert measured["arguments"]["parallelism"]["expert_parallel_degree"] == spread


@pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_has_the_same_layers_and_nearly_the_same_losses(
    recipe: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    flags = ("--float8.enable_float8_linear", "--float8.emulate", "--float8.recipe_name", recipe)
    flags += ("--float8.filter_small", "false", "--training.mixed_precision_param", "bfloat16")
    own, peer, measured = losses(world, tmp_path, *flags)
    assert measured["float8_layers"] == 14
    assert "autocast to bfloat16" in measured["precision"]
    assert peer == pytest.approx(own, abs=5e-3)
