"""Weights are the same in every form they have on disk, and a run may start from any of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lacuna.parallel.processes import alone
from lacuna.train.checkpoint import read_tensors
from runs import checkpoint, curve, lacuna, steps, together, train


@pytest.fixture(scope="module")
def started(world: Path, straight: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three steps each from the same weights in three forms; and a checkpoint converted to Hugging Face's."""
    folder, source, last = tmp_path_factory.mktemp("forms"), straight / "hf", checkpoint(straight, 8)
    short = ("--training.steps", 3)

    def train_from_step_0() -> None:
        lacuna("convert", source, checkpoint(folder / "step-0", 0), "--to", "dcp")
        train(world, folder / "step-0", *short)

    together(
        train_from_step_0,
        lambda: lacuna("convert", last, folder / "converted", "--to", "hf"),
        lambda: train(world, folder / "hf", *short, "--model.config", "none", "--model.name_or_path", source),
        lambda: train(world, folder / "initial_load_path", *short, "--checkpoint.initial_load_path", last),
    )
    return {path.name: path for path in folder.iterdir()}


def test_a_run_from_a_converted_step_0_is_the_run_from_the_hugging_face_folder(
    straight: Path, started: dict[str, Path]
) -> None:
    assert curve(started["step-0"]) == curve(started["hf"])
    assert curve(started["hf"])[0][1] < curve(straight)[0][1] - 0.5, "these weights are trained"


def test_initial_load_path_takes_the_weights_alone_and_counts_steps_from_0(started: dict[str, Path]) -> None:
    keys = ("loss", "grad_norm", "lr", "tokens")
    assert curve(started["initial_load_path"], *keys) == curve(started["hf"], *keys)
    assert [step for step, *_ in curve(started["hf"])] == [1, 2, 3]
    assert steps(started["initial_load_path"]) == [3]


def test_a_converted_checkpoint_is_the_runs_own_model_for_transformers(
    straight: Path, started: dict[str, Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(started["converted"], dtype="auto")
    expected, found = load_file(straight / "hf" / "model.safetensors"), model.state_dict()
    assert set(expected) <= set(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert AutoTokenizer.from_pretrained(started["converted"]).decode(256) == "<end>"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_weights_alone_holds_the_exported_ones(weights_only: Path) -> None:
    exported = load_file(weights_only / "hf" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in exported.values())
    tensors = {f"model.{name}": torch.empty(tensor.shape) for name, tensor in exported.items()}
    read_tensors(str(checkpoint(weights_only, 4)), tensors, alone())
    assert all(torch.equal(tensors[f"model.{name}"], tensor.float()) for name, tensor in exported.items())
