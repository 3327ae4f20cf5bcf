"""Initial weights are those that transformers draws itself, however a model is sharded."""

import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from every_model import configuration_class, model_types, small_config
from first_weights import drawn_otherwise
from lacuna.config import Config
from lacuna.config.sections import TrainingConfig
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.initial import draw_weights
from tiny import differing, run_ranks, sharded_model, tiny_config, whole

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


def test_no_two_parts_of_a_model_are_drawn_in_memory_at_a_time() -> None:
    model, shadow = (meta_model(tiny_config("llama"), "eager", torch.float32) for _ in range(2))
    model.to_empty(device="cpu")
    names = {name for name, _ in model.named_parameters()}
    drawn: dict[str, weakref.ref[nn.Parameter]] = {}
    most = 0
    initialize = shadow._initialize_weights

    def look(module: nn.Module, is_remote_code: bool) -> None:
        nonlocal most
        real = [(name, one) for name, one in shadow.named_parameters() if not one.is_meta]
        drawn.update((name, weakref.ref(one)) for name, one in real)
        most = max(most, sum(one() is not None for one in drawn.values()))
        initialize(module, is_remote_code)

    shadow._initialize_weights = look
    draw_weights(model, shadow, names, torch.device("cpu"), SEED)
    assert drawn.keys() == names
    assert most == len([*decoder_layers(model)[0].parameters()])


ODD = ("apertus", "data2vec-text", "falcon_h1", "modernbert-decoder", "openai-gpt", "xlm-roberta")
"""Kinds of models that are harder to initialise.

Their weights or buffers come from constructors, are drawn anew by outer modules, or are tied to
what comes later.
"""


@pytest.mark.parametrize("kind", ODD)
def test_odd_models_are_drawn_as_transformers_draws_them(kind: str) -> None:
    assert drawn_otherwise(small_config(configuration_class(kind))) == []


@pytest.mark.slow
def test_every_causal_model_of_transformers_is_drawn_as_transformers_draws_it() -> None:
    small = {kind: small_config(configuration_class(kind)) for kind in model_types()}
    wrong = {kind: found for kind, one in small.items() if (found := drawn_otherwise(one))}
    assert wrong == {}
