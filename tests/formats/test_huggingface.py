"""What leaves the house is gathered from all ranks and written by one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from every_model import configuration_class, small_config
from gguf_models import tiny_gguf_model
from lacuna.config.adapters import LoraConfig
from lacuna.formats.adapter import export_adapter
from lacuna.formats.gguf import export_gguf
from lacuna.formats.huggingface import export_model
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.lora import add_adapters
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
    assert {"config.json", "model.safetensors", "adapter"} <= {
        path.name for path in (tmp_path / "rank-0/hf").iterdir()
    }
    written = sorted(path.name for path in (tmp_path / "rank-0/hf/adapter").iterdir())
    assert written == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_weights_that_are_cast_when_they_are_used_are_written_as_they_are_stored(
    tmp_path: Path,
) -> None:
    model = random_model(tiny_config("llama"))
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compute_in(model, torch.bfloat16)
    export_model(model, tokenizer_of_words(), str(tmp_path / "hf"), torch.float32)
    assert differing(load_file(tmp_path / "hf" / "model.safetensors"), stored) == []


@pytest.mark.parametrize("base", ["base", "base.gguf"])
def test_peft_finds_a_local_base_from_any_folder(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    model, tokenizer = tiny_gguf_model("smollm")
    model.save_pretrained("base")
    export_gguf(model, tokenizer, "base.gguf", "F16")
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    export_adapter(model, tokenizer, LoraConfig(rank=2), base, "run/hf/adapter")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    opened = AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "run/hf/adapter", dtype=torch.float32
    )
    ids = torch.arange(4, 20)[None]
    assert torch.allclose(opened(ids).logits, model(ids).logits, atol=2e-2)


def test_a_base_from_the_hub_keeps_its_name(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama"))
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    export_adapter(model, tokenizer_of_words(), LoraConfig(rank=2), "org/model", str(tmp_path))
    assert (
        '"base_model_name_or_path": "org/model"' in (tmp_path / "adapter_config.json").read_text()
    )


def test_adapters_are_merged_in_float32_whatever_is_stored_and_written(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama")).bfloat16()
    base = {name: weight.float() for name, weight in model.named_parameters()}
    add_adapters(model, LoraConfig(rank=2, alpha=4.0), torch.float32)
    learnt = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in learnt.values():
        torch.nn.init.normal_(weight, std=0.1)
    export_model(model, tokenizer_of_words(), str(tmp_path / "hf"), torch.bfloat16)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    for name in (name.removesuffix(".lora_A") for name in learnt if name.endswith(".lora_A")):
        whole = base[f"{name}.weight"] + 2 * learnt[f"{name}.lora_B"] @ learnt[f"{name}.lora_A"]
        assert torch.equal(written[f"{name}.weight"], whole.bfloat16()), name


@pytest.mark.parametrize(
    ("kind", "misread"), [("laguna", True), ("mixtral", False), ("qwen2_moe", False)]
)
def test_an_adapter_that_peft_would_not_read_whole_is_said(
    kind: str, misread: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_config(small_config(configuration_class(kind)))
    add_adapters(model, LoraConfig(rank=2), torch.float32)
    export_adapter(
        model,
        tokenizer_of_words(),
        LoraConfig(rank=2),
        str(tmp_path / "base"),
        str(tmp_path / "adapter"),
    )
    assert ("peft does not find" in caplog.text) == misread
