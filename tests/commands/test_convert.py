"""`lacuna convert` takes weights, tokenizer and generation settings between forms and back."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from runs import (
    SOURCE,
    checkpoint,
    curve,
    environment,
    lacuna,
    run_to_end,
    together,
    train,
    weights,
)


@pytest.fixture(scope="module")
def converted(trained: Path, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models made of the trained one.

    `hf` is made of its checkpoint, `half` of a checkpoint that was made of its `hf`.

    `started` is a run that starts from that checkpoint, which is its step-0.
    """
    folder = tmp_path_factory.mktemp("converted")
    together(
        lambda: lacuna("convert", checkpoint(trained, 80), folder / "hf", "--to", "hf"),
        lambda: lacuna(
            "convert", trained / "hf", folder / "started" / "checkpoint" / "step-0", "--to", "dcp"
        ),
    )
    step_0 = checkpoint(folder / "started", 0)
    _, output = together(
        lambda: lacuna("convert", step_0, folder / "half", "--to", "hf", "--dtype", "bfloat16"),
        lambda: train(world, folder / "started", "--training.steps", 1, "--optimizer.lr", 0),
    )
    assert f"starting from the weights in {step_0}" in output
    return folder


@pytest.mark.parametrize(("name", "dtype"), [("hf", torch.float32), ("half", torch.bfloat16)])
def test_weights_survive_every_conversion_to_the_bit(
    name: str, dtype: torch.dtype, trained: Path, converted: Path
) -> None:
    source, target = (
        load_file(folder / "model.safetensors") for folder in (trained / "hf", converted / name)
    )
    assert source.keys() == target.keys()
    assert all(torch.equal(target[key], weight.to(dtype)) for key, weight in source.items())


@pytest.mark.parametrize(("name", "dtype"), [("hf", torch.float32), ("half", torch.bfloat16)])
def test_transformers_opens_what_is_written(
    name: str, dtype: torch.dtype, trained: Path, converted: Path
) -> None:
    folder = converted / name
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    text = "the cat sat on"
    assert (
        tokenizer(text).input_ids == AutoTokenizer.from_pretrained(trained / "hf")(text).input_ids
    )
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 256


def test_a_run_starts_from_the_weights_in_its_step_0(trained: Path, converted: Path) -> None:
    folder = converted / "started"
    assert curve(folder)[0][1] < 0.75 * curve(trained)[0][1], "it has learnt already"
    assert weights(folder) == weights(trained), "its one step was of length 0"


def test_what_cannot_be_converted_is_refused_and_nothing_is_touched(
    trained: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "there").mkdir()
    absent = tmp_path_factory.mktemp(
        "absent"
    )  # before all else on the path, as if the package were not installed
    (absent / "gguf.py").write_text(
        "raise ModuleNotFoundError('No module named gguf', name='gguf')\n"
    )
    without_package = environment(PYTHONPATH=f"{absent}{os.pathsep}{SOURCE}")
    outcomes = together(
        lambda: run_to_end("convert", trained, tmp_path / "there", "--to", "hf"),
        lambda: run_to_end("convert", trained, tmp_path / "there", "--to", "gguf"),
        lambda: run_to_end("convert", trained, tmp_path / "new", "--to", "onnx"),
        lambda: run_to_end("convert", trained, tmp_path / "new", "--to", "hf", "--type", "F16"),
        lambda: run_to_end(
            "convert", trained, tmp_path / "new", "--to", "gguf", "--dtype", "float32"
        ),
        lambda: run_to_end(
            "convert", trained, tmp_path / "new", "--to", "gguf", "--type", "Q4_K_M"
        ),
        lambda: run_to_end("convert", trained, tmp_path / "new", "--to", "gguf", "--type", "Q8_0"),
        lambda: run_to_end("convert", tmp_path / "odd.gguf", tmp_path / "new", "--to", "hf"),
        lambda: run_to_end(
            "convert", trained, tmp_path / "new", "--to", "gguf", env=without_package
        ),
    )
    said = (
        "there exists already",
        "there exists already",
        "onnx",
        "--type is for --to gguf",
        "--to gguf takes --type",
        "Q4_K_M is left to llama.cpp's llama-quantize",
        "the tokenizer has no merges",
        "odd.gguf: cannot be read as a GGUF model: No such file",
        "pip install -e '.[gguf]' -c constraints.txt",
    )
    for outcome, part in zip(outcomes, said, strict=True):
        assert outcome.status == 2, outcome.output
        assert part in outcome.output
        assert outcome.output.count("lacuna: ") == 1
        assert "Traceback" not in outcome.output
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert list((tmp_path / "there").iterdir()) == []
