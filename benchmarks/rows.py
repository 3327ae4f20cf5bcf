"""The rows of the table of benchmarks: models, settings and peers, made without any download."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lacuna.data import corpus

Settings = Mapping[str, Mapping[str, Any]]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}
LLAMA_1B = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_8B = LLAMA_1B | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
HALF_8B = LLAMA_8B | {"num_hidden_layers": 16}
LLAMA_340M = LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
QWEN3_600M = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

WHOLE_ROWS = {"data": {"dataset": "python-stdlib", "document_mask": False}}
BY_OPERATION = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
TENSORWISE = {
    "enable_float8_linear": True,
    "recipe_name": "tensorwise",
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
IN_CPU_MEMORY = {"mode": "full", "offload": True, "mlp_chunks": 8}


@dataclass(frozen=True)
class Row:
    """A run to be measured.

    Attributes:
        model: its Hugging Face configuration.
        size: rows of a step on each rank, and tokens in each.
        settings: sections of the TOML, beyond those.
        against: the peer beside it, if there is one that makes the same steps.
        conversations: it is trained on conversations instead of Python's library.
    """

    about: str
    model: Mapping[str, Any]
    size: tuple[int, int]
    settings: Settings
    against: str | None = None
    processes: int = 1
    conversations: bool = False

    def fits(self) -> bool:
        """Whether this machine has as many GPUs as it takes."""
        return torch.cuda.device_count() >= self.processes

    def shrunk(self) -> "Row":
        """The same on the smallest model and rows, for CPUs."""
        settings = {name: dict(section) for name, section in self.settings.items()}
        against = self.against
        if "float8" in settings:
            settings["float8"] |= {"emulate": True, "filter_small": False}
            settings["training"] = {"mixed_precision_param": "bfloat16"}
        if "compile" in settings:
            settings["compile"] = {"enable": False}
        if "parallelism" in settings:
            against = None  # torchtitan's context parallelism needs GPUs
        head = {"head_dim": 16} if "head_dim" in self.model else {}
        return replace(
            self,
            model={**self.model, **TINY, **head},
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
        "model": {"config": str(Path(folder, "model.json")), "tokenizer_path": corpus.NAME},
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


def write_conversations(folder: str, count: int) -> None:
    """JSON lines of a question and an answer, about 1,000 tokens together, with their template.

    They are pieces of Python's library.
    """
    Path(folder, "template.jinja").write_text(TEMPLATE)
    generator = random.Random(0)
    files = corpus.stdlib_files()["train"]
    text = "".join(Path(file).read_text(errors="replace") for file in files)
    with open(Path(folder, "conversations.jsonl"), "w") as output:
        for _ in range(count):
            start = generator.randrange(len(text) - 8000)
            middle = start + generator.randint(200, 600)
            end = middle + generator.randint(1500, 4500)
            messages = [
                {"role": "user", "content": text[start:middle]},
                {"role": "assistant", "content": text[middle:end]},
            ]
            output.write(json.dumps({"messages": messages}) + "\n")


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
    "half-8b": Row(
        "16 layers of Llama 3 8B, FSDP 2, rows of 8,192, recomputation by operation",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS | BY_OPERATION,
        "torchtitan",
        processes=2,
    ),
    "half-8b-float8": Row(
        "half-8b in float8, tensorwise, gathered in float8 with scales computed ahead",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS | BY_OPERATION | {"float8": TENSORWISE},
        "torchtitan",
        processes=2,
    ),
    "half-8b-rowwise": Row(
        "half-8b in float8, rowwise",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS
        | BY_OPERATION
        | {"float8": {"enable_float8_linear": True, "recipe_name": "rowwise"}},
        "torchtitan",
        processes=2,
    ),
    "half-8b-long": Row(
        "16 layers of Llama 3 8B, context parallelism 2, one row of 32,768",
        HALF_8B,
        (1, 32768),
        WHOLE_ROWS | BY_OPERATION | {"parallelism": {"context_parallel_degree": 2}},
        "torchtitan",
        processes=2,
    ),
    "llama-1b-automodel": Row(
        "Llama 3.2 1B's shape, untied, FSDP 2, rows of 8,192, recomputation by operation",
        LLAMA_1B,
        (2, 8192),
        WHOLE_ROWS | BY_OPERATION,
        "automodel",
        processes=2,
    ),
    "half-8b-automodel": Row(
        "half-8b beside NeMo AutoModel",
        HALF_8B,
        (2, 8192),
        WHOLE_ROWS | BY_OPERATION,
        "automodel",
        processes=2,
    ),
    "llama-340m": Row(
        "24 layers of 1,024, 16 heads, vocabulary 32,000, 1 GPU, 16 rows of 4,096",
        LLAMA_340M,
        (16, 4096),
        WHOLE_ROWS | BY_OPERATION,
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
        "LoRA of Llama 3 8B's shape, rank 16, 2 rows of 4,096, recomputation by operation",
        LLAMA_8B,
        (2, 4096),
        WHOLE_ROWS | BY_OPERATION | {"lora": {"rank": 16, "alpha": 32}},
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
        {"mode": "full"},
    ),
}
