"""Sizes and FLOPs are as worked out by hand, and a model that does not fit the run is refused."""

from pathlib import Path

import pytest
import torch
from transformers import Emu3Config, PretrainedConfig, ViTConfig, __version__

from every_model import configuration_class, small_config
from lacuna.config import Config, UserError
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.architecture import (
    decoder_layers,
    load_model_config,
    meta_model,
    non_embedding_parameters,
)
from lacuna.model.checks import check_lengths
from lacuna.parallel.mesh import Layout
from tiny import VOCABULARY, tiny_config, tokenizer_of_words

# Llama: width 32, 4 query heads of 8, 2 key-value heads, inner width 48, 2 layers, 97 tokens.
LLAMA_LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
EMBEDDING = 97 * 32
LLAMA = 2 * LLAMA_LAYER + 32 + EMBEDDING
# Qwen3-MoE: 4 heads of 16, 2 key-value heads, norms of queries and keys, a router, 2 of 4 experts
# visited.
MOE_LAYER = 2 * 32 * 64 + 2 * 32 * 32 + 2 * 16 + 4 * 32 + 2 * (3 * 32 * 24) + 2 * 32


def matrix_parameters(architecture: str) -> int:
    return non_embedding_parameters(meta_model(tiny_config(architecture), "eager", torch.float32))


def test_the_head_counts_and_the_embedding_does_not_tied_or_not() -> None:
    assert LLAMA == 18_624
    assert matrix_parameters("llama") == LLAMA
    assert matrix_parameters("llama_tied") == LLAMA


def test_learned_positions_do_not_count() -> None:
    layer = (32 * 96 + 96) + (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32) + 4 * 32
    assert matrix_parameters("gpt2") == 2 * layer + 2 * 32 + EMBEDDING


def test_only_the_experts_that_a_token_visits_count() -> None:
    assert matrix_parameters("qwen3_moe") == 2 * MOE_LAYER + 32 + EMBEDDING
    shared = 3 * 32 * 24 + 32  # the shared expert and its gate, which every token visits
    attention = 2 * 32 * 32 + 2 * 32 * 16 + 32 + 2 * 16
    layer = attention + 4 * 32 + 2 * (3 * 32 * 24) + shared + 2 * 32
    assert matrix_parameters("qwen2_moe") == 2 * layer + 32 + EMBEDDING


OLD = pytest.mark.skipif(__version__ < "5.18", reason="it does not read what it writes of DBRX")
GEMMA = {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("architecture", "settings", "unvisited"),
    [
        ("aria_text", {}, 2 * 3 * 32 * 48),
        pytest.param("dbrx", {}, 3 * 3 * 32 * 48, marks=OLD),
        ("gemma4_text", GEMMA | {"top_k_experts": 1}, 3 * 3 * 32 * 24),
        ("jetmoe", {}, 2 * (3 * 32 * 48 + 2 * 32 * 16)),  # experts of attention among them
    ],
)
def test_the_experts_that_a_token_visits_are_known_by_other_names_too(
    architecture: str, settings: dict[str, int], unvisited: int
) -> None:
    """Of four experts in each of four layers, one or two are visited."""
    own = small_config(configuration_class(architecture), **settings)
    model = meta_model(own, "eager", torch.float32)
    modules = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    head = model.get_output_embeddings().weight
    embedded = sum(one.weight.numel() for one in modules if one.weight is not head)
    every = model.num_parameters() - embedded
    assert every - non_embedding_parameters(model) == pytest.approx(4 * unvisited, rel=0.01)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox", "opt", "bloom", "qwen3_moe"])
def test_the_decoder_layers_are_found(architecture: str) -> None:
    layers = decoder_layers(meta_model(tiny_config(architecture), "eager", torch.float32))
    assert len(layers) == 2
    assert all(
        "Layer" in type(layer).__name__ or "Block" in type(layer).__name__ for layer in layers
    )


def test_documents_longer_than_the_model_has_positions_are_refused() -> None:
    model_config = tiny_config("llama")
    check_lengths(TrainingConfig(seq_len=64), model_config, Layout())
    with pytest.raises(UserError, match=r"training\.seq_len: 65 is more than the 64 positions"):
        check_lengths(TrainingConfig(seq_len=65), model_config, Layout())
    with pytest.raises(
        UserError, match=r"training\.context_len: 128 is more than the 64 positions"
    ):
        training = TrainingConfig(seq_len=256, context_len=128, varlen=True, batch_size=1)
        check_lengths(training, model_config, Layout())


def test_a_long_row_of_short_documents_fits_a_model_with_few_positions() -> None:
    training = TrainingConfig(seq_len=4096, context_len=64, varlen=True, batch_size=1)
    check_lengths(training, tiny_config("llama"), Layout())


def read(folder: Path, key: str = "config") -> PretrainedConfig:
    config = Config(model=ModelConfig(**{key: str(folder)}), training=TrainingConfig(seq_len=32))
    return load_model_config(config.model, tokenizer_of_words())


def test_a_new_model_gets_a_vocabulary_that_holds_every_token(tmp_path: Path) -> None:
    tiny_config("llama", vocab_size=50).save_pretrained(tmp_path / "small")
    tiny_config("llama", vocab_size=128).save_pretrained(tmp_path / "padded")
    assert read(tmp_path / "small").vocab_size == VOCABULARY
    assert read(tmp_path / "padded").vocab_size == 128


def test_a_trained_model_with_too_few_tokens_is_refused(tmp_path: Path) -> None:
    tiny_config("llama", vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"model\.tokenizer_path: the tokenizer has 97 tokens.*only 50"
    ):
        read(tmp_path, "name_or_path")


def test_what_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path / "vision")
    with pytest.raises(UserError, match=r"model\.config: .*'vit' model, which is no causal LM"):
        read(tmp_path / "vision")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"model\.config: cannot read a model configuration"):
        read(tmp_path / "empty")
    with pytest.raises(UserError, match=r"model\.name_or_path: .*no such file or folder here"):
        read(tmp_path / "nowhere", "name_or_path")


def test_a_model_of_which_transformers_makes_no_causal_one_is_refused(tmp_path: Path) -> None:
    """Emu3's language model, in its causal class, is of no class that could be made again."""
    Emu3Config().save_pretrained(tmp_path)
    config = Config(model=ModelConfig(config=str(tmp_path)))
    with pytest.raises(
        UserError, match=r"model\.config: .* is a 'emu3' model, which is no causal LM"
    ):
        load_model_config(config.model, tokenizer_of_words())


def test_a_model_of_several_lists_of_layers_is_refused(tmp_path: Path) -> None:
    small_config(configuration_class("blt")).save_pretrained(tmp_path)
    config = Config(model=ModelConfig(config=str(tmp_path)))
    with pytest.raises(
        UserError, match=r"model\.config: .* is a 'blt' model, which has no single list"
    ):
        load_model_config(config.model, tokenizer_of_words())


def test_the_layers_of_what_sees_are_not_those_of_the_language_model() -> None:
    model = meta_model(small_config(configuration_class("gemma3")), "eager", torch.float32)
    assert len(model.model.vision_tower.encoder.layers) == len(model.model.language_model.layers)
    assert decoder_layers(model) is model.model.language_model.layers
