"""Completions by the model in training, with the log-probability of each of their tokens."""

from collections.abc import Sequence

import torch.distributed as dist

from lacuna.config import UserError
from lacuna.config.reinforcement import RolloutConfig
from lacuna.data.mixture import random_key
from lacuna.model.build import BuiltModel
from lacuna.model.layers.float8 import has_float8
from lacuna.parallel.mesh import Mesh
from lacuna.rollout.drawing import Asked, Completion, Drawing
from lacuna.rollout.generate import complete
from lacuna.rollout.paged_probe import reason_against_pages

# Tells the randomness of completions from all other that derives from the seed.
STREAM = 2


def generate(
    policy: BuiltModel,
    prompts: Sequence[list[int]],
    keys: Sequence[int],
    sampling: RolloutConfig,
    ends: Sequence[int],
    seed: int,
    exchange: dist.ProcessGroup | None = None,
) -> list[list[Completion]]:
    """`sampling.samples` completions of each prompt by the model as it is now.

    All parameters are gathered once, on every rank that shares them, so that ranks may have
    different numbers of prompts and of tokens. Each prompt has a key: its completions are a
    function of the weights, the seed, the key and their number alone, but for rounding, which
    depends on what is generated beside them. Tokens are drawn from all of the vocabulary.
    """
    asked = [
        Asked(
            prompt,
            [random_key(seed, STREAM, key, number) for number in range(sampling.samples)],
            sampling.max_tokens,
        )
        for prompt, key in zip(prompts, keys, strict=False)
    ]
    return say(policy, asked, sampling, ends, exchange)


def say(
    policy: BuiltModel,
    asked: Sequence[Asked],
    sampling: RolloutConfig,
    ends: Sequence[int],
    exchange: dist.ProcessGroup | None = None,
    is_changed: bool = True,
) -> list[list[Completion]]:
    """The completions of what is `asked`, by the model as it is now; every rank must call it.

    Where a server makes them, ranks tell each other of them by the group `exchange`, and the server
    is handed the weights, unless the model `is_changed` no more since it was asked last.
    """
    if sampling.engine == "server":
        from lacuna.rollout.server import complete_by_server  # an extension

        return complete_by_server(policy, asked, sampling, ends, exchange, is_changed)
    return complete(
        policy.model,
        asked,
        Drawing(sampling.temperature),
        ends,
        sampling.batch_size,
        policy.device,
        whole=True,
        engine=sampling.engine,
        small=sampling.cache_dtype == "float8",
    )


def part_of_rank(mesh: Mesh, count: int) -> slice:
    """This rank's part of `count` prompts that all ranks have which share its sequences.

    The parts of ranks that follow each other do, too.
    """
    ranks = mesh.layout.cp * mesh.layout.tp
    place = mesh.rank("cp") * mesh.layout.tp + mesh.rank("tp")
    return slice(count * place // ranks, count * (place + 1) // ranks)


def check_engine(
    policy: BuiltModel, sampling: RolloutConfig, exchange: dist.ProcessGroup | None = None
) -> None:
    """Raises `UserError` where the engine that is asked for cannot be had.

    That is where the model is not exact with pages, or a server has not this model. All ranks must
    call it.
    """
    if sampling.engine == "server":
        from lacuna.rollout.server import check_server  # an extension

        check_server(policy, sampling, exchange)
    is_small = sampling.cache_dtype == "float8"
    if is_small and policy.device.type == "cuda" and not has_float8(policy.device):
        raise UserError(
            "rollout.cache_dtype = float8: this GPU has a compute capability below 8.9, and no "
            "float8: leave it out."
        )
    if not is_small and sampling.engine != "pages":
        return
    reason = reason_against_pages(policy.model, policy.device)
    if reason is not None:
        setting = "cache_dtype = float8" if is_small else "engine = pages"
        raise UserError(
            f"rollout.{setting}: {type(policy.model).__name__} is not generated from with its keys "
            f"and values in pages ({reason}): set auto."
        )
