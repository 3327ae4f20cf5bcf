"""Completions are drawn by the model as it is now, in every layout; training finds the same."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lacuna.config import Config, UserError
from lacuna.config.reinforcement import RolloutConfig
from lacuna.model.build import BuiltModel, build_model
from lacuna.objective.grpo import grpo_targets
from lacuna.objective.sample_batches import lay_out, logprobs_of_samples
from lacuna.parallel.mesh import Layout
from lacuna.rollout.drawing import Completion, Drawing, draw
from lacuna.rollout.groups import Sample
from lacuna.rollout.paged_probe import reason_against_pages
from lacuna.rollout.sampling import check_engine, generate, part_of_rank
from policies import one_rank, policy_of
from tasks import write_weights
from tiny import CPU, mesh_of, random_model, run_ranks, tiny_config, tokenizer_of_words

PROMPTS = [[5, 6, 7], [9], [20, 21, 22, 23, 24, 25, 26, 27], [2, 0, 31, 2]]
# The last has the padding and the end among its tokens: they are as good as any other.
KEYS = [11, 12, 13, 14]
SAMPLING = RolloutConfig(samples=3, temperature=0.8, max_tokens=9, batch_size=5)
ENDS = [2]


def ending_model(architecture: str) -> PreTrainedModel:
    """One that likes to end."""
    attention = "eager" if architecture in ("gemma2", "mamba") else "sdpa"
    model = random_model(tiny_config(architecture), attention, seed=3)
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 3
    return model


def differences(
    policy: BuiltModel, said: list[list[Completion]], prompts: list[list[int]]
) -> float:
    """The largest difference between log-probabilities of generating and of training."""
    samples = [
        Sample(prompt, one.tokens, one.logprobs, one.ended)
        for prompt, group in zip(prompts, said, strict=True)
        for one in group
    ]
    config = config_of()
    targets = grpo_targets(config.grpo, config.rollout)
    laid = lay_out(samples, config.training, config.row_form, config.data, 0, targets)
    found = logprobs_of_samples(policy, laid, samples, SAMPLING.temperature)
    pairs = zip(samples, found, strict=True)
    return max(
        abs(one - other)
        for sample, own in pairs
        for one, other in zip(sample.sampled, own, strict=True)
    )


def config_of(**sections: object) -> Config:
    return Config(training={"seq_len": 32, "batch_size": 2}, **sections)


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


def tokens_of(said: list[list[Completion]]) -> list[list[list[int]]]:
    return [[one.tokens for one in group] for group in said]


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


def test_pages_that_a_model_is_not_exact_with_are_refused_where_asked_for() -> None:
    with one_rank():
        policy = policy_of(ending_model("gemma2"), config_of())
    check_engine(policy, SAMPLING)
    asked = SAMPLING.model_copy(update={"engine": "pages"})
    with pytest.raises(UserError, match=r"Gemma2ForCausalLM .*\(.* a soft cap .*\): set auto"):
        check_engine(policy, asked)


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


SECTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "adapters": {"lora": {"rank": 4}},
    "nf4": {"lora": {"rank": 4}, "quantization": {"base": "nf4"}},
}
LAYOUTS = {
    "alone": Layout(),
    "replicas": Layout(dp_replicate=2),
    "shards": Layout(dp_shard=2),
}


def generated_together(
    policy: BuiltModel, prompts: list[list[int]], engine: str
) -> list[list[Completion]]:
    """The completions of prompts, of which ranks that share sequences make a part each."""
    part = part_of_rank(policy.mesh, len(prompts))
    sampling = SAMPLING.model_copy(update={"engine": engine})
    own = generate(policy, prompts[part], KEYS[part], sampling, ENDS, seed=1)
    if policy.mesh.layout.sharing == 1:
        return own
    of_ranks: list[list[list[Completion]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    assert all(of_ranks), "each has some"
    return [group for one in of_ranks for group in one]


def of_changing_weights(
    model: Path, layout: Layout, sections: dict[str, object], engine: str = "auto"
) -> list[tuple[list[list[list[int]]], float]]:
    """What is said before and after the weights change, and how far training is from it."""
    parallelism = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
    }
    own = {"compile": {"enable": False}, "parallelism": parallelism}
    config = config_of(model={"name_or_path": str(model)}, **own, **sections)
    policy = build_model(config, tokenizer_of_words(), mesh_of(layout), CPU)
    assert reason_against_pages(policy.model, CPU) is None
    results = []
    # Ranks may generate different numbers of completions.
    prompts = PROMPTS[: 4 - policy.mesh.data_rank]
    for number in range(2):
        said = generated_together(policy, prompts, "auto" if number else engine)
        results.append((tokens_of(said), differences(policy, said, prompts)))
        with torch.no_grad():
            for number, parameter in enumerate(policy.model.parameters()):
                if parameter.requires_grad:
                    parameter.add_(0.05 * (1 + number % 3))
    return results


@pytest.mark.parametrize("ranks", [1, 2])
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
@pytest.mark.parametrize("sections", ["plain", "adapters"])
def test_ranks_that_share_sequences_complete_a_part_of_the_prompts_each(
    sections: str, engine: str, layout: str, tmp_path: Path
) -> None:
    model = write_weights(tmp_path, tiny_config("llama"), seed=1)
    check_shared(model, layout, sections, engine)


@pytest.mark.parametrize(
    "architecture",
    ["gpt2", "olmo2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gemma3"))],
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
    together = run_ranks(ranks, of_changing_weights, model, own, SECTIONS[sections], engine)
    for found in together:
        assert max(difference for _, difference in found) < 1e-4
        assert [said for said, _ in found] == [said for said, _ in alone]
