"""What a model's files hold beside what the model takes is told, and never dropped in silence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lacuna.config import Config, UserError
from lacuna.config.sections import ModelConfig
from lacuna.formats.opening import open_model
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
