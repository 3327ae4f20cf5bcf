"""No packed document sees another, and the attention chosen is one that the run can have."""

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.model import attention as attention_module
from lacuna.model.attention import PACKED, packed_attention
from lacuna.model.attention_choice import attention_choices
from lacuna.model.forward import attach_forward, hidden_states, loss_sums
from lacuna.model.head import Head, probe_head
from lacuna.model.inputs import Inputs, packing_arguments
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.context import causal_parts
from lacuna.parallel.mesh import Layout
from tiny import CPU, VOCABULARY, random_model, relative_error, run_ranks, tiny_config

ROWS = ((5, 9, 2), (7, 1, 8))  # documents longer and shorter than the sliding window of 4
LENGTH = 16
ISOLATING = (
    "llama",
    "qwen3",
    "gemma",
    "gemma3",
    "mistral",
    "gpt2",
    "neox",
    "cohere",
    "granite",
    "phi",
    "qwen3_moe",
)
EAGER = ("llama", "gemma2", "gemma3", "mistral", "gpt2", "qwen3_moe")
EXACT = 5e-6
ALONE = Layout()


def packed_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, positions and labels [2, 16], and the bounds of the documents in the flattened order."""
    ids = torch.arange(len(ROWS) * LENGTH).view(len(ROWS), LENGTH) * 13 % VOCABULARY
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS])
    labels = ids.roll(-1, dims=1).masked_fill(positions.roll(-1, dims=1) == 0, -100)
    ends = torch.tensor([length for row in ROWS for length in row]).cumsum(0)
    return ids, positions, labels, torch.cat([torch.zeros(1), ends]).int()


def documents() -> Iterator[tuple[int, slice]]:
    """Row and place of each document."""
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            yield row, slice(start, start + length)
            start += length


def prepared(architecture: str, attention: str) -> PreTrainedModel:
    return random_model(tiny_config(architecture), attention)


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def packed_results(model: PreTrainedModel, head: Head) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Hidden states, summed loss and gradients of the packed batch, as training makes them."""
    ids, positions, labels, bounds = packed_batch()
    told = packing_arguments(model.config._attn_implementation, bounds, 9, LENGTH, CPU)
    inputs = Inputs({"input_ids": ids, "position_ids": positions, **told}, {"labels": labels})
    with torch.no_grad():
        states = hidden_states(model, inputs)
    attach_forward(model)
    loss = model.run_forward(loss_sums, head, inputs, LanguageModelling.loss)[0]
    loss.backward()
    return states, loss.item(), gradients_of(model)


def results_alone(model: PreTrainedModel) -> tuple[Tensor, float, dict[str, Tensor]]:
    """The same for every document alone, by transformers' own forward pass and loss."""
    ids, _, labels, _ = packed_batch()
    states = torch.empty(*ids.shape, model.config.hidden_size)
    total = 0.0
    for row, part in documents():
        document = ids[row : row + 1, part]
        states[row, part] = (
            model.base_model(document, use_cache=False).last_hidden_state[0].detach()
        )
        logits = model(document, use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(
            logits, labels[row, part], ignore_index=-100, reduction="sum"
        )
        loss.backward()
        total += loss.item()
    return states, total, gradients_of(model)


def check_isolation(packed: PreTrainedModel, alone: PreTrainedModel) -> None:
    states, loss, gradients = packed_results(packed, probe_head(alone, compiled=False))
    expected_states, expected_loss, expected_gradients = results_alone(alone)
    assert relative_error({"states": states}, {"states": expected_states}) < EXACT
    assert loss == pytest.approx(expected_loss, rel=EXACT)
    assert relative_error(gradients, expected_gradients) < EXACT


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [(name, kind) for kind in ("sdpa", PACKED) for name in ISOLATING]
    + [(name, "eager") for name in EAGER]
    + [("gemma2", PACKED)],
)
def test_packed_documents_equal_the_same_documents_alone(architecture: str, attention: str) -> None:
    model = prepared(architecture, attention)
    plain = "eager" if architecture == "gemma2" else "sdpa"
    check_isolation(model, model if attention != PACKED else prepared(architecture, plain))


@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3"])
def test_sinks_and_values_narrower_than_keys_are_packed_too(architecture: str) -> None:
    check_isolation(prepared(architecture, PACKED), prepared(architecture, "eager"))


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Computes what `varlen_attn` does on a GPU, document by document: [tokens, heads, width]."""
    assert (
        max_q >= int(cu_seq_q.diff().max())
        and max_k >= int(cu_seq_k.diff().max())
        and window_size[1] == 0
    )
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or enable_gqa
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    output = torch.zeros_like(query)
    for document in range(len(cu_seq_q) - 1):
        queries, keys = (
            slice(*bounds[document : document + 2].tolist()) for bounds in (cu_seq_q, cu_seq_k)
        )
        count, seen = queries.stop - queries.start, keys.stop - keys.start
        distance = torch.arange(seen - count, seen)[:, None] - torch.arange(seen)
        hidden = (distance < 0) | (
            distance > window_size[0] if window_size[0] >= 0 else distance < 0
        )
        scores = torch.einsum("qhd,khd->hqk", query[queries], key[keys]) * (
            scale or query.shape[-1] ** -0.5
        )
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[queries] = torch.einsum("hqk,khd->qhd", weights, value[keys])
    return output


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_the_kernel_for_gpus_is_told_what_the_mask_for_others_says(
    ranks: int, rank: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = inspect.signature(attention_module.varlen_attn)
    defaults = (
        {} if "enable_gqa" in signature.parameters else {"enable_gqa": True}
    )  # torch 2.11 needs no telling

    def checked(*arguments: object, **named: object) -> Tensor:
        signature.bind(*arguments, **named)  # the kernel takes what it is given
        return plain_varlen(*arguments, **(defaults | named))

    monkeypatch.setattr(attention_module, "varlen_attn", checked)  # it has no CPU kernel
    bounds = torch.tensor([0, 5, 14, 16, 23, 24, 25, 32, 32], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 2, 2, LENGTH, 8, generator=generator)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    for part in causal_parts(bounds, LENGTH, ranks, rank, 10):
        query = torch.randn(2, 4, LENGTH // 2 // ranks, 8, generator=generator)
        seen = (query, key[:, :, : part.stop], value[:, :, : part.stop], part, 0.3, window)
        expected = attention_module._plain_attention(*seen, None, 0.0, module)
        assert torch.allclose(attention_module._flash_attention(*seen), expected, atol=1e-6)
        capped = attention_module._plain_attention(*seen, 1e6, 0.0, module)
        assert torch.allclose(capped, expected, atol=1e-5), "a soft cap far away changes nothing"


def chosen(
    architecture: str,
    attention: str,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = ALONE,
    document_mask: bool = True,
) -> str:
    changes = {"attn_pdrop": 0.1} if architecture == "gpt2" else {}
    model_config = tiny_config(architecture, **changes)
    return attention_choices(attention, document_mask, model_config, device, dtype, layout)[0]


def test_auto_tries_the_fastest_first() -> None:
    assert chosen("llama", "auto", "cpu", torch.float32) == "sdpa"
    assert chosen("llama", "auto", "cuda") == PACKED
    assert chosen("mistral", "auto", "cuda") == PACKED
    assert chosen("llama", "auto", "cuda", torch.float32) == "sdpa"
    assert chosen("llama", "auto", "cuda", document_mask=False) == "sdpa"
    assert chosen("gpt2", "auto", "cuda") == "sdpa", "varlen has no dropout"
    assert chosen("gemma2", "auto", "cuda") == "eager", "only eager keeps the soft cap"
    assert chosen("gemma2", "auto", "cpu", torch.float32) == "eager"


@pytest.mark.parametrize(
    "attention", ["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
)
def test_what_is_asked_for_is_used(attention: str) -> None:
    assert chosen("llama", attention, "cuda") == attention
    assert chosen("llama", "varlen", "cuda") == PACKED


@pytest.mark.parametrize(
    ("architecture", "attention", "device", "dtype", "reason"),
    [
        ("llama", "varlen", "cpu", torch.bfloat16, "needs a GPU"),
        ("llama", "flash_attention_2", "cpu", torch.bfloat16, "needs a GPU"),
        ("llama", "flex_attention", "cpu", torch.float32, "no backward pass on a CPU"),
        ("llama", "varlen", "cuda", torch.float32, "half precision only"),
        ("llama", "flash_attention_3", "cuda", torch.float32, "half precision only"),
        ("gpt2", "varlen", "cuda", torch.bfloat16, "no dropout"),
        ("gemma2", "varlen", "cuda", torch.bfloat16, "soft cap"),
        ("gemma2", "sdpa", "cpu", torch.float32, "soft cap"),
    ],
)
def test_attention_that_the_run_cannot_have_is_refused(
    architecture: str, attention: str, device: str, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(UserError, match=rf'model\.attention: "{attention}".*{reason}'):
        chosen(architecture, attention, device, dtype)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(pp=2)])
def test_shared_sequences_and_layers_have_our_attention_or_none(layout: Layout) -> None:
    assert chosen("llama", "auto", "cpu", torch.float32, layout) == PACKED
    assert chosen("gemma2", "auto", "cuda", layout=layout) == PACKED
    assert chosen("llama", "varlen", "cuda", layout=layout) == PACKED
    with pytest.raises(UserError, match=r'model\.attention: "sdpa" needs whole sequences'):
        chosen("llama", "sdpa", "cuda", layout=layout)
    with pytest.raises(
        UserError, match="BloomForCausalLM computes its attention by code of its own"
    ):
        chosen("bloom", "auto", "cpu", torch.float32, layout)


def change_by_dropout() -> float:
    """How far a mean of ones is from one on a rank of a ring that drops half of the weights."""
    group, bounds = dist.group.WORLD, torch.tensor([0, 64], dtype=torch.int32)
    query, key, value = torch.zeros(3, 1, 2, 64 // group.size(), 8).unbind()
    parts = tuple(causal_parts(bounds, 64, group.size(), group.rank(), 64))
    asked = {"scaling": 1.0, "dropout": 0.5, "parts": parts, "group": group, "ring": (bounds, 64)}
    output, _ = packed_attention(torch.nn.Module(), query, key, value + 1, None, **asked)
    return (output - 1).abs().max().item()


def test_a_ring_leaves_no_dropout_out() -> None:
    assert min(run_ranks(2, change_by_dropout)) > 0.1
