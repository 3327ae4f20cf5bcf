"""Code of models runs only where it is trusted, chat templates only as far as memory goes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lacuna.config import UserError
from lacuna.config.conversations import ChatConfig
from lacuna.config.sections import ModelConfig
from lacuna.data.chat import end_of_turn, use_template
from lacuna.data.tokenizer import load_tokenizer
from lacuna.formats.convert import convert
from lacuna.formats.huggingface import export_model
from lacuna.formats.opening import load_any_model
from lacuna.model.architecture import load_model_config
from runs import refused
from texts import tokenizer_of_bytes
from tiny import random_model, tiny_config, tokenizer_of_words

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own_llama_of_a_test"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    def forward(self, *inputs, **named):
        made = super().forward(*inputs, **named)
        made.logits = made.logits * 2
        return made
class OwnTokenizerFast(PreTrainedTokenizerFast):
    pass
"""
OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code of its own, which leaves a file `ran` beside it when it runs."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    folder = tmp_path / "own"
    random_model(tiny_config("llama")).save_pretrained(folder)
    tokenizer_of_words().save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    rewrite(folder / "config.json", model_type="own_llama_of_a_test", auto_map=OWN)
    return folder


@pytest.fixture
def own_tokenizer(own: Path) -> Path:
    """Only its tokenizer has code of its own."""
    rewrite(own / "config.json", model_type="llama", auto_map={})
    maps = {"AutoTokenizer": [None, "own.OwnTokenizerFast"]}
    rewrite(own / "tokenizer_config.json", tokenizer_class="OwnTokenizerFast", auto_map=maps)
    return own


def test_code_of_a_model_does_not_run_unless_it_is_trusted(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")  # what transformers would ask
    for words in (
        (
            "train",
            "--model.config",
            "none",
            "--model.name_or_path",
            own,
            "--data.dataset",
            "python-stdlib",
            "--job.dump_folder",
            own.parent / "run",
        ),
        ("generate", own, "--prompt", "w5"),
        ("convert", own, own.parent / "new", "--to", "hf"),
    ):
        said = refused(*words)
        assert "model.trust_remote_code" in said
        assert said.count("lacuna: ") == 1, said
    assert not (own.parent / "ran").exists()


def test_code_of_a_tokenizer_does_not_run_unless_it_is_trusted(
    own_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(UserError, match=r"model\.trust_remote_code"):
        load_tokenizer(str(own_tokenizer))
    assert not (own_tokenizer.parent / "ran").exists()
    assert (
        type(load_tokenizer(str(own_tokenizer), trust_remote_code=True)).__name__
        == "OwnTokenizerFast"
    )


def test_a_trusted_model_is_opened_written_with_its_code_and_opened_again(own: Path) -> None:
    model_config = load_model_config(
        ModelConfig(name_or_path=str(own), trust_remote_code=True), tokenizer_of_words()
    )
    assert type(AutoModelForCausalLM.from_config(model_config)).__name__ == "OwnModel"
    model, tokenizer = load_any_model(str(own), "cpu", trust_remote_code=True)
    ids = torch.arange(4, 20)[None]
    expected = random_model(tiny_config("llama"))(ids).logits * 2
    assert torch.allclose(model(ids).logits, expected)
    export_model(model, tokenizer, str(own.parent / "hf"), torch.float32)
    convert(str(own), str(own.parent / "step-0"), "dcp", trust_remote_code=True)
    for form in ("hf", "step-0"):
        again, _ = load_any_model(str(own.parent / form), "cpu", trust_remote_code=True)
        assert torch.allclose(again(ids).logits, expected)


ENDLESS = {
    "repeated": "{{ 'x' * 10**10 }}",
    "repeated beyond numbers": "{{ 'x' * 10**30 }}",
    "padded": "{{ 'x'.ljust(10**10) }}",
    "doubled": "{% set n = namespace(x='x') %}"
    "{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "long": "{{ 'x' * 10**8 }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_refused_in_one_message(template: str, tmp_path: Path) -> None:
    (tmp_path / "endless.jinja").write_text(template)
    tokenizer = tokenizer_of_bytes()
    with pytest.raises(UserError, match=r"chat\.template") as error:
        use_template(tokenizer, ChatConfig(template=str(tmp_path / "endless.jinja")))
    assert "\n" not in str(error.value)
    assert end_of_turn(tokenizer) == [tokenizer.eos_token_id]


def test_a_chat_by_a_template_without_end_is_refused(tmp_path: Path) -> None:
    random_model(tiny_config("llama")).save_pretrained(tmp_path)
    tokenizer = tokenizer_of_words()
    tokenizer.chat_template = ENDLESS["repeated"]
    tokenizer.save_pretrained(tmp_path)
    assert "more than 256 MiB" in refused("generate", tmp_path, "--chat", "--prompt", "w5")
