"""No document of a packed batch sees another, and the attention chosen is one that the run can have."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.config.documents import DataConfig
from lacuna.config.sections import ModelConfig
from lacuna.model.attention import VARLEN, choose_attention
from lacuna.model.head import attach_loss, packing_arguments, probe_head, probe_packing
from tiny import VOCABULARY, random_model, relative_error, tiny_config

ROWS = ((5, 9, 2), (7, 1, 8))  # documents longer and shorter than the sliding window of 4
LENGTH = 16
ISOLATING = ("llama", "qwen3", "gemma", "gemma3", "mistral", "gpt2", "neox", "cohere", "granite", "phi", "qwen3_moe")
EAGER = ("llama", "gemma2", "gemma3", "mistral", "gpt2", "qwen3_moe")
EXACT = 5e-6


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
    model = random_model(tiny_config(architecture), attention)
    attach_loss(model)
    return model


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def packed_results(model: PreTrainedModel) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Hidden states, summed loss and gradients of the packed batch, as training makes them."""
    ids, positions, labels, bounds = packed_batch()
    extra = packing_arguments(model.config._attn_implementation, bounds, 9)
    with torch.no_grad():
        head = probe_head(model, compiled=False)
        states = model.hidden_states(ids, positions, extra)
    loss = model.summed_loss(head, ids, positions, labels, extra)
    loss.backward()
    return states, loss.item(), gradients_of(model)


def results_alone(model: PreTrainedModel) -> tuple[Tensor, float, dict[str, Tensor]]:
    """The same of every document alone, by transformers' own forward pass with its own loss."""
    ids, _, labels, _ = packed_batch()
    states = torch.empty(*ids.shape, model.config.hidden_size)
    total = 0.0
    for row, part in documents():
        document = ids[row : row + 1, part]
        states[row, part] = model.base_model(document, use_cache=False).last_hidden_state[0].detach()
        logits = model(document, use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, labels[row, part], ignore_index=-100, reduction="sum")
        loss.backward()
        total += loss.item()
    return states, total, gradients_of(model)


def check_isolation(packed: PreTrainedModel, alone: PreTrainedModel) -> None:
    states, loss, gradients = packed_results(packed)
    expected_states, expected_loss, expected_gradients = results_alone(alone)
    assert relative_error({"states": states}, {"states": expected_states}) < EXACT
    assert loss == pytest.approx(expected_loss, rel=EXACT)
    assert relative_error(gradients, expected_gradients) < EXACT


@pytest.mark.parametrize(
    ("architecture", "attention"), [*((name, "sdpa") for name in ISOLATING), *((name, "eager") for name in EAGER)]
)
def test_packed_documents_equal_the_same_documents_alone(architecture: str, attention: str) -> None:
    model = prepared(architecture, attention)
    check_isolation(model, model)
    with torch.no_grad():
        probe_packing(model, attention)


def plain_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What `varlen_attn` computes on a GPU, by the book: [tokens, heads, width], windows to the left only."""
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k >= int(cu_seq_q.diff().max())
    assert window_size[1] == 0
    groups = query.shape[1] // key.shape[1]
    assert groups == 1 or enable_gqa
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    tokens = torch.arange(len(query))
    document = torch.bucketize(tokens, cu_seq_q[1:], right=True)
    distance = tokens[:, None] - tokens
    seen = (document[:, None] == document) & (distance >= 0)
    if window_size[0] >= 0:
        seen &= distance <= window_size[0]
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("architecture", ISOLATING)
def test_the_bounds_of_documents_reach_the_attention_for_gpus(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = inspect.signature(varlen.varlen_attn)
    defaults = {} if "enable_gqa" in signature.parameters else {"enable_gqa": True}  # torch 2.11 needs no telling
    calls = 0

    def checked(*arguments: object, **named: object) -> Tensor:
        nonlocal calls
        calls += 1
        signature.bind(*arguments, **named)  # the kernel takes what it is given
        return plain_varlen(*arguments, **(defaults | named))

    monkeypatch.setattr(varlen, "varlen_attn", checked)  # it has no CPU kernel
    packed = prepared(architecture, VARLEN)
    check_isolation(packed, prepared(architecture, "sdpa"))
    assert calls >= packed.config.num_hidden_layers
    with torch.no_grad():
        probe_packing(packed, VARLEN)


@pytest.mark.parametrize("architecture", ["bloom", "opt"])
def test_an_architecture_that_does_not_follow_position_ids_is_refused(architecture: str) -> None:
    model = prepared(architecture, "eager")
    with torch.no_grad(), pytest.raises(UserError, match=r"data\.document_mask.*see each other.*document_mask = false"):
        probe_packing(model, "eager")


def chosen(
    architecture: str, attention: str, device: str, dtype: torch.dtype = torch.bfloat16, **settings: bool
) -> str:
    changes = {"attn_pdrop": 0.1} if architecture == "gpt2" else {}
    config = Config(model=ModelConfig(attention=attention), data=DataConfig(**settings))
    return choose_attention(config, tiny_config(architecture, **changes), device, dtype)


def test_auto_chooses_the_fastest_that_is_exact() -> None:
    assert chosen("llama", "auto", "cpu", torch.float32) == "sdpa"
    assert chosen("llama", "auto", "cuda") == VARLEN
    assert chosen("mistral", "auto", "cuda") == VARLEN
    assert chosen("llama", "auto", "cuda", torch.float32) == "sdpa"
    assert chosen("llama", "auto", "cuda", document_mask=False) == "sdpa"
    assert chosen("gpt2", "auto", "cuda") == "sdpa", "varlen has no dropout"
    assert chosen("gemma2", "auto", "cuda") == "eager", "only eager keeps the soft cap"
    assert chosen("gemma2", "auto", "cpu", torch.float32) == "eager"


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"])
def test_what_is_asked_for_is_used(attention: str) -> None:
    assert chosen("llama", attention, "cuda") == attention
    assert chosen("llama", "varlen", "cuda") == VARLEN


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
