"""Completions by a vLLM server, which is handed the weights in training before it is asked."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from lacuna.config import OutageError, RunError, UserError, explained, logger
from lacuna.config.reinforcement import RolloutConfig
from lacuna.formats.huggingface import write_model
from lacuna.model.build import BuiltModel
from lacuna.parallel.precision import compute_dtype
from lacuna.rollout.drawing import Asked, Completion
from lacuna.rollout.gathered import gathered
from lacuna.rollout.generate import generating
from lacuna.rollout.server_calls import (
    RefusedError,
    UnansweredCallError,
    complete_prompt,
    hand_over,
    version_of,
)
from lacuna.rollout.server_checks import check_difference, check_settings

Result = TypeVar("Result")

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
# Longest prompt and completion by which the two are compared.
_COMPARED = (64, 16)
# Begins the versions of this process's weights, and tells them from those of any other.
_OWN = uuid4().hex
# The version of the weights in each folder that this process has written.
_versions: dict[str, str] = {}
# The locks of folders that weights are written to: they are held as long as this process lives.
_LOCKS: list[object] = []


@dataclass
class _Order:
    """What the server is to make of the weights that are in the folder.

    Attributes:
        version: of the weights, by which the server tells whether it still has them.
        done: the completions that it has made, by the place of their prompt.
        answers: how many prompts it has completed, those included that it must complete again.
    """

    policy: BuiltModel
    sampling: RolloutConfig
    asked: Sequence[Asked]
    ends: Sequence[int]
    version: str
    done: dict[int, list[Completion]] = field(default_factory=dict)
    answers: int = 0


def check_server(
    policy: BuiltModel, sampling: RolloutConfig, exchange: dist.ProcessGroup | None
) -> None:
    """Raises `UserError` unless the server answers, has this model, and computes what it does.

    All ranks must call it. The server is handed the weights.
    """
    _from_first(exchange, partial(_open, policy, sampling))
    limit = min(sampling.max_tokens, _COMPARED[1])
    length = min(policy.training.seq_len - limit, _COMPARED[0])
    vocabulary = policy.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (length,), generator=generator).tolist()
    _write_weights(policy, sampling)
    version = _versions[_weights_folder(sampling)]
    order = _Order(policy, sampling, [Asked(prompt, [0], limit)], [], version)
    said = _from_first(exchange, partial(_first_completion, order))
    with generating(policy.model, in_pages=False), gathered(policy.model):
        ids = torch.tensor([prompt + said.tokens], device=policy.device)
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, length - 1 : -1]
    logprobs = (logits.float() / sampling.temperature).log_softmax(-1)
    own = logprobs.gather(1, ids[0, length:, None])[:, 0]
    apart = (own.cpu() - torch.tensor(said.logprobs)).abs().mean().item()
    _from_first(exchange, partial(check_difference, policy, sampling, apart))


def complete_by_server(
    policy: BuiltModel,
    asked: Sequence[Asked],
    sampling: RolloutConfig,
    ends: Sequence[int],
    exchange: dist.ProcessGroup | None,
    is_changed: bool = True,
) -> list[list[Completion]]:
    """All completions of what this rank has `asked`, by the weights as they are now.

    All ranks must call it; the first one asks for all. Weights that are not changed since they were
    written last are not written again. Raises `OutageError` on all ranks where the server is gone
    for longer than `rollout.server_timeout`, or is not the same any more.
    """
    if is_changed:
        _write_weights(policy, sampling)
    of_ranks: list[Sequence[Asked]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, asked, group=exchange)
    of_all = [one for part in of_ranks for one in part]
    order = _Order(policy, sampling, of_all, ends, _versions[_weights_folder(sampling)])
    found = _from_first(exchange, partial(_ask_patiently, order))
    before = sum(len(part) for part in of_ranks[: dist.get_rank()])
    return found[before : before + len(asked)]


def _from_first(exchange: dist.ProcessGroup | None, action: Callable[[], Result]) -> Result:
    """What `action` returns on the first rank, or raises there, on all ranks."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (UserError, RunError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=exchange)
    if outcome[1] is not None:
        raise outcome[1]
    return cast(Result, outcome[0])


def _open(policy: BuiltModel, sampling: RolloutConfig) -> None:
    """Takes the folder for this run; raises `UserError` where it or the server cannot be had."""
    try:
        check_settings(policy, sampling)
    except UnansweredCallError as error:
        raise UserError(
            f"rollout.server: {sampling.server} does not answer ({error}): start the server first."
        ) from error
    folder = str(sampling.server_folder)
    wrong = f"rollout.server_folder: cannot write to {folder!r}"
    taken = f"rollout.server_folder: another run writes to {folder!r}"
    mend = "choose another folder"
    with explained(wrong, OSError, mend=mend), explained(taken, Timeout, mend=mend):
        os.makedirs(folder, exist_ok=True)
        lock = FileLock(os.path.join(folder, ".lock"))
        lock.acquire(timeout=0)
    _LOCKS.append(lock)


def _write_weights(policy: BuiltModel, sampling: RolloutConfig) -> None:
    """Writes the weights as training computes with them, adapters merged; all ranks call it.

    They get a version of their own.
    """
    dtype = compute_dtype(policy.training, policy.device.type)
    write_model(
        policy.model,
        _weights_folder(sampling),
        dtype,
        lambda config, folder: config.save_pretrained(folder),
    )
    _versions[_weights_folder(sampling)] = f"{_OWN} {uuid4().hex}"


def _weights_folder(sampling: RolloutConfig) -> str:
    """Where the weights are, by a name that holds in the server's working folder as well."""
    return os.path.abspath(os.path.join(str(sampling.server_folder), "weights"))


def _first_completion(order: _Order) -> Completion:
    """The completion of the only prompt, asked for once; raises `UserError` without one."""
    try:
        return _ask(order)[0][0]
    except (UnansweredCallError, RefusedError) as error:
        raise UserError(
            f"rollout.server: {order.sampling.server} does not load the weights from "
            f"rollout.server_folder, {_weights_folder(order.sampling)!r}, or does not complete a "
            f"prompt with them ({error})."
        ) from error


def _ask_patiently(order: _Order) -> list[list[Completion]]:
    """Asks until there is an answer.

    Raises `OutageError` where no prompt is completed for `rollout.server_timeout` after a failure,
    and where it makes no sense to ask again.
    """
    sampling = order.sampling
    deadline = 0.0
    pause = _FIRST_PAUSE
    answers = -1
    while True:
        try:
            return _ask(order)
        except UserError as error:
            raise OutageError(str(error)) from error
        except RefusedError as error:
            raise OutageError(
                f"rollout.server: {sampling.server} does not do what it is asked ({error})."
            ) from error
        except UnansweredCallError as error:
            now = time.monotonic()
            if order.answers > answers:
                deadline = now + sampling.server_timeout
                pause = _FIRST_PAUSE
                answers = order.answers
            if now >= deadline:
                raise OutageError(
                    f"rollout.server: {sampling.server} has not answered for rollout."
                    f"server_timeout = {sampling.server_timeout:g} s ({error}): start it again."
                ) from error
            logger.warning("%s does not answer (%s): trying again", sampling.server, error)
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, _LONGEST_PAUSE)


def _ask(order: _Order) -> list[list[Completion]]:
    """The completions of all prompts, by the weights of this version.

    The server is handed them unless it has them. What is done is not asked for again, but where the
    server had other weights meanwhile: because it was started anew, say.
    """
    sampling = order.sampling
    present = version_of(sampling)
    if present != order.version:
        order.done.clear()
        if not present.startswith(_OWN):
            check_settings(order.policy, sampling)
        hand_over(sampling, _weights_folder(sampling), order.version)
    missing = [place for place in range(len(order.asked)) if place not in order.done]
    samples = max((len(one.seeds) for one in order.asked), default=1)
    at_once = max(sampling.batch_size * dist.get_world_size() // samples, 1)
    with ThreadPoolExecutor(at_once) as pool:
        futures = {
            place: pool.submit(
                complete_prompt, sampling, order.asked[place], order.ends, order.version
            )
            for place in missing
        }
        for place, future in futures.items():
            try:
                order.done[place] = future.result()
                order.answers += 1
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    if version_of(sampling) != order.version:
        raise UnansweredCallError("its weights were changed while it was asked")
    return [order.done[place] for place in range(len(order.asked))]
