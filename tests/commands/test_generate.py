"""`lacuna generate` prints the completion and nothing else, the same from every form of a model."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from runs import checkpoint, lacuna, refused, run_to_end, together

PROMPT = "the cat sat "


def generate(model: Path, *flags: object) -> tuple[str, str]:
    """What was printed to standard output and to standard error."""
    ended = run_to_end(
        "generate", model, "--prompt", PROMPT, "--max-new-tokens", 24, *flags, apart=True
    )
    assert ended.status == 0, ended.errors
    return ended.output, ended.errors


@pytest.fixture(scope="module")
def texts(trained: Path) -> dict[str, tuple[str, str]]:
    models = {
        "hf": (trained / "hf",),
        "step": (checkpoint(trained, 80),),
        "run": (trained,),
        "earlier step": (checkpoint(trained, 40),),
        "warm": (trained, "--temperature", 1, "--seed", 3),
        "warm again": (trained, "--temperature", 1, "--seed", 3),
    }
    printed = together(*(lambda words=words: generate(*words) for words in models.values()))
    return dict(zip(models, printed, strict=True))


def test_the_most_likely_text_is_the_same_from_every_form_and_transformers_own(
    texts: dict[str, tuple[str, str]], trained: Path
) -> None:
    model, tokenizer = (
        kind.from_pretrained(trained / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[
        0, inputs.input_ids.shape[1] :
    ]
    assert texts["hf"][0] == tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    assert texts["step"] == texts["run"] == texts["hf"]
    assert texts["earlier step"] != texts["hf"]


def test_a_seed_repeats_its_text(texts: dict[str, tuple[str, str]]) -> None:
    assert texts["warm"] == texts["warm again"]
    assert texts["warm"] != texts["hf"]


def test_nothing_but_the_text_is_printed(texts: dict[str, tuple[str, str]]) -> None:
    assert {errors for _, errors in texts.values()} == {""}
    assert not any(PROMPT in text for text, _ in texts.values())


def test_what_is_no_model_or_no_number_is_refused(trained: Path, tmp_path: Path) -> None:
    outcomes = together(
        lambda: run_to_end("generate", tmp_path / "nowhere", "--prompt", PROMPT),
        lambda: run_to_end("generate", trained),
        lambda: run_to_end("generate", trained, "--prompt", PROMPT, "--temperature", -1),
    )
    said = ("nowhere", "--prompt", "--temperature 0 or from 0.01")
    for outcome, part in zip(outcomes, said, strict=True):
        assert outcome.status == 2, outcome.output
        assert part in outcome.output
        assert outcome.output.count("lacuna: ") == 1
        assert "Traceback" not in outcome.output


def test_a_folder_without_all_weights_is_refused_by_every_command(
    trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained / "hf", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for words in (
        ("generate", folder, "--prompt", PROMPT),
        ("inspect", folder),
        ("convert", folder, tmp_path / "converted", "--to", "hf"),
        ("convert", folder, tmp_path / "converted", "--to", "dcp"),
    ):
        assert "lack model.layers.1.mlp.up_proj.weight" in " ".join(refused(*words).split()), words
    assert not (tmp_path / "converted").exists()


def test_help_has_the_defaults() -> None:
    output = lacuna("generate", "--help")
    assert "--max-new-tokens" in output and "default: 128" in output
