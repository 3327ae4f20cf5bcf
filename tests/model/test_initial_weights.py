"""Initial weights are those that transformers draws itself, however a model is sharded."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from every_model import configuration_class, model_types, small_config
from lacuna.config import Config
from lacuna.config.adapters import LoraConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.architecture import meta_model
from lacuna.model.layers.lora import trained_names
from lacuna.model.weights import fill_model
from tiny import CPU, differing, run_ranks, sharded_model, tiny_config, whole

SEED = 7
ARCHITECTURES = ("llama", "llama_tied", "qwen3", "gemma", "mistral", "gpt2", "neox", "qwen2_moe")


def transformers_model(model_config: PretrainedConfig) -> PreTrainedModel:
    """An unsharded model that transformers initialises right after seeding: drawn, then tied."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model.to_empty(device="cpu")
    torch.manual_seed(SEED)
    model.initialize_weights()
    model.tie_weights()
    return model


def check_initial_weights(architecture: str) -> None:
    model_config = tiny_config(architecture)
    expected = transformers_model(model_config)
    model = sharded_model(model_config, Config(training=TrainingConfig(seed=SEED)))
    parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}
    assert differing(parameters, dict(expected.named_parameters())) == [], architecture
    buffers = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).named_buffers()
    assert differing(dict(model.named_buffers()), dict(buffers)) == [], architecture
    embedding = whole(model.get_input_embeddings().weight)
    assert embedding.std() > 0, architecture
    if model.get_input_embeddings().padding_idx is not None:
        assert not embedding[model_config.pad_token_id].any(), (
            f"{architecture}: the padding row is not zero"
        )
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == model_config.tie_word_embeddings, architecture


def check_all_architectures() -> None:
    for architecture in ARCHITECTURES:
        check_initial_weights(architecture)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_weights_and_buffers_are_bit_equal_to_those_of_transformers(ranks: int) -> None:
    run_ranks(ranks, check_all_architectures)


def draw_twice() -> list[torch.Tensor]:
    model_config = tiny_config("llama")
    models = [
        sharded_model(model_config, Config(training=TrainingConfig(seed=seed))) for seed in (1, 2)
    ]
    return [whole(model.lm_head.weight).detach() for model in models]


def test_another_seed_gives_other_weights() -> None:
    first, second = run_ranks(1, draw_twice)[0]
    assert not torch.equal(first, second)


ODD = ("apertus", "data2vec-text", "falcon_h1", "modernbert-decoder", "openai-gpt", "xlm-roberta")
"""Kinds of models that are harder to initialise.

Their weights or buffers come from constructors, are drawn anew by outer modules, or are tied to
what comes later.
"""


def otherwise(own: Tensor, ours: Tensor) -> bool:
    """Whether a tensor is not what transformers makes, or not drawn from the same distribution."""
    if own.shape != ours.shape or own.dtype != ours.dtype:
        return True
    if torch.equal(own, ours):
        return False
    if (
        not own.is_floating_point()
        or not own.is_contiguous()
        or own.std() == 0
        or not ours.isfinite().all()
    ):
        return True
    wide = own.double().std()
    few = own.numel() ** -0.5
    return bool(
        abs(ours.double().std() / wide - 1) > 6 * few
        or abs(ours.double().mean() - own.double().mean()) > 8 * wide * few
    )


def made_otherwise(kind: str) -> list[str]:
    """The tensors of a small model of a kind that are not drawn as its constructor draws them."""
    model_config = small_config(configuration_class(kind))
    torch.manual_seed(1)
    own = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    model = meta_model(model_config, "eager", torch.float32)
    source = ModelConfig(config="any")
    fill_model(model, trained_names(model), source, LoraConfig(), TrainingConfig(), CPU, fill=True)
    expected = own.state_dict() | dict(own.named_buffers())
    found = model.state_dict() | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    wrong = [
        name
        for name in expected
        if expected[name].numel() > 8 and otherwise(expected[name], found[name])
    ]
    return wrong


@pytest.mark.parametrize("kind", ODD)
def test_odd_models_are_drawn_as_transformers_draws_them(kind: str) -> None:
    assert made_otherwise(kind) == []


@pytest.mark.slow
def test_every_causal_model_of_transformers_is_drawn_as_transformers_draws_it() -> None:
    wrong = {kind: found for kind in model_types() if (found := made_otherwise(kind))}
    assert wrong == {}
