"""What torchtitan cannot do as lacuna does is refused by name before anything is measured."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from runs import refused, write_model

WHOLE = ("--data.document_mask", "false")


def refusal(world: Path, folder: Path, *flags: object) -> str:
    words = ("bench", world / "run.toml", "--output", folder, "--against", "torchtitan")
    return refused(*words, *flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "set data.document_mask = false"),
        ((*WHOLE, "--lora.rank", 4), "has nothing like lora.rank=4"),
        (
            (
                *WHOLE,
                "--activation_checkpoint.mode",
                "full",
                "--activation_checkpoint.mlp_chunks",
                2,
            ),
            "mlp_chunks=2",
        ),
        ((*WHOLE, "--model.attention", "eager"), "has nothing like model.attention=eager"),
        ((*WHOLE, "--model.attention", "softpick"), "has nothing like model.attention=softpick"),
        ((*WHOLE, "--optimizer.name", "Muon"), "has nothing like optimizer.name=Muon"),
        ((*WHOLE, "--float8.enable_float8_linear", "--float8.filter_fqns", "mlp"), "filter_fqns"),
        (
            (*WHOLE, "--parallelism.context_parallel_degree", 2, "--cpus", 2),
            "leave out parallelism.context_parallel_degree",
        ),
        (
            (*WHOLE, "--parallelism.tensor_parallel_degree", 2, "--cpus", 2),
            "has nothing like parallelism.tensor_parallel_degree=2",
        ),
        (
            (
                *WHOLE,
                "--float8.enable_float8_linear",
                "--float8.emulate",
                "--compile.enable",
                "true",
            ),
            "leave out float8.emulate",
        ),
        (
            (*WHOLE, "--float8.enable_float8_linear", "--float8.recipe_name", "rowwise_with_gw_hp"),
            "set float8.filter_small = false",
        ),
    ],
)
def test_settings_that_torchtitan_lacks_are_refused(
    flags: tuple[object, ...], named: str, world: Path, tmp_path: Path
) -> None:
    assert named in refusal(world, tmp_path, *flags)


TINY = {"vocab_size": 257, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA = TINY | {"intermediate_size": 128}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=257), "gpt2 models are not among"),
        (LlamaConfig(**LLAMA, tie_word_embeddings=True), "no tied embeddings"),
        (LlamaConfig(**LLAMA, attention_bias=True), "attention_bias"),
        (LlamaConfig(**LLAMA, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**LLAMA, hidden_act="gelu"), "hidden_act"),
        (LlamaConfig(**LLAMA, head_dim=32), "head_dim"),
        (
            LlamaConfig(
                **LLAMA, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rope_type = linear",
        ),
        (Qwen3Config(**LLAMA, head_dim=16, use_sliding_window=True), "sliding windows"),
        (Qwen3MoeConfig(**LLAMA, head_dim=16, decoder_sparse_step=2), "decoder_sparse_step"),
        (Qwen3MoeConfig(**LLAMA, head_dim=16, mlp_only_layers=[1]), "mlp_only_layers"),
        (Qwen3MoeConfig(**LLAMA, head_dim=16, output_router_logits=True), "output_router_logits"),
    ],
)
def test_models_that_torchtitan_lacks_are_refused(
    model: Any, named: str, world: Path, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    model.save_pretrained(folder)
    assert named in refusal(world, tmp_path, *WHOLE, "--model.config", folder)


def test_tied_embeddings_are_refused_where_weights_are_sharded(world: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True).save_pretrained(folder)
    sharded = (*WHOLE, "--model.config", folder, "--cpus", 2)
    assert "does not keep embeddings tied" in refusal(world, tmp_path, *sharded)


def test_experts_in_float8_are_refused_beside_torchtitans(world: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    Qwen3MoeConfig(**LLAMA, head_dim=16).save_pretrained(folder)
    words = (*WHOLE, "--model.config", folder, "--float8.enable_float8_linear")
    assert 'set float8.filter_fqns = ["experts"]' in refusal(world, tmp_path, *words)
    words += ("--float8.filter_fqns", "experts")
    assert "experts" not in refusal(world, tmp_path, *words)


def test_a_peer_that_is_not_installed_is_named_with_its_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install torchtitan==0.2.2 triton" in refusal(world, tmp_path, *WHOLE)


def test_models_that_are_not_flas_are_refused_beside_its_loop(world: Path, tmp_path: Path) -> None:
    words = ("bench", world / "run.toml", "--output", tmp_path, "--against", "fla")
    assert "llama models are not fla's" in refused(*words)
