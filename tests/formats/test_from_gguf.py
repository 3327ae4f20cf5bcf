"""A run starts from a GGUF file as from a Hugging Face folder, and becomes a GGUF file again."""

from pathlib import Path

import gguf
import pytest
from transformers import AutoTokenizer

from gguf_models import tiny_gguf_model
from lacuna.formats.convert import convert
from lacuna.formats.gguf import export_gguf
from lacuna.formats.opening import load_any_model
from lacuna.rollout.generate import generate_text
from runs import checkpoint, curve, lacuna, rows, together, train

pytestmark = pytest.mark.slow  # whole runs of the command line


@pytest.fixture(scope="module")
def runs(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with start.gguf and a model made of it, and runs: two processes, one, adapters."""
    folder = tmp_path_factory.mktemp("gguf")
    file, folder_form = folder / "start.gguf", folder / "start"
    export_gguf(*tiny_gguf_model("smollm"), str(file), "Q8_0")
    lacuna("convert", file, folder_form, "--to", "hf")
    short = ("--training.steps", 3, "--model.config", "none", "--model.name_or_path")
    adapted = ("--lora.rank", 2, "--checkpoint.interval", 3)
    together(
        lambda: train(
            world, folder / "of_file", *short, file, "--cpus", 2, "--training.batch_size", 2
        ),
        lambda: train(world, folder / "of_folder", *short, folder_form),
        lambda: train(world, folder / "adapted", *short, file, *adapted),
    )
    return folder


def test_a_run_from_a_file_is_the_run_from_a_folder_on_any_number_of_processes(runs: Path) -> None:
    of_file, of_folder = (curve(runs / name) for name in ("of_file", "of_folder"))
    assert [row[1] for row in of_file] == pytest.approx([row[1] for row in of_folder], rel=1e-5)
    assert str(runs / "start.gguf") in (runs / "of_file" / "config.toml").read_text()
    assert [row["step"] for row in rows(runs / "adapted")] == [1, 2, 3]
    assert AutoTokenizer.from_pretrained(runs / "of_file" / "hf").chat_template


def test_what_was_trained_becomes_a_file_that_answers_the_same(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", runs / "cache")
    kinds = {
        runs / "of_file": "F16",
        checkpoint(runs / "adapted", 3): "BF16",
        runs / "start.gguf": "F16",
    }
    for source, kind in kinds.items():
        again = str(runs / f"{source.stem}-again.gguf")
        convert(str(source), again, "gguf", kind)
        before, after = (load_any_model(str(name), "cpu")[:2] for name in (source, again))
        # In one dtype: bfloat16 and float16 decide ties otherwise.
        answers = [
            generate_text(model.float(), tokenizer, "def read(self", 12, 0.0, 0, False)
            for model, tokenizer in (before, after)
        ]
        assert answers[0] == answers[1] != ""
    fields = gguf.GGUFReader(runs / "of_file-again.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_F16
