"""Small models of flash-linear-attention's, whose kernels are interpreted on a CPU."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import fla_on_cpu
from lacuna.data.fla_models import register_models
from layouts import Case, Outcome, steps
from tiny import VOCABULARY

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"layers": [1], "num_heads": 2, "num_kv_heads": 2, "window_size": 8}
ONE_HEAD = {"hidden_size": 16, "num_heads": 1, "intermediate_size": 32}
"""Where heads are not what is tried: the interpreter computes each by itself."""
OWN_SIZES: dict[str, dict[str, Any]] = {
    "bitnet": {"fuse_norm": True},
    "hgrn2": {"expand_ratio": 16},
    "mamba": {"fuse_norm": True},
    "mamba2": {"fuse_norm": True, "head_dim": 16, "num_heads": 4},
    "mamba3": {"head_dim": 16, "num_heads": 4},
    "nsa": {"head_dim": 16, "num_kv_heads": 1},
    "rodimus": {"attn": WINDOW, "ska_attn": WINDOW},
    "mom": {"aux_loss_scale": 0.0},
    "rwkv7": {"head_dim": 16},
    "samba": {"attn": WINDOW},
}
HYBRID = {"attn": {"layers": [1], "num_heads": 2, "window_size": 8}}


def folder_of(folder: Path, kind: str, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **settings}))
    return folder


def config_of(folder: Path, kind: str, **settings: Any) -> Any:
    register_models(str(folder_of(folder, kind, **settings)))
    return AutoConfig.from_pretrained(folder)


def interpreted_steps(model: Path, cases: list[Case]) -> list[Outcome]:
    fla_on_cpu.interpret()
    return steps(model, cases)
