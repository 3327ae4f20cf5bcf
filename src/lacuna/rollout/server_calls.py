"""What a vLLM server is asked over HTTP, each call once."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.client import INTERNAL_SERVER_ERROR, HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from lacuna.config.reinforcement import RolloutConfig
from lacuna.rollout.drawing import Asked, Completion

# Longest wait for what the server answers without computing anything, in seconds.
_SOON = 60.0
# vLLM adds the number of a completion to the seed of its prompt, and takes none from 2^63 on.
_SEEDS = 2**62
# Characters of what the server says that are shown.
_SHOWN = 300


class UnansweredCallError(Exception):
    """The server gave no answer, or one that may be another when it is asked again."""


class RefusedError(Exception):
    """The server does not do what it is asked, and would not do it another time."""


def call(sampling: RolloutConfig, path: str, body: object = None, seconds: float = _SOON) -> Any:
    """What the server answers to a request, for which it has so many `seconds`.

    Raises `UnansweredCallError` and `RefusedError`.
    """
    data = None if body is None else json.dumps(body).encode()
    address = f"{str(sampling.server).rstrip('/')}{path}"
    request = Request(address, data, {"Content-Type": "application/json"})
    # Proxies of the environment are for the way out, not for a server of one's own.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(request, timeout=min(seconds, sampling.server_timeout)) as answer:
            text = answer.read()
        return json.loads(text or "null")
    except HTTPError as error:
        said = ""
        with suppress(OSError, HTTPException):  # it is told as far as it came
            said = error.read().decode(errors="replace").strip()[:_SHOWN]
        told = f"{path}: status {error.code} {said}"
        if error.code >= INTERNAL_SERVER_ERROR:
            raise UnansweredCallError(told) from error
        raise RefusedError(f"{told}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise UnansweredCallError(f"{path}: {getattr(error, 'reason', None) or error}") from error


def version_of(sampling: RolloutConfig) -> str:
    """The version of the weights that the server has, as it was told.

    Raises `UnansweredCallError` where it does not say.
    """
    said = call(sampling, "/weight_info")
    if not isinstance(said, dict) or "weight_version" not in said:
        raise UnansweredCallError("/weight_info: it has no weight_version")
    return str(said["weight_version"])


def hand_over(sampling: RolloutConfig, folder: str, version: str) -> None:
    """Has the server load the weights of a folder, and forget what it computed with others."""
    name = partial(call, sampling, "/update_weight_version")
    # Before as well: another that asks the server now must not think that it has the same weights.
    name({"new_version": f"{version} unfinished"})
    load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    call(sampling, "/collective_rpc", load, sampling.server_timeout)
    # Keys and values of prompts, which would be taken for those by the new weights.
    if not call(sampling, "/reset_prefix_cache", {})["success"]:
        raise UnansweredCallError("/reset_prefix_cache: requests of others are under way")
    name({"new_version": version})


def complete_prompt(
    sampling: RolloutConfig, asked: Asked, ends: Sequence[int], version: str
) -> list[Completion]:
    """The completions of a prompt, drawn from all of the vocabulary, by weights of a version."""
    body = {
        "prompt": asked.tokens,
        "n": len(asked.seeds),
        "seed": asked.seeds[0] % _SEEDS,
        "max_tokens": asked.limit,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(ends),
        "ignore_eos": True,  # these alone end a completion, whatever the server's files say
        "logprobs": 0,  # of the drawn token alone
        "return_token_ids": True,
        "cache_salt": version,
    }
    answer = call(sampling, "/v1/completions", body, sampling.server_timeout)
    try:
        choices = {choice["index"]: choice for choice in answer["choices"]}
        return [_completion(choices[one], asked.limit, ends) for one in range(len(asked.seeds))]
    except (KeyError, TypeError) as error:
        raise RefusedError(f"/v1/completions: this is no answer of vLLM's ({error!r})") from error


def _completion(choice: dict[str, Any], limit: int, ends: Sequence[int]) -> Completion:
    """A completion from the server's answer, which must be whole."""
    tokens = choice["token_ids"]
    logprobs = choice["logprobs"]["token_logprobs"]
    ended = bool(tokens) and tokens[-1] in ends
    if not ended and choice["finish_reason"] != "length":
        raise UnansweredCallError(f"a completion ended by {choice['finish_reason']!r}")
    if len(logprobs) != len(tokens) or not (ended or len(tokens) == limit):
        raise RefusedError(
            f"of a completion of {limit} tokens the server returned {len(tokens)}, with "
            f"{len(logprobs)} log-probabilities"
        )
    return Completion(tokens, logprobs, ended)
