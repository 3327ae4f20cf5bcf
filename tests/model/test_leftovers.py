"""What a model's files hold beside what the model takes is told, and never dropped in silence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lacuna.config import Config, UserError, logger
from lacuna.config.sections import ModelConfig
from lacuna.formats.opening import open_model
from lacuna.model.architecture import meta_model
from lacuna.model.leftovers import check_files
from lacuna.model.scores import make_scoring
from lacuna.model.weights import stored_slices, weight_files
from tiny import random_model, run_ranks, sharded_model, tiny_config, tokenizer_of_words


def write_model(folder: Path, kind: str, **more: torch.Tensor) -> Path:
    """A folder of a tiny model whose file has `more` tensors."""
    model_config = tiny_config(kind)
    random_model(model_config).save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    return folder


def refusal(kind: str, folder: Path) -> str:
    """What is said against loading a model from a folder, in shards; empty where nothing is."""
    settings = Config(model=ModelConfig(name_or_path=str(folder)))
    try:
        sharded_model(tiny_config(kind), settings)
    except UserError as error:
        return str(error)
    return ""


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "llama_tied", **{"lm_head.weight": torch.ones(97, 32)})
    embedding = load_file(other / "model.safetensors")["model.embed_tokens.weight"]
    same = write_model(tmp_path / "same", "llama_tied", **{"lm_head.weight": embedding})
    mend = "set tie_word_embeddings to false in config.json"
    for said in run_ranks(2, refusal, "llama_tied", other):
        assert "lm_head.weight and model.embed_tokens.weight differ" in said
        assert str(other) in said and mend in said
    with pytest.raises(UserError, match=mend):
        open_model(str(other))
    assert run_ranks(1, refusal, "llama_tied", same) == [""]
    open_model(str(same))


def test_whole_layers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    stored = load_file(file)
    third = {key.replace("layers.1.", "layers.2."): value.clone() for key, value in stored.items()}
    save_file(third | stored, file, metadata={"format": "pt"})
    for said in run_ranks(2, refusal, "llama", folder):
        assert "model.layers.2 is in the files" in said
        assert "correct num_hidden_layers in config.json" in said
    with pytest.raises(UserError, match="num_hidden_layers in config.json"):
        open_model(str(folder))


def warnings_of(kind: str, folder: Path) -> list[str]:
    """What is warned of when a model is loaded from a folder."""
    warned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "warning", lambda text, *parts: warned.append(text % parts))
        assert refusal(kind, folder) == ""
    return warned


def test_other_weights_without_a_use_are_counted_and_named(tmp_path: Path) -> None:
    bias = "model.layers.1.self_attn.q_proj.bias"
    more = {bias: torch.ones(32), "adapter_a": torch.ones(1), "vision.z": torch.ones(1)}
    unused = write_model(tmp_path / "unused", "llama", **more)
    [[said]] = run_ranks(1, warnings_of, "llama", unused)
    assert str(unused) in said
    assert f"3 weights that the model has no use for: adapter_a, {bias}, vision.z" in said


def test_buffers_and_layers_that_predict_further_tokens_are_no_leftovers(tmp_path: Path) -> None:
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = write_model(tmp_path / "llama", "llama", **frequencies)
    assert run_ranks(1, warnings_of, "llama", folder) == [[]]
    further = {
        "model.layers.2.eh_proj.weight": torch.ones(32, 64),
        "model.layers.2.mlp.up_proj.weight": torch.ones(48, 32),
    }
    folder = write_model(tmp_path / "deepseek", "deepseek_v3", **further)
    assert run_ranks(1, warnings_of, "deepseek_v3", folder) == [[]]


def test_the_head_of_a_text_model_is_no_leftover_of_a_model_that_scores(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    model_config = tiny_config("llama")
    make_scoring(model_config)
    shadow = meta_model(model_config, "eager", torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "warning", pytest.fail)
        check_files(stored_slices(str(folder)), shadow, "files")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_files_of_an_older_form_are_refused_with_the_command_that_converts_them(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"with: lacuna convert {tmp_path} FOLDER --to hf"):
        weight_files(str(tmp_path))
