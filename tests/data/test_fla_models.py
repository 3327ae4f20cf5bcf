"""A configuration says by itself that its model is one of fla's, and a missing fla is told."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from lacuna.config import UserError
from lacuna.data.fla_models import is_meant, register_models


def test_names_that_transformers_has_too_are_flas_only_with_flas_settings() -> None:
    assert is_meant({"model_type": "gla"})
    assert is_meant({"model_type": "mamba2", "fuse_norm": True})
    assert not is_meant({"model_type": "mamba2", "state_size": 128})
    assert not is_meant({"model_type": "llama", "fuse_norm": True})


def test_a_missing_fla_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def without_fla(name: str, *rest: Any) -> Any:
        return None if name in ("fla", "triton") else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_fla)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gated_deltanet"}))
    with pytest.raises(UserError, match=r"'gated_deltanet'.* pip install -e '.\[fla\]'"):
        register_models(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    register_models(str(tmp_path))
