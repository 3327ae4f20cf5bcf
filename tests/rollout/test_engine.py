"""What comes from pages is what transformers says, however many run at a time and end when."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from lacuna.config import UserError
from lacuna.model.architecture import decoder_layers
from lacuna.rollout import engine, passes
from lacuna.rollout.drawing import Asked, Completion, Drawing
from lacuna.rollout.engine import complete_in_pages
from lacuna.rollout.pages import PAGED, Pool
from tiny import CPU, compiled_by, random_model, tiny_config

NUMBERS = random.Random(1)
PROMPTS = [
    [NUMBERS.randrange(3, 97) for _ in range(length)] for length in (1, 4, 29, 8, 17, 3, 16, 30)
]
LIMITS = [1, 19, 7, 12, 2, 18, 11, 9]
ENDS = [2]
# Tokens of a page, rows, and tokens between looking for those that have ended.
WAYS = [(4, 3, 1), (4, 64, 5), (64, 2, 3)]
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "cohere", "neox", "qwen3_moe"]


def ending_model(architecture: str, attention: str = PAGED) -> PreTrainedModel:
    """One that likes to end."""
    model = random_model(tiny_config(architecture), attention, seed=3)
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 2
    return model


def said_by(
    model: PreTrainedModel,
    drawing: Drawing,
    samples: int,
    way: tuple[int, int, int] = WAYS[0],
    small: bool = False,
) -> list[list[Completion]]:
    size, rows, every = way
    asked = [
        Asked(prompt, [7 * number + sample for sample in range(samples)], limit)
        for number, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]
    with torch.no_grad():
        return complete_in_pages(
            model, asked, drawing, ENDS, rows, CPU, size=size, every=every, small=small
        )


def logprobs_of(model: PreTrainedModel, prompt: list[int], said: list[int]) -> Tensor:
    """The log-probability of each token of a completion, by one pass, at temperature 0.8."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + said]), use_cache=False).logits[0]
    logprobs = (logits / 0.8).log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(said)[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_likeliest_tokens_are_those_of_transformers(architecture: str) -> None:
    own = ending_model(architecture, "sdpa")
    wanted = []
    for prompt, limit in zip(PROMPTS, LIMITS, strict=True):
        ids = torch.tensor([prompt])
        output = own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            use_cache=True,
            eos_token_id=ENDS,
            pad_token_id=0,
        )
        wanted.append(output[0, len(prompt) :].tolist())
    model = ending_model(architecture)
    for way in WAYS:
        found = said_by(model, Drawing(0.0), 1, way)
        assert [one.tokens for [one] in found] == wanted
        assert [one.ended for [one] in found] == [tokens[-1] == 2 for tokens in wanted]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_pass_finds_the_log_probabilities_of_what_was_drawn(architecture: str) -> None:
    model = ending_model(architecture)
    own = ending_model(architecture, "sdpa")
    several = [said_by(model, Drawing(0.8), 3, way) for way in WAYS]
    tokens = [[[one.tokens for one in group] for group in found] for found in several]
    assert tokens[0] == tokens[1] == tokens[2], "it does not matter what is generated beside it"
    assert any(len({tuple(one) for one in group}) == 3 for group in tokens[0])
    for found in several:
        for prompt, limit, group in zip(PROMPTS, LIMITS, found, strict=True):
            for one in group:
                assert 2 not in one.tokens[:-1] and one.ended == (one.tokens[-1] == 2)
                assert len(one.tokens) == limit or one.ended
                wanted = logprobs_of(own, prompt, one.tokens)
                assert torch.allclose(wanted, torch.tensor(one.logprobs), atol=1e-4)


def test_prompts_are_read_once_and_in_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PACK", 40)
    read: list[list[int]] = []

    def noting(model: PreTrainedModel, prompts: list[tuple[list[int], list[int]]], *rest: object):  # noqa: ANN202
        read.append([len(tokens) for tokens, _ in prompts])
        return passes.prompt_logits(model, prompts, *rest)

    model = ending_model("llama")
    wanted = said_by(model, Drawing(0.8), 3, WAYS[1])
    monkeypatch.setattr(engine, "prompt_logits", noting)
    assert said_by(model, Drawing(0.8), 3, WAYS[1]) == wanted
    assert [length for pack in read for length in pack] == [len(prompt) for prompt in PROMPTS]
    assert all(sum(pack) <= 40 for pack in read) and max(map(len, read)) > 1


def test_few_pages_make_completions_wait_and_too_few_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ending_model("llama")
    wanted = said_by(model, Drawing(0.8), 2)
    pools: list[Pool] = []

    def pool_of(count: int, *_: object) -> int:
        return count

    class Noted(Pool):
        def __init__(self, pages: int, size: int, small: bool) -> None:
            super().__init__(pages, size, small)
            pools.append(self)

    monkeypatch.setattr(engine, "Pool", Noted)
    # The longest prompt has 8 pages, and each of its completions 3 more.
    monkeypatch.setattr(engine, "_pages_for", partial(pool_of, 1 + 8 + 3))
    found = said_by(model, Drawing(0.8), 2)
    assert [[one.tokens for one in group] for group in found] == [
        [one.tokens for one in group] for group in wanted
    ]
    assert sorted(pools[0].free) == [*range(1, 12)], "every page is free again"
    assert not hasattr(decoder_layers(model)[0].self_attn, "rollout_keys")
    monkeypatch.setattr(engine, "_pages_for", partial(pool_of, 8))
    with pytest.raises(UserError, match="no room for the keys and values of 36 tokens"):
        said_by(model, Drawing(0.8), 2)


def test_restricted_drawing_is_among_the_likeliest() -> None:
    model = ending_model("llama")
    likeliest = said_by(model, Drawing(0.0), 1)
    for drawing in (Drawing(3.0, top_k=1), Drawing(3.0, top_p=1e-6)):
        found = said_by(model, drawing, 1)
        assert [one.tokens for [one] in found] == [one.tokens for [one] in likeliest]
        assert all(max(map(abs, one.logprobs)) < 1e-6 for [one] in found)


def compiled_reading(graphs: list[int]) -> Callable[..., Tensor]:
    """`prompt_logits` that notes how many graphs each call compiles."""

    def noting(*given: Any) -> Tensor:
        assert given[-1] is True
        before = counters["stats"]["unique_graphs"]
        logits = passes.prompt_logits(*given)
        graphs.append(counters["stats"]["unique_graphs"] - before)
        return logits

    return noting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "small"), [("gemma3", False), ("gemma3", True), ("qwen3_moe", False)]
)
def test_compiled_layers_say_the_same(
    architecture: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ending_model(architecture)
    wanted = said_by(model, Drawing(0.8), 16, (4, 64, 5), small)
    torch._dynamo.reset()
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, backend="aot_eager")
    asked = [
        Asked(prompt, [7 * number + sample for sample in range(16)], limit)
        for number, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]
    rest = (Drawing(0.8), ENDS, 64, CPU)
    with compiled_by("aot_eager"), torch.no_grad():
        for some in (asked[1:3], asked[4:7]):  # once for one size, and once for all
            complete_in_pages(model, some, *rest, compiled=True, size=4, small=small)
        read: list[int] = []
        monkeypatch.setattr(engine, "prompt_logits", compiled_reading(read))
        found = complete_in_pages(model, asked, *rest, compiled=True, size=4, small=small)
    assert len(read) > 1
    assert not any(read), "prompts of other numbers and lengths are read by the code that is there"
    for group, other in zip(found, wanted, strict=True):
        for one, two in zip(group, other, strict=True):
            assert one.tokens == two.tokens
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
