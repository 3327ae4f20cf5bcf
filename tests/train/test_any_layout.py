"""A checkpoint belongs to no layout: any other loads it, optimizer included, and exports alike."""

import itertools
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
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.parallel.processes import Process
from lacuna.train.optimizer import build_optimizer, optimizer_tensors
from layouts import pipelined
from tiny import CPU, differing, random_model, run_ranks, tiny_config, tokenizer_of_words, whole

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
SAMPLE = [
    ("dp_shard 2", "tp 2"),
    ("tp 2", "pp 2"),
    ("pp 2", "alone"),
    ("dp_shard 2, tp 2", "dp_shard 3"),
    ("tp 2, pp 2", "dp_shard 2, pp 2"),
]


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
    built = build_model(config, tokenizer_of_words(), build_mesh(case.layout, "cpu"), CPU)
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


def save(name: str, model_config: Path, optimizer_name: str, path: Path) -> None:
    _, tensors, process = built_in(name, model_config, optimizer_name)
    with torch.no_grad():
        fill(tensors)
    write_checkpoint(str(path), tensors, {"step": 1}, lambda folder: None, process)


def load(
    name: str, model_config: Path, optimizer_name: str, paths: list[Path], target: Path
) -> list[bool]:
    """Whether this rank's part of each checkpoint comes out as it went in.

    The last is exported to `target`.
    """
    built, tensors, process = built_in(name, model_config, optimizer_name)
    parts = {key: local(tensor) for key, tensor in tensors.items()}
    equal = []
    for path in paths:
        with torch.no_grad():
            fill(tensors)
            expected = {key: part.clone() for key, part in parts.items()}
            for part in parts.values():
                part.zero_()
        read_tensors(str(path), tensors, process)
        equal.append(differing(parts, expected) == [])
    export_model(built.model, tokenizer_of_words(), str(target), torch.float32)
    return equal


def check(
    pairs: list[tuple[str, str]], architecture: str, folder: Path, optimizer_name: str = "AdamW"
) -> None:
    tiny_config(architecture, num_hidden_layers=4).save_pretrained(folder / "model")
    for source in dict.fromkeys(source for source, _ in pairs):
        layout = LAYOUTS[source].layout
        arguments = source, folder / "model", optimizer_name, folder / source
        run_ranks(layout.data_parallel * layout.sharing, save, *arguments)
    exported = {}
    for target in dict.fromkeys(target for _, target in pairs):
        layout, sources = (
            LAYOUTS[target].layout,
            [folder / source for source, other in pairs if other == target],
        )
        ranks = layout.data_parallel * layout.sharing
        arguments = target, folder / "model", optimizer_name, sources, folder / f"{target}-hf"
        results = run_ranks(ranks, load, *arguments)
        assert all(itertools.chain(*results)), (target, results)
        exported[target] = load_file(folder / f"{target}-hf" / "model.safetensors")
    first, *others = exported.values()
    for other in others:
        assert other.keys() == first.keys() and all(
            torch.equal(other[key], first[key]) for key in first
        )


def test_a_checkpoint_of_one_layout_loads_in_another(tmp_path: Path) -> None:
    check(SAMPLE, "llama_tied", tmp_path)


def test_a_checkpoint_belongs_to_no_degree_of_expert_parallelism(tmp_path: Path) -> None:
    names = ["alone", "dp_shard 2", *SPREAD]
    pairs = [*zip(names, names[1:] + names[:1], strict=True)]
    check(pairs, "qwen3_moe", tmp_path)


def test_a_checkpoint_of_muon_loads_in_another_layout(tmp_path: Path) -> None:
    pairs = [("dp_shard 2", "tp 2"), ("tp 2, pp 2", "dp_shard 3"), ("dp_replicate 2", "alone")]
    check(pairs, "llama_tied", tmp_path, "Muon")


def loaded(name: str, folder: Path) -> dict[str, Tensor]:
    """The whole weights that a layout loads from a Hugging Face folder."""
    case = LAYOUTS[name]
    config = Config(
        model=ModelConfig(name_or_path=str(folder)),
        training=TrainingConfig(seq_len=24, enable_cpu_offload=case.offload),
        parallelism=case.parallelism,
    )
    built = build_model(config, tokenizer_of_words(), build_mesh(case.layout, "cpu"), CPU)
    return {
        key: whole(parameter).detach().clone() for key, parameter in built.model.named_parameters()
    }


@pytest.mark.parametrize("name", ["pp 2", "tp 2, pp 2", "dp_shard 2, tp 2"])
def test_weights_of_hugging_face_load_into_any_layout_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = random_model(tiny_config("llama_tied", num_hidden_layers=4))
    model.save_pretrained(tmp_path)
    tensors: dict[str, Tensor] = {}
    for of_rank in run_ranks(
        LAYOUTS[name].layout.data_parallel * LAYOUTS[name].layout.sharing, loaded, name, tmp_path
    ):
        tensors |= of_rank
    assert differing(tensors, dict(model.named_parameters())) == []


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("name", [*SPREAD])
def test_weights_of_experts_load_bit_by_bit(name: str, kind: str, tmp_path: Path) -> None:
    model = random_model(tiny_config(kind, num_hidden_layers=4), "eager")
    model.save_pretrained(tmp_path)
    for tensors in run_ranks(SPREAD[name].layout.data_parallel, loaded, name, tmp_path):
        assert differing(tensors, dict(model.named_parameters())) == []


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_loads_in_every_other(tmp_path: Path) -> None:
    check(list(itertools.product(CASES, CASES)), "llama_tied", tmp_path)
