"""The rows of the table of benchmarks: models, settings and peers, made without any download."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from row_models import (
    GLA_340M,
    HALF_8B,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_340M,
    QWEN3_600M,
    QWEN3_MOE_1,
    QWEN3_MOE_2,
    TINY,
    TINY_PARTS,
)

from lacuna.config.documents import BUILT_IN

Settings = Mapping[str, Mapping[str, Any]]

WHOLE_ROWS = {"data": {"dataset": "python-stdlib", "document_mask": False}}
PACKED = {
    "data": {"dataset": "python-stdlib"},
    "training": {"context_len": 4096, "varlen": True},
}
BY_OPERATION = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
FEW_AGAIN = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op/4"}}
PRODUCTS = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "products"}}


def _moved(share: float) -> Settings:
    """All products kept, a share of what layers keep in CPU memory."""
    moved = {"offload": True, "offload_share": share}
    return {"activation_checkpoint": PRODUCTS["activation_checkpoint"] | moved}


def _state_moved(share: float) -> Settings:
    """All products kept, a share of the optimizer's state in CPU memory between updates."""
    return PRODUCTS | {"optimizer": {"state_offload_share": share}}


RECOMPUTED = {"activation_checkpoint": {"mode": "full"}}
FOUR = {"training": {"gradient_accumulation_steps": 4}}
TWO = {"training": {"gradient_accumulation_steps": 2}}
SPREAD = {"parallelism": {"expert_parallel_degree": 2}}
TENSORWISE = {
    "enable_float8_linear": True,
    "recipe_name": "tensorwise",
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}
LARGE = 120.0  # GiB, of which a GPU of 141 GB has more, and one of 80 less
IN_CPU_MEMORY = {"mode": "full", "offload": True, "mlp_chunks": 4}


@dataclass(frozen=True)
class Row:
    """A run to be measured.

    Attributes:
        model: its Hugging Face configuration.
        size: rows of a micro-batch on each rank, and tokens in each.
        settings: sections of the TOML, beyond those.
        against: the peer beside it, if there is one that makes the same steps.
        conversations: it is trained on conversations instead of Python's library.
        gib: memory that each GPU must have, if one of 80 GB has too little.
    """

    about: str
    model: Mapping[str, Any]
    size: tuple[int, int]
    settings: Settings
    against: str | None = None
    processes: int = 1
    conversations: bool = False
    gib: float = 0.0

    def fits(self) -> bool:
        """Whether this machine has as many GPUs as it takes, and as large."""
        if torch.cuda.device_count() < self.processes:
            return False
        return torch.cuda.get_device_properties(0).total_memory >= self.gib * 2**30

    def shrunk(self) -> "Row":
        """The same on the smallest model and rows, for CPUs."""
        settings = {name: dict(section) for name, section in self.settings.items()}
        against = self.against
        if "float8" in settings:
            settings["float8"] |= {"emulate": True, "filter_small": False}
            settings["training"] = {"mixed_precision_param": "bfloat16"}
        if "compile" in settings:
            settings["compile"] = {"enable": False}
        for name in ("offload", "offload_share"):  # which are for compiled layers
            settings.get("activation_checkpoint", {}).pop(name, None)
        if "context_len" in settings.get("training", {}):
            settings["training"]["context_len"] = 64
        if "context_parallel_degree" in settings.get("parallelism", {}):
            against = None  # torchtitan's needs GPUs
        if against == "transformers" and self.processes > 1:
            against = None  # it shards nothing on CPUs
        parts = {name: size for name, size in TINY_PARTS.items() if name in self.model}
        return replace(
            self,
            model={**self.model, **TINY, **parts},
            size=(min(self.size[0], 2), 128),
            settings=settings,
            against=against,
        )

    def write_model(self, folder: str) -> None:
        Path(folder, "model.json").write_text(json.dumps(self.model))


def toml(row: Row, folder: str) -> str:
    """The configuration of a row, whose files are in `folder`."""
    batch_size, seq_len = row.size
    sections: dict[str, dict[str, Any]] = {
        "model": {"config": str(Path(folder, "model.json")), "tokenizer_path": BUILT_IN},
        "training": {"batch_size": batch_size, "seq_len": seq_len},
        "optimizer": {"lr": 1e-4},
        "metrics": {"enable_tensorboard": False},
    }
    if row.conversations:
        sections["job"] = {"task": "sft"}
        sections["data"] = {"dataset": str(Path(folder, "conversations.jsonl"))}
        sections["chat"] = {"template": str(Path(folder, "template.jinja"))}
    for name, section in row.settings.items():
        sections[name] = {**sections.get(name, {}), **section}
    # What Python has here, TOML writes as JSON does.
    lines = [
        "\n".join(
            [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        )
        for name, section in sections.items()
    ]
    return "\n\n".join(lines) + "\n"


def _qlora(about: str, tokens: int, rank: int, rows: int, recomputed: Mapping[str, Any]) -> Row:
    adapters = {"lora": {"rank": rank, "alpha": 2 * rank}, "quantization": {"base": "nf4"}}
    settings = WHOLE_ROWS | adapters | {"activation_checkpoint": recomputed}
    return Row(about, LLAMA_8B, (rows, tokens), settings)


ROWS = {
    "llama-1b": Row(
        "Llama 3.2 1B's shape, untied, 1 GPU, rows of 8,192, recomputation by operation",
        LLAMA_1B,
        (2, 8192),
        WHOLE_ROWS | BY_OPERATION,
        "torchtitan",
    ),
    "llama-1b-products": Row(
        "llama-1b, all products kept; torchtitan recomputes by operation",
        LLAMA_1B,
        (2, 8192),
        WHOLE_ROWS | PRODUCTS,
        "torchtitan",
    ),
    "llama-1b-moved": Row(
        "llama-1b, all products kept, 0.33 of moments in CPU memory; torchtitan recomputes",
        LLAMA_1B,
        (2, 8192),
        WHOLE_ROWS | _state_moved(0.33),
        "torchtitan",
    ),
    "llama-1b-few-again": Row(
        "llama-1b-moved, half of the products of every fourth layer computed again",
        LLAMA_1B,
        (2, 8192),
        WHOLE_ROWS | _state_moved(0.33) | FEW_AGAIN,
        "torchtitan",
    ),
    "half-8b": Row(
        "16 layers of Llama 3 8B, FSDP 2, rows of 8,192, all products kept, 0.41 in CPU memory",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS | _moved(0.41),
        "torchtitan",
        processes=2,
    ),
    "half-8b-float8": Row(
        "half-8b in float8, tensorwise, gathered so, products kept, 0.42 of moments in CPU memory",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS | _state_moved(0.42) | {"float8": TENSORWISE},
        "torchtitan",
        processes=2,
    ),
    "half-8b-rowwise": Row(
        "half-8b in float8, rowwise, all products kept; torchtitan recomputes by operation",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS
        | PRODUCTS
        | {"float8": {"enable_float8_linear": True, "recipe_name": "rowwise"}},
        "torchtitan",
        processes=2,
    ),
    "half-8b-long": Row(
        "half-8b under context parallelism 2, one row of 32,768",
        HALF_8B,
        (1, 32768),
        WHOLE_ROWS | _moved(0.41) | {"parallelism": {"context_parallel_degree": 2}},
        "torchtitan",
        processes=2,
    ),
    "llama-1b-automodel": Row(
        "Llama 3.2 1B's shape, FSDP 2, rows of 8,192, products kept; AutoModel keeps everything",
        LLAMA_1B,
        (2, 8192),
        WHOLE_ROWS | PRODUCTS,
        "automodel",
        processes=2,
    ),
    "half-8b-automodel": Row(
        "16 layers of Llama 3 8B, FSDP 2, the same, for GPUs of 141 GB",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS | PRODUCTS,
        "automodel",
        processes=2,
        gib=LARGE,
    ),
    "llama-340m": Row(
        "24 layers of 1,024, 16 heads, 1 GPU, 16 rows of 4,096, all products kept",
        LLAMA_340M,
        (16, 4096),
        WHOLE_ROWS | PRODUCTS,
        "torchtitan",
    ),
    "qwen3-sft": Row(
        "Qwen3 0.6B's shape, packed conversations of about 1,000 tokens, 4 rows of 8,192",
        QWEN3_600M,
        (4, 8192),
        {},
        conversations=True,
    ),
    "qwen3-sft-trainer": Row(
        "the same model and conversations, 1 row of 8,192, both compiled",
        QWEN3_600M,
        (1, 8192),
        {"compile": {"enable": True}},
        "transformers",
        conversations=True,
    ),
    "lora-8b": Row(
        "LoRA of Llama 3 8B's shape, rank 16, 2 rows of 4,096, nothing recomputed",
        LLAMA_8B,
        (2, 4096),
        WHOLE_ROWS | {"lora": {"rank": 16, "alpha": 32}},
        "automodel",
    ),
    "qlora-8b-40k": _qlora(
        "QLoRA of Llama 3 8B's shape, rank 32, 1 row of 40,960 (goal: 40,724 in 13.6 GB)",
        40960,
        32,
        1,
        IN_CPU_MEMORY,
    ),
    "qlora-8b-78k": _qlora(
        "the same with 78,592 tokens (goal: 78,475 in 20.4 GB)", 78592, 32, 1, IN_CPU_MEMORY
    ),
    "qlora-8b-154k": _qlora(
        "the same with 154,112 tokens (goal: 153,977 in 34 GB)", 154112, 32, 1, IN_CPU_MEMORY
    ),
    "qlora-8b-small": _qlora(
        "QLoRA of Llama 3 8B's shape, rank 8, 2 rows of 2,048 (goal: 6.0 GiB)",
        2048,
        8,
        2,
        {"mode": "full", "offload": True, "mlp_chunks": 2},
    ),
    "qwen3-moe": Row(
        "4 layers of Qwen3-30B-A3B, 1 GPU, 4 x 4 rows of 4,096, recomputation by operation",
        QWEN3_MOE_1,
        (4, 4096),
        WHOLE_ROWS | BY_OPERATION | FOUR,
        "torchtitan",
    ),
    "qwen3-moe-2": Row(
        "8 layers of it, FSDP 2, experts over 2, 2 x 4 rows of 4,096, recomputation by operation",
        QWEN3_MOE_2,
        (4, 4096),
        WHOLE_ROWS | BY_OPERATION | TWO | SPREAD,
        "torchtitan",
        processes=2,
    ),
    "qwen3-moe-2-large": Row(
        "8 layers of it, 2 x 8 rows, nothing recomputed, ZeRO-1, for GPUs of 141 GB",
        QWEN3_MOE_2,
        (8, 4096),
        WHOLE_ROWS | TWO | {"parallelism": SPREAD["parallelism"] | {"zero_stage": 1}},
        processes=2,
        gib=LARGE,
    ),
    "qwen3-moe-trainer": Row(
        "qwen3-moe in 4 x 1 row of 4,096, nothing recomputed",
        QWEN3_MOE_1,
        (1, 4096),
        WHOLE_ROWS | FOUR,
        "transformers",
    ),
    "qwen3-moe-trainer-bfloat16": Row(
        "qwen3-moe in 4 x 2 rows, weights and moments in bfloat16, which its grouped products want",
        QWEN3_MOE_1,
        (2, 4096),
        WHOLE_ROWS | {"training": FOUR["training"] | {"dtype": "bfloat16"}},
        "transformers",
    ),
    "qwen3-moe-2-trainer": Row(
        "8 layers of it, FSDP 2, our experts spread over 2, 2 rows of 4,096, all recomputed",
        QWEN3_MOE_2,
        (2, 4096),
        WHOLE_ROWS | SPREAD | RECOMPUTED,
        "transformers",
        processes=2,
    ),
    "gla-340m": Row(
        "flame's 340M with GLA, 1 GPU, its row of 65,536, packed documents of at most 4,096",
        GLA_340M,
        (1, 65536),
        PACKED,
        "fla",
    ),
    "gla-340m-op": Row(
        "gla-340m, our feed-forward blocks recomputed by operation; fla keeps everything",
        GLA_340M,
        (1, 65536),
        PACKED | BY_OPERATION,
        "fla",
    ),
    "gla-340m-half": Row("gla-340m in rows of 32,768", GLA_340M, (1, 32768), PACKED, "fla"),
}
ROWS["qwen3-moe-2-kept"] = replace(
    ROWS["qwen3-moe-2"],
    about="qwen3-moe-2, nothing recomputed, for GPUs of 141 GB",
    settings=WHOLE_ROWS | TWO | SPREAD,
    gib=LARGE,
)
