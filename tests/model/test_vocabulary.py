"""A vocabulary grows as transformers grows it in any layout, never shrinks, and is exported."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.data import run_tokenizer
from lacuna.formats.huggingface import export_model
from lacuna.model.architecture import load_model_config
from lacuna.model.build import build_model
from lacuna.parallel.mesh import Layout, build_mesh
from layouts import Case, pipelined
from tiny import (
    CPU,
    VOCABULARY,
    differing,
    random_model,
    run_ranks,
    tiny_config,
    tokenizer_of_words,
    whole,
)

NEW = ("<think>", "</think>", "w5")


class Growth(NamedTuple):
    """A model with `rows` rows in its files, and its number of rows with two tokens more.

    Its tokenizer lacks the two.
    """

    architecture: str
    rows: int
    multiple: int
    grown: int


GROWTHS = (
    Growth("llama", 97, 1, 99),
    Growth("llama_tied", 97, 64, 128),
    Growth("llama", 98, 1, 99),
    Growth("llama_tied", 112, 1, 112),
    Growth("llama", 130, 64, 192),
)
BIASED = Growth("phi", 97, 8, 104)
PREFIXED = Growth("gpt2", 98, 8, 104)
CASES = {
    "alone": Case(),
    "offloaded": Case(offload=True),
    "dp_shard 2": Case(Layout(dp_shard=2)),
    "tp 2": Case(Layout(tp=2)),
    "pp 2": pipelined(Layout(pp=2), 4),
}


def folder_of(growth: Growth, root: Path) -> Path:
    return root / f"{growth.architecture}-{growth.rows}"


def resized(model: PreTrainedModel, growth: Growth) -> PreTrainedModel:
    """The model as transformers resizes it, with its new rows then set.

    They are the mean of those of the tokens before.
    """
    model.resize_token_embeddings(growth.grown, mean_resizing=False)
    head = model.get_output_embeddings()
    with torch.no_grad():
        for rows in {
            id(rows): rows for rows in (model.get_input_embeddings().weight, *head.parameters())
        }.values():
            mean = rows[:VOCABULARY].double().mean(0).float()
            rows[VOCABULARY : VOCABULARY + 2] = mean
            rows[growth.rows :] = mean
    return model


def loaded(case: Case, growths: list[Growth], root: Path) -> list[dict[str, Tensor]]:
    """The whole weights that this rank has a share of; each model is exported as well."""
    models = []
    for growth in growths:
        folder = str(folder_of(growth, root))
        config = Config(
            model=ModelConfig(
                name_or_path=folder, new_tokens=NEW, vocabulary_multiple=growth.multiple
            ),
            training=TrainingConfig(seq_len=24, enable_cpu_offload=case.offload),
            parallelism=case.parallelism,
        )
        mesh = build_mesh(case.layout, "cpu")
        tokenizer = run_tokenizer(config.model, config.conversations)
        built = build_model(config, tokenizer, mesh, CPU)
        assert built.model.config.vocab_size == growth.grown
        export_model(built.model, tokenizer, f"{folder}-out", torch.float32)
        models.append(
            {name: whole(weight).detach() for name, weight in built.model.named_parameters()}
        )
    return models


@pytest.mark.parametrize(
    "name",
    ["pp 2", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "pp 2")],
)
def test_new_rows_are_the_mean_of_those_before_in_any_layout(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    growths = [*GROWTHS, *([BIASED, PREFIXED] if case.layout.sharing == 1 else [])]
    expected = []
    for growth in growths:
        model = random_model(tiny_config(growth.architecture, vocab_size=growth.rows))
        model.save_pretrained(folder_of(growth, tmp_path))
        tokenizer_of_words().save_pretrained(folder_of(growth, tmp_path))
        expected.append(resized(model, growth).eval())
    of_ranks = run_ranks(
        case.layout.data_parallel * case.layout.sharing, loaded, case, growths, tmp_path
    )
    ids = torch.tensor([[97, 5, 96, 98, 3]])
    for growth, model, *parts in zip(growths, expected, *of_ranks, strict=True):
        wanted = dict(model.named_parameters())
        for part in parts:  # the ends of a pipeline each have a tied weight
            assert differing(part, {key: wanted[key] for key in part}) == [], growth
        assert {key for part in parts for key in part} == wanted.keys(), growth
        exported = f"{folder_of(growth, tmp_path)}-out"
        reopened, tokenizer = (
            kind.from_pretrained(exported) for kind in (AutoModelForCausalLM, AutoTokenizer)
        )
        assert tokenizer("<think> w5 w96 </think> <unk>").input_ids == ids[0].tolist()
        with torch.no_grad():
            assert torch.equal(reopened.eval()(ids).logits, model(ids).logits), growth


def vocabulary(folder: Path, key: str, **settings: object) -> int:
    config = Config(
        model=ModelConfig(**{key: str(folder)}, **settings), training=TrainingConfig(seq_len=32)
    )
    tokenizer = run_tokenizer(config.model, config.conversations)
    return load_model_config(config.model, tokenizer).vocab_size


def test_the_vocabulary_only_grows(tmp_path: Path) -> None:
    for rows in (50, 97, 128):
        tiny_config("llama", vocab_size=rows).save_pretrained(tmp_path / str(rows))
        tokenizer_of_words().save_pretrained(tmp_path / str(rows))
    for key in ("config", "name_or_path"):
        assert vocabulary(tmp_path / "97", key) == 97
        assert vocabulary(tmp_path / "97", key, new_tokens=NEW) == 99
        assert vocabulary(tmp_path / "97", key, new_tokens=NEW, vocabulary_multiple=64) == 128
        assert vocabulary(tmp_path / "97", key, vocabulary_multiple=64) == 128
        assert vocabulary(tmp_path / "128", key, new_tokens=NEW) == 128
        assert vocabulary(tmp_path / "128", key, new_tokens=NEW, vocabulary_multiple=50) == 150
    assert vocabulary(tmp_path / "50", "name_or_path", new_tokens=NEW) == 99
    with pytest.raises(
        UserError, match=r"model\.tokenizer_path: the tokenizer has 97 tokens.*only 50"
    ):
        vocabulary(tmp_path / "50", "name_or_path")
