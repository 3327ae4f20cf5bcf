"""What transformers rejects of a configuration is one message, and a grown vocabulary is logged."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from lacuna.config import Config, UserError
from lacuna.config.sections import ModelConfig
from lacuna.data import run_tokenizer
from lacuna.model.build import build_meta_model
from lacuna.parallel.mesh import Layout

REJECTED = {
    "padding beyond the vocabulary": (
        {"pad_token_id": 999},
        "Padding_idx must be within num_embeddings",
    ),
    "an unknown activation": ({"hidden_act": "nope"}, "'nope' (KeyError)"),
    "an unknown rotation": ({"rope_parameters": {"rope_type": "nope"}}, "'nope' (KeyError)"),
    "no width": ({"head_dim": 0}, "0.0 cannot be raised to a negative power"),
    "uneven heads": (
        {"hidden_size": 63, "head_dim": None},
        "The hidden size (63) is not a multiple",
    ),
    "no heads": ({"num_attention_heads": 0}, "modulo by zero"),
    "a text": ({"hidden_size": "wide"}, "expected int, got str"),
    "an unknown dtype": ({"dtype": "nope"}, "has no attribute 'nope'"),
    "an unknown kind of layer": ({"layer_types": ["a"]}, "entries must be in"),
}


def plan(folder: Path, world: Path, apart: bool) -> None:
    model = ModelConfig(config=str(folder), tokenizer_path=str(world / "model") if apart else None)
    config = Config(model=model, training={"seq_len": 32})
    tokenizer = run_tokenizer(config.model, config.conversations)
    build_meta_model(config, tokenizer, Layout(), "cpu")


def changed(world: Path, folder: Path, changes: dict[str, Any]) -> Path:
    shutil.copytree(world / "model", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return folder


@pytest.mark.parametrize(
    "apart", [True, False], ids=["a tokenizer elsewhere", "a tokenizer beside it"]
)
@pytest.mark.parametrize("name", REJECTED)
def test_a_configuration_that_transformers_rejects_is_refused(
    name: str, apart: bool, world: Path, tmp_path: Path
) -> None:
    changes, said = REJECTED[name]
    with pytest.raises(UserError) as error:
        plan(changed(world, tmp_path / "model", changes), world, apart)
    assert said in str(error.value) and "mend" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_vocabulary_smaller_than_the_tokenizers_is_said(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lacuna"), "propagate", True)
    with caplog.at_level("WARNING"):
        plan(world / "model", world, apart=False)
        assert "enlarged" not in caplog.text
        plan(
            changed(world, tmp_path / "model", {"vocab_size": 100, "eos_token_id": 9}),
            world,
            apart=True,
        )
    assert (
        "the model's vocabulary is enlarged from 100 to 257 rows: the tokenizer has 257 tokens"
        in caplog.text
    )
