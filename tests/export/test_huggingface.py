"""What leaves the house is gathered from all ranks and written by one."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from lacuna.config.sections import LoraConfig
from lacuna.export.huggingface import export_adapter, export_model
from lacuna.model.lora import add_adapters
from lacuna.parallel.fsdp import compute_in
from tiny import differing, random_model, run_ranks, tiny_config, tokenizer_of_words


def export_beside(root: Path) -> None:
    """Exports an adapted model to a folder of each rank's own."""
    own, settings = root / f"rank-{dist.get_rank()}", LoraConfig(rank=2)
    model = random_model(tiny_config("llama"))
    add_adapters(model, settings, torch.float32)
    export_model(model, tokenizer_of_words(), str(own / "hf"), torch.float32)
    export_adapter(model, tokenizer_of_words(), settings, None, str(own / "hf" / "adapter"))


def test_only_the_first_rank_writes_a_model_and_its_adapter(tmp_path: Path) -> None:
    run_ranks(2, export_beside, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0"]
    assert {"config.json", "model.safetensors", "adapter"} <= {path.name for path in (tmp_path / "rank-0/hf").iterdir()}
    written = sorted(path.name for path in (tmp_path / "rank-0/hf/adapter").iterdir())
    assert written == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_weights_that_are_cast_when_they_are_used_are_written_as_they_are_stored(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama"))
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compute_in(model, torch.bfloat16)
    export_model(model, tokenizer_of_words(), str(tmp_path / "hf"), torch.float32)
    assert differing(load_file(tmp_path / "hf" / "model.safetensors"), stored) == []
