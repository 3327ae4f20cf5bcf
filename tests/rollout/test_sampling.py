"""Completions are drawn by the model as it is now, in every layout; training finds the same."""

from pathlib import Path

import pytest
import torch

from lacuna.config import UserError
from lacuna.parallel.mesh import Layout
from lacuna.rollout.decode_attention import SMALL, store
from lacuna.rollout.drawing import Drawing, draw
from lacuna.rollout.sampling import check_engine, generate
from policies import one_rank, policy_of
from sampled import (
    ENDS,
    KEYS,
    LAYOUTS,
    PROMPTS,
    SAMPLING,
    SECTIONS,
    config_of,
    differences,
    ending_model,
    of_changing_weights,
    tokens_of,
)
from tasks import write_weights
from tiny import run_ranks, tiny_config


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "gemma2", "cohere"])
def test_training_finds_the_probabilities_that_tokens_were_drawn_with(architecture: str) -> None:
    with one_rank():
        policy = policy_of(ending_model(architecture), config_of())
        said = generate(policy, PROMPTS, KEYS, SAMPLING, ENDS, seed=1)
        assert [len(group) for group in said] == [3] * 4
        flat = [one for group in said for one in group]
        assert False in {one.ended for one in flat}
        assert architecture == "gpt2" or True in {one.ended for one in flat}
        for one in flat:
            assert one.ended == (one.tokens[-1] == 2)
            assert 2 not in one.tokens[:-1]
            assert len(one.tokens) == len(one.logprobs) and (one.ended or len(one.tokens) == 9)
        assert differences(policy, said, PROMPTS) < 1e-4


def test_a_completion_does_not_depend_on_what_is_generated_beside_it() -> None:
    policy = policy_of(ending_model("llama"), config_of())
    together = generate(policy, PROMPTS, KEYS, SAMPLING, ENDS, seed=1)
    alone = [
        generate(policy, [prompt], [key], SAMPLING, ENDS, seed=1)[0]
        for prompt, key in zip(PROMPTS, KEYS, strict=True)
    ]
    assert tokens_of(together) == tokens_of(alone)
    assert tokens_of(together) != tokens_of(
        generate(policy, PROMPTS, [key + 1 for key in KEYS], SAMPLING, ENDS, seed=1)
    )
    assert tokens_of(together) != tokens_of(generate(policy, PROMPTS, KEYS, SAMPLING, ENDS, seed=2))
    assert len({tuple(one.tokens) for one in together[2]}) == 3


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 2.0, 1.0]])
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens, logprobs = draw(logits.expand(4000, 4), uniform, Drawing(2.0))
    wanted = (logits[0] / 2).softmax(-1)
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert torch.allclose(shares, wanted, atol=1e-3) and shares[1] == 0
    assert torch.allclose(logprobs, wanted.log()[tokens])
    ends = torch.tensor([0.0, 1.0 - 1e-16], dtype=torch.float64)
    assert draw(logits.expand(2, 4), ends, Drawing())[0].tolist() == [0, 3]


def test_both_engines_draw_the_same() -> None:
    with one_rank():
        policy = policy_of(ending_model("llama"), config_of())
        several = []
        for engine in ("pages", "padded"):
            sampling = SAMPLING.model_copy(update={"engine": engine})
            several.append(generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1))
    assert tokens_of(several[0]) == tokens_of(several[1])
    for group, other in zip(*several, strict=True):
        for one, two in zip(group, other, strict=True):
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("setting", "value"), [("engine", "pages"), ("cache_dtype", "float8")], ids=str
)
def test_pages_that_a_model_is_not_exact_with_are_refused_where_asked_for(
    setting: str, value: str
) -> None:
    with one_rank():
        policy = policy_of(ending_model("gemma2"), config_of())
    check_engine(policy, SAMPLING)
    asked = SAMPLING.model_copy(update={setting: value})
    wanted = rf"rollout.{setting} = {value}: Gemma2ForCausalLM .*\(.* a soft cap .*\): set auto"
    with pytest.raises(UserError, match=wanted):
        check_engine(policy, asked)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "neox"])
def test_keys_and_values_in_float8_say_nearly_the_same(architecture: str) -> None:
    sampling = SAMPLING.model_copy(update={"cache_dtype": "float8"})
    with one_rank():
        policy = policy_of(ending_model(architecture), config_of())
        check_engine(policy, sampling)
        said = generate(policy, PROMPTS, KEYS, sampling, ENDS, seed=1)
        alone = [
            generate(policy, [prompt], [key], sampling, ENDS, seed=1)[0]
            for prompt, key in zip(PROMPTS, KEYS, strict=True)
        ]
        assert tokens_of(said) == tokens_of(alone)
        assert 1e-5 < differences(policy, said, PROMPTS) < 0.15


def test_float8_keeps_the_largest_number_of_each_head_and_rounds_others_by_a_sixteenth() -> None:
    torch.manual_seed(0)
    new = torch.randn(6, 2, 64) * torch.tensor([1e-20, 1e-4, 1.0, 30.0, 1e6, 0.0])[:, None, None]
    new[2, 0, 0] = 1000.0
    both = torch.zeros(2, 3, 2, 4, 64, dtype=SMALL)
    both_scales = torch.zeros(2, 3, 2, 4)
    pages, places = torch.tensor([0, 0, 1, 2, 2, 1]), torch.tensor([0, 3, 1, 2, 0, 2])
    store((new, -new), (both[0], both[1]), both_scales, pages, places)
    found, negative = (both.float() * both_scales[..., None])[:, pages, :, places].unbind(1)
    assert torch.equal(found, -negative)
    most = new.abs().amax(-1, keepdim=True)
    assert torch.allclose(found.abs().amax(-1, keepdim=True)[1:], most[1:], rtol=1e-6)
    apart = (found - new).abs()
    # Half of the last of three bits; beneath float8's smallest normal number half of its step.
    assert bool((apart <= (new.abs() / 16).maximum(most / 448 / 1024) * 1.0001 + 1e-14).all())


@pytest.mark.parametrize("architecture", ["mamba", "falcon"])
def test_models_that_cannot_have_pages_draw_by_their_own_probabilities(architecture: str) -> None:
    model = ending_model(architecture)
    with one_rank():
        said = generate(policy_of(model, config_of()), PROMPTS, KEYS, SAMPLING, ENDS, seed=1)
    for prompt, group in zip(PROMPTS, said, strict=True):
        for one in group:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + one.tokens]), use_cache=False).logits[0]
            logprobs = (logits / SAMPLING.temperature).log_softmax(-1)[len(prompt) - 1 : -1]
            own = logprobs.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            assert torch.allclose(own, torch.tensor(one.logprobs), atol=1e-4)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sections", SECTIONS)
def test_completions_follow_the_weights(sections: str, ranks: int, tmp_path: Path) -> None:
    model = write_weights(tmp_path, tiny_config("llama"), seed=1)
    own = [layout for layout in LAYOUTS.values() if layout.data_parallel == ranks]
    alone = run_ranks(1, of_changing_weights, model, Layout(), SECTIONS[sections])[0]
    assert alone[0][0] != alone[1][0], "the weights changed, and so must what is said"
    assert max(difference for _, difference in alone) < 1e-4
    for layout in own if ranks > 1 else []:
        for rank, found in enumerate(
            run_ranks(2, of_changing_weights, model, layout, SECTIONS[sections])
        ):
            assert max(difference for _, difference in found) < 1e-4
            for (said, _), (wanted, _) in zip(found, alone, strict=True):
                assert said == wanted[: 4 - rank]


SHARED = {
    "cp": Layout(cp=2, ring=True),
    "tp": Layout(tp=2),
    "cp × tp": Layout(cp=2, tp=2),
}


@pytest.mark.parametrize("layout", ["cp", "tp", pytest.param("cp × tp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["auto", "padded"])
@pytest.mark.parametrize("sections", ["adapters", pytest.param("plain", marks=pytest.mark.slow)])
def test_ranks_that_share_sequences_complete_a_part_of_the_prompts_each(
    sections: str, engine: str, layout: str, tmp_path: Path
) -> None:
    model = write_weights(tmp_path, tiny_config("llama"), seed=1)
    check_shared(model, layout, sections, engine)


@pytest.mark.parametrize(
    "architecture",
    ["olmo2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "qwen3", "gemma3"))],
)
def test_divided_layers_of_other_architectures_generate_whole(
    architecture: str, tmp_path: Path
) -> None:
    check_shared(write_weights(tmp_path, tiny_config(architecture), seed=1), "tp")


def check_shared(model: Path, layout: str, sections: str = "plain", engine: str = "auto") -> None:
    """Fails where ranks of a layout say or find something else than one process does."""
    own = SHARED[layout]
    ranks = own.data_parallel * own.sharing
    [alone] = run_ranks(1, of_changing_weights, model, Layout(), SECTIONS[sections])
    sampling = SAMPLING.model_copy(update={"engine": engine})
    together = run_ranks(ranks, of_changing_weights, model, own, SECTIONS[sections], sampling)
    for found in together:
        assert max(difference for _, difference in found) < 1e-4
        assert [said for said, _ in found] == [said for said, _ in alone]
