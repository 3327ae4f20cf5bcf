"""Completions to compare: what is asked, of which models, and how far training is from them."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lacuna.config import Config
from lacuna.config.reinforcement import RolloutConfig
from lacuna.model.build import BuiltModel, build_model
from lacuna.objective.grpo_batches import grpo_targets, lay_out, logprobs_of_samples
from lacuna.parallel.mesh import Layout
from lacuna.rollout.drawing import Completion
from lacuna.rollout.groups import Sample
from lacuna.rollout.paged_probe import reason_against_pages
from lacuna.rollout.sampling import check_engine, generate
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
    prompts = prompts[: len(prompts) - dist.get_rank()]
    for _ in range(2):
        said = generate(policy, prompts, KEYS, sampling, ENDS, seed=1)
        results.append((tokens_of(said), differences(policy, said, prompts)))
        with torch.no_grad():
            for number, parameter in enumerate(policy.model.parameters()):
                if parameter.requires_grad:
                    parameter.add_(0.05 * (1 + number % 3))
    return results
