"""A checkpoint belongs to no layout: any other loads it, optimizer included, and exports alike."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lacuna.config import Config
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.formats.checkpoint import model_tensors
from lacuna.formats.huggingface import export_model
from lacuna.formats.reader import read_tensors
from lacuna.formats.writer import write_checkpoint
from lacuna.model.build import BuiltModel, build_model
from lacuna.parallel.fsdp import local, own_part
from lacuna.parallel.mesh import Layout
from lacuna.parallel.processes import Process
from lacuna.train.optimizer import build_optimizer, optimizer_tensors
from layouts import pipelined
from tiny import (
    CPU,
    differing,
    mesh_of,
    random_model,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
    whole,
)

pytestmark = pytest.mark.slow  # whole runs of the command line

CASES = {
    "alone": pipelined(Layout(), 4),
    "dp_shard 2": pipelined(Layout(dp_shard=2), 4),
    "dp_replicate 2": pipelined(Layout(dp_replicate=2), 4),
    "tp 2": pipelined(Layout(tp=2), 4),
    "cp 2": pipelined(Layout(cp=2), 4),
    "pp 2": pipelined(Layout(pp=2), 4),
    "pp 2 interleaved": pipelined(Layout(pp=2), 4, "Interleaved1F1B"),
    "dp_shard 3": pipelined(Layout(dp_shard=3), 4),
    "dp_shard 2, tp 2": pipelined(Layout(dp_shard=2, tp=2), 4),
    "tp 2, pp 2": pipelined(Layout(tp=2, pp=2), 4),
    "dp_shard 2, pp 2": pipelined(Layout(dp_shard=2, pp=2), 4),
    "dp_replicate 2, dp_shard 2, tp 2": pipelined(Layout(2, 2, tp=2), 4),
}
SPREAD = {
    "dp_shard 2, ep 2": pipelined(Layout(dp_shard=2, ep=2), 4),
    "dp_shard 4, ep 2": pipelined(Layout(dp_shard=4, ep=2), 4),
    "dp_shard 4, ep 4": pipelined(Layout(dp_shard=4, ep=4), 4),
}
LAYOUTS = CASES | SPREAD


def built_in(
    name: str, model_config: Path, optimizer_name: str
) -> tuple[BuiltModel, dict[str, Tensor], Process]:
    """The model in a layout, and everything of it and its optimizer that a checkpoint holds."""
    case = LAYOUTS[name]
    config = Config(
        model=ModelConfig(config=str(model_config)),
        training=TrainingConfig(seq_len=24),
        optimizer=OptimizerConfig(name=optimizer_name),
        parallelism=case.parallelism,
    )
    group = torch.distributed.group.WORLD
    process = Process(group.rank(), group.size(), CPU, group, group)
    built = build_model(config, tokenizer_of_words(), mesh_of(case.layout), CPU)
    optimizer = build_optimizer(built.model, config.optimizer)
    return built, model_tensors(built.model) | optimizer_tensors(built.model, optimizer), process


def fill(tensors: dict[str, Tensor]) -> None:
    """Gives every tensor, in place, numbers that follow from its name and from the place in it."""
    for name, tensor in tensors.items():
        if tensor.ndim:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            full = torch.rand(tensor.shape, generator=generator)
            local(tensor).copy_(own_part(full, tensor))
        else:
            tensor.fill_(7.0)


def save(names: list[str], model_config: Path, optimizer_name: str, folder: Path) -> None:
    """Writes a checkpoint of each layout; all of them take the same number of ranks."""
    for name in names:
        _, tensors, process = built_in(name, model_config, optimizer_name)
        with torch.no_grad():
            fill(tensors)
        write_checkpoint(str(folder / name), tensors, {"step": 1}, lambda folder: None, process)


def load(
    sources: dict[str, list[str]], model_config: Path, optimizer_name: str, folder: Path
) -> dict[str, list[str]]:
    """By layout those of whose checkpoints this rank's part does not come out as it went in.

    All of the layouts take the same number of ranks. The last that each loads is exported.
    """
    wrong: dict[str, list[str]] = {}
    for name, names in sources.items():
        built, tensors, process = built_in(name, model_config, optimizer_name)
        parts = {key: local(tensor) for key, tensor in tensors.items()}
        with torch.no_grad():
            fill(tensors)
        expected = {key: part.clone() for key, part in parts.items()}
        wrong[name] = []
        for source in names:
            with torch.no_grad():
                for part in parts.values():
                    part.zero_()
            read_tensors(str(folder / source), tensors, process)
            if differing(parts, expected):
                wrong[name].append(source)
        export_model(built.model, tokenizer_of_words(), str(folder / f"{name}-hf"), torch.float32)
    return wrong


def by_ranks(names: Iterable[str]) -> dict[int, list[str]]:
    """The layouts by how many ranks they take, which those that take as many share."""
    found: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        layout = LAYOUTS[name].layout
        found.setdefault(layout.data_parallel * layout.sharing, []).append(name)
    return found


def check(
    pairs: list[tuple[str, str]], architecture: str, folder: Path, optimizer_name: str = "AdamW"
) -> None:
    tiny_config(architecture, num_hidden_layers=4).save_pretrained(folder / "model")
    arguments = folder / "model", optimizer_name, folder
    for ranks, names in by_ranks(source for source, _ in pairs).items():
        run_ranks(ranks, save, names, *arguments)
    exported = {}
    for ranks, names in by_ranks(target for _, target in pairs).items():
        sources = {name: [source for source, target in pairs if target == name] for name in names}
        nothing = {name: [] for name in names}
        assert run_ranks(ranks, load, sources, *arguments) == [nothing] * ranks
        for name in names:
            exported[name] = load_file(folder / f"{name}-hf" / "model.safetensors")
    first, *others = exported.values()
    for other in others:
        assert differing(other, first) == []


def test_a_checkpoint_belongs_to_no_degree_of_expert_parallelism(tmp_path: Path) -> None:
    names = ["alone", "dp_shard 2", *SPREAD]
    pairs = [*zip(names, names[1:] + names[:1], strict=True)]
    check(pairs, "qwen3_moe", tmp_path)


def test_a_checkpoint_of_muon_loads_in_another_layout(tmp_path: Path) -> None:
    pairs = [("dp_shard 2", "tp 2"), ("tp 2, pp 2", "dp_shard 3"), ("dp_replicate 2", "alone")]
    check(pairs, "llama_tied", tmp_path, "Muon")


def loaded(names: list[str], folder: Path) -> dict[str, dict[str, Tensor]]:
    """The whole weights that each layout loads from a Hugging Face folder."""
    found = {}
    for name in names:
        case = LAYOUTS[name]
        config = Config(
            model=ModelConfig(name_or_path=str(folder)),
            training=TrainingConfig(seq_len=24, enable_cpu_offload=case.offload),
            parallelism=case.parallelism,
        )
        built = build_model(config, tokenizer_of_words(), mesh_of(case.layout), CPU)
        found[name] = {
            key: whole(one).detach().clone() for key, one in built.model.named_parameters()
        }
    return found


def test_weights_of_hugging_face_load_into_any_layout_bit_by_bit(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama_tied", num_hidden_layers=4))
    model.save_pretrained(tmp_path)
    for ranks, names in by_ranks(["pp 2", "tp 2, pp 2", "dp_shard 2, tp 2"]).items():
        of_ranks = run_ranks(ranks, loaded, names, tmp_path)
        for name in names:
            tensors: dict[str, Tensor] = {}
            for of_rank in of_ranks:
                tensors |= of_rank[name]
            assert differing(tensors, dict(model.named_parameters())) == [], name


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_weights_of_experts_load_bit_by_bit(kind: str, tmp_path: Path) -> None:
    model = random_model(tiny_config(kind, num_hidden_layers=4), "eager")
    model.save_pretrained(tmp_path)
    for ranks, names in by_ranks(SPREAD).items():
        for of_rank in run_ranks(ranks, loaded, names, tmp_path):
            for name in names:
                assert differing(of_rank[name], dict(model.named_parameters())) == [], name


def test_a_checkpoint_of_any_layout_loads_in_every_other(tmp_path: Path) -> None:
    """Of two layouts one loads what the other saved: each saves for half of them, loads of half."""
    names = [*CASES]
    pairs = [
        (source, names[(place + ahead) % len(names)])
        for place, source in enumerate(names)
        for ahead in range(len(names) // 2 + 1)
    ]
    check(pairs, "llama_tied", tmp_path)
