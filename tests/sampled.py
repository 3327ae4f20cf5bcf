"""Completions to compare: what is asked, of which models, and how far training is from them."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.config.reinforcement import RolloutConfig
from lacuna.model.build import BuiltModel, build_model
from lacuna.objective.grpo import grpo_targets
from lacuna.objective.sample_batches import logprobs_of_samples
from lacuna.objective.sample_rows import lay_out
from lacuna.parallel.mesh import Layout
from lacuna.rollout.drawing import Completion
from lacuna.rollout.groups import Sample
from lacuna.rollout.paged_probe import reason_against_pages
from lacuna.rollout.sampling import check_engine, generate, part_of_rank
from tiny import CPU, mesh_of, random_model, tiny_config, tokenizer_of_words

PROMPTS = [[5, 6, 7], [9], [20, 21, 22, 23, 24, 25, 26, 27], [2, 0, 31, 2]]
# The last has the padding and the end among its tokens: they are as good as any other.
KEYS = [11, 12, 13, 14]
SAMPLING = RolloutConfig(samples=3, temperature=0.8, max_tokens=9, batch_size=5)
ENDS = [2]


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


def ending_model(architecture: str) -> PreTrainedModel:
    """One that likes to end."""
    attention = "eager" if architecture in ("gemma2", "mamba") else "sdpa"
    model = random_model(tiny_config(architecture), attention, seed=3)
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 3
    return model


def config_of(seq_len: int = 32, **sections: object) -> Config:
    return Config(training={"seq_len": seq_len, "batch_size": 2}, **sections)


def tokens_of(said: list[list[Completion]]) -> list[list[list[int]]]:
    return [[one.tokens for one in group] for group in said]


def differences(
    policy: BuiltModel, said: list[list[Completion]], prompts: list[list[int]]
) -> float:
    """The largest difference between log-probabilities of generating and of training."""
    samples = [
        Sample(prompt, one.tokens, one.logprobs, one.ended)
        for prompt, group in zip(prompts, said, strict=True)
        for one in group
    ]
    config = config_of(policy.training.seq_len)
    targets = grpo_targets(config.grpo, config.rollout)
    laid = lay_out(samples, config.training, config.row_form, config.data, 0, targets)
    found = logprobs_of_samples(policy, laid, samples, SAMPLING.temperature)
    pairs = zip(samples, found, strict=True)
    return max(
        abs(one - other)
        for sample, own in pairs
        for one, other in zip(sample.sampled, own, strict=True)
    )


def generated_together(
    policy: BuiltModel, prompts: list[list[int]], sampling: RolloutConfig
) -> list[list[Completion]]:
    """The completions of prompts, of which ranks that share sequences make a part each."""
    part = part_of_rank(policy.mesh, len(prompts))
    own = generate(policy, prompts[part], KEYS[part], sampling, ENDS, seed=1)
    if policy.mesh.layout.sharing == 1:
        return own
    of_ranks: list[list[list[Completion]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    assert all(of_ranks), "each has some"
    return [group for one in of_ranks for group in one]


def of_changing_weights(
    model: Path,
    layout: Layout,
    sections: dict[str, object],
    sampling: RolloutConfig = SAMPLING,
    prompts: list[list[int]] = PROMPTS,
    seq_len: int = 32,
) -> list[tuple[list[list[list[int]]], float]]:
    """What is said before and after the weights change, and how far training is from it."""
    parallelism = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
    }
    own = {"compile": {"enable": False}, "parallelism": parallelism}
    config = config_of(seq_len, model={"name_or_path": str(model)}, **own, **sections)
    policy = build_model(config, tokenizer_of_words(), mesh_of(layout), CPU)
    assert reason_against_pages(policy.model, CPU) is None
    check_engine(policy, sampling)
    results = []
    # Ranks may generate different numbers of completions.
    prompts = prompts[: len(prompts) - policy.mesh.data_rank]
    for _ in range(2):
        said = generated_together(policy, prompts, sampling)
        results.append((tokens_of(said), differences(policy, said, prompts)))
        with torch.no_grad():
            for number, parameter in enumerate(policy.model.parameters()):
                if parameter.requires_grad:
                    parameter.add_(0.05 * (1 + number % 3))
    return results
