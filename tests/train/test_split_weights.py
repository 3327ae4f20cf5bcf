"""Weights in halves are trained as whole ones, and are whole wherever they are kept."""

# ruff: noqa: E402

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

ON_GPU = torch.cuda.is_available()
# The variable must be there before anything imports Triton.
if importlib.util.find_spec("triton") is None or not (
    ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"
):
    pytest.skip("needs triton and a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from every_model import NO_SPECIMEN, configuration_class, model_types, small_config
from lacuna.config import Config
from lacuna.config.sections import TrainingConfig
from lacuna.model.architecture import decoder_layers
from lacuna.model.build import BuiltModel
from lacuna.model.layers.casting import compute_in
from lacuna.train.exports import exports_of
from lacuna.train.one_kernel import OneKernelAdamW
from lacuna.train.optimizer import WholeWeights
from lacuna.train.split_weights import (
    SplitWeights,
    halves_of,
    split_weights,
    weights_to_split,
    whole_of,
)
from tiny import random_model, tiny_config, tokenizer_of_words

DEVICE = "cuda" if ON_GPU else "cpu"
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
# Their own code takes no weights that are cast, or wants images.
NOT_BY_THEMSELVES = {"git", "minimax", "openai-gpt", "prophetnet", "xglm", "xlstm"}


def all_kinds_of_numbers() -> Tensor:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (1_000_000,), dtype=torch.int32)
    bits = torch.cat([bits, (bits << 16) | 0x8000, bits << 16])  # ties, and what bfloat16 has
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45])
    return torch.cat([bits.view(torch.float32), special])


def test_halves_are_what_a_cast_gives_and_the_rest() -> None:
    numbers = all_kinds_of_numbers()
    near, rest = halves_of(numbers)
    joined = whole_of(near, rest)
    is_number = ~numbers.isnan()
    assert torch.equal(near[is_number], numbers[is_number].bfloat16())
    assert near[~is_number].isnan().all()
    assert joined[~is_number].isnan().all()
    bits = (joined[is_number].view(torch.int32) - numbers[is_number].view(torch.int32)).abs()
    assert bits.max() == 1, "only of ties the last bit changes"
    again = whole_of(*halves_of(joined))
    assert torch.equal(again[is_number].view(torch.int32), joined[is_number].view(torch.int32))


def built(model: nn.Module) -> BuiltModel:
    """As much of a built model as says in what it computes."""
    training = TrainingConfig(mixed_precision_param="bfloat16")
    return cast(Any, SimpleNamespace(model=model, training=training, device=torch.device(DEVICE)))


def trained(split: bool, steps: int, micro_batches: int, tied: bool) -> dict[str, Tensor]:
    """The weights and state after steps of a tiny model that computes in bfloat16."""
    model = random_model(tiny_config("llama", tie_word_embeddings=tied)).to(DEVICE).train()
    compute_in(model, torch.bfloat16)
    optimizer = OneKernelAdamW(model.parameters(), **SETTINGS)
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, backend="eager")
    halves = split_weights(built(model), optimizer) if split else WholeWeights()
    assert isinstance(halves, SplitWeights) == split
    for step in range(steps):
        with halves.accumulate(micro_batches):
            for micro_batch in range(micro_batches):
                torch.manual_seed(10 * step + micro_batch)
                # Of other lengths the compiler compiles anew.
                ids = torch.randint(0, 60, (2, 16 + 2 * micro_batch), device=DEVICE)
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with halves.joined():
                assert all(one.dtype == torch.float32 for one in model.parameters())
    with halves.joined():
        found = {name: one.detach().clone() for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        found |= {f"{name} {key}": value for key, value in optimizer.state[one].items()}
    return found


@pytest.mark.parametrize(("micro_batches", "tied"), [(1, False), (1, True), (3, False)])
def test_training_is_that_of_whole_weights(micro_batches: int, tied: bool) -> None:
    whole, split = (trained(one, 4, micro_batches, tied) for one in (False, True))
    assert whole.keys() == split.keys()
    for name, expected in whole.items():
        assert split[name].dtype == expected.dtype == torch.float32, name
        torch.testing.assert_close(split[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def split_model() -> tuple[nn.Module, OneKernelAdamW, SplitWeights]:
    model = random_model(tiny_config("llama", tie_word_embeddings=False)).to(DEVICE)
    compute_in(model, torch.bfloat16)
    optimizer = OneKernelAdamW(model.parameters(), **SETTINGS)
    weights = weights_to_split(model, torch.device(DEVICE))
    return model, optimizer, SplitWeights(model, weights, optimizer)


def test_matrices_but_the_embedding_are_split_and_take_no_more_memory() -> None:
    model, _, halves = split_model()
    dtypes = {name: one.dtype for name, one in model.named_parameters()}
    matrices = {name for name in dtypes if name.endswith("_proj.weight")}
    halved = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert halved == matrices | {"lm_head.weight"}
    before = [one.untyped_storage().nbytes() for one in model.parameters()]
    assert before == [4 * one.numel() for one in model.parameters()]
    places = [one.data_ptr() for one in model.parameters()]
    with halves.joined():
        assert [one.data_ptr() for one in model.parameters()] == places
    assert [one.data_ptr() for one in model.parameters()] == places


@pytest.mark.parametrize(
    ("kind", "whole"), [("cohere", "q_norm.weight"), ("mamba", "A_log"), ("gpt_oss", "_bias")]
)
def test_what_is_no_matrix_stays_whole_whatever_its_shape(kind: str, whole: str) -> None:
    small = small_config(configuration_class(kind))
    if kind == "cohere":
        small.use_qk_norm = True
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).to(DEVICE)
    compute_in(model, torch.bfloat16)
    split = {id(one) for one in weights_to_split(model, torch.device(DEVICE))}
    named = dict(model.named_parameters())
    of_kind = [one for name, one in named.items() if name.endswith(whole) and one.ndim > 1]
    assert split and of_kind
    assert not split & {*map(id, of_kind)}


def test_joined_weights_come_back_to_the_bit() -> None:
    model, _, halves = split_model()
    found = []
    for _ in range(2):
        with halves.joined():
            found.append([one.detach().clone() for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_exports_have_whole_weights(tmp_path: Path) -> None:
    model, _, halves = split_model()
    with halves.joined():
        whole = {name: one.detach().clone() for name, one in model.named_parameters()}
    run: Any = SimpleNamespace(
        config=Config(checkpoint={"export_dtype": "float32"}),
        built=built(model),
        tokenizer=tokenizer_of_words(),
        halves=halves,
    )
    for write in exports_of(run, str(tmp_path)):
        write()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, one in exported.named_parameters():
        assert torch.equal(one, whole[name].cpu()), name
    assert model.lm_head._parameters["weight"].dtype == torch.bfloat16


def test_weights_are_in_halves_again_after_a_failure() -> None:
    model, optimizer, halves = split_model()
    with pytest.raises(OSError), halves.joined():
        raise OSError("the disk is full")
    assert model.lm_head._parameters["weight"] in optimizer.rests
    # What a pass had found before a loss of somebody's own raised an error.
    with pytest.raises(OSError), halves.accumulate(micro_batches=2):
        ids = torch.arange(8, device=DEVICE)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        model.lm_head._parameters["weight"].grad = model.lm_head.weight.detach().clone()
        raise OSError("a server is gone")
    with halves.joined():
        assert all(one.dtype == torch.float32 for one in model.parameters())
        assert not any(weight.grad is not None for weight in halves.memory)
    assert not halves.sums


def test_a_weight_that_is_no_number_stays_none_in_both_halves() -> None:
    model, optimizer, halves = split_model()
    weight = model.lm_head._parameters["weight"]
    weight.grad = torch.full_like(weight, torch.nan)
    optimizer.step()
    assert weight.isnan().all()
    optimizer.zero_grad()
    with halves.joined():
        assert weight.isnan().all()


@pytest.mark.parametrize("kind", ["frozen", "float64"])
def test_weights_that_do_not_suit_stay_whole(kind: str) -> None:
    model = random_model(tiny_config("llama"))
    if kind == "frozen":
        model.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True)
    else:
        model.model.norm.double()
    compute_in(model, torch.bfloat16)
    learning = [one for one in model.parameters() if one.requires_grad]
    optimizer = OneKernelAdamW(learning, **SETTINGS)
    assert isinstance(split_weights(built(model), optimizer), WholeWeights)


def test_a_model_that_does_not_run_by_itself_keeps_its_weights_whole_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="lacuna")
    model = AutoModelForCausalLM.from_config(small_config(configuration_class("prophetnet")))
    compute_in(model.to(DEVICE), torch.bfloat16)
    optimizer = OneKernelAdamW(model.parameters(), **SETTINGS)
    assert isinstance(split_weights(built(model), optimizer), WholeWeights)
    assert "weights stay whole" in caplog.text


def gradients(kind: str, halve: bool) -> dict[str, Tensor]:
    """Those of the weights of a model in small that computes in bfloat16."""
    torch.manual_seed(0)
    small = small_config(configuration_class(kind))
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).to(DEVICE).train()
    compute_in(model, torch.bfloat16)
    if halve:
        optimizer = OneKernelAdamW(model.parameters(), **SETTINGS)
        assert isinstance(split_weights(built(model), optimizer), SplitWeights)
    ids = torch.arange(3, 27, device=DEVICE).view(2, 12)
    torch.manual_seed(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*model_types()} - NO_SPECIMEN - NOT_BY_THEMSELVES))
def test_every_model_has_the_gradients_of_whole_weights(kind: str) -> None:
    whole = gradients(kind, halve=False)
    split = gradients(kind, halve=True)
    assert whole.keys() == split.keys()
    wrong = [name for name in whole if not torch.equal(whole[name], split[name].float())]
    assert not wrong, wrong
