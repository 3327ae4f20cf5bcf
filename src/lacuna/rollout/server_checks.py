"""Whether a vLLM server has the model in training, and tells what rollouts need."""

from copy import deepcopy

import torch
from transformers import PretrainedConfig

from lacuna.config import UserError, explained, logger
from lacuna.config.reinforcement import RolloutConfig
from lacuna.data.unpacked import hf_folder
from lacuna.model.architecture import meta_model, stored_tensors
from lacuna.model.build import BuiltModel
from lacuna.parallel.precision import compute_dtype
from lacuna.rollout.server_calls import RefusedError, call, version_of

# Mean difference of log-probabilities, in nats, beyond which two models are not the same: rounding
# to bfloat16 makes some hundredths, to float32 nothing like a thousandth.
_APART = 0.1
_APART_IN_FLOAT32 = 1e-3


def check_settings(policy: BuiltModel, sampling: RolloutConfig) -> None:
    """Raises `UserError` where the server has another model, or settings that do not suit.

    Raises `UnansweredCallError` where it does not answer.
    """
    at = f"rollout.server: {sampling.server}"
    try:
        settings = call(sampling, "/server_info?config_format=json")["vllm_config"]
        served = settings["model_config"]
        is_cpu = str(settings["device_config"]["device"]) == "cpu"
        version_of(sampling)
    except (RefusedError, KeyError, TypeError) as error:
        raise UserError(
            f"{at} does not tell its settings ({error}): it should be vLLM 0.32 or newer, with "
            "VLLM_SERVER_DEV_MODE=1 in its environment."
        ) from error
    if served["logprobs_mode"] != "processed_logprobs":
        raise UserError(
            f"{at} tells {served['logprobs_mode']}, not the log-probabilities that tokens are "
            "drawn with: start it with --logprobs-mode processed_logprobs."
        )
    if served["quantization"] is not None:
        raise UserError(
            f"{at} quantises its model ({served['quantization']}), so that it would not sample "
            "the one in training: start it without."
        )
    longest = policy.training.seq_len
    if served["max_model_len"] < longest:
        raise UserError(
            f"{at} takes {served['max_model_len']} tokens, fewer than training.seq_len = "
            f"{longest}: start it with --max-model-len {longest}."
        )
    if is_cpu:
        _check_model_on_cpu(policy, at)
    _check_shapes(policy, at, served["model"])


def _check_model_on_cpu(policy: BuiltModel, at: str) -> None:
    """Raises `UserError` for models that vLLM 0.32 does not load anew as it should without a GPU.

    It multiplies by packed copies: that of a tied head stays the old one, and with experts it
    computes something else even after it was handed the weights that it had.
    """
    wrong = ""
    if any(".experts." in name for name in stored_tensors(policy.model)):
        wrong = "experts"
    if policy.model.config.get_text_config().tie_word_embeddings:
        wrong = "heads of models whose embedding is their head (tie_word_embeddings)"
    if wrong:
        raise UserError(
            f"{at} runs on a CPU, where vLLM does not take new {wrong} as it should: use a server "
            "on a GPU, or rollout.engine = auto."
        )


def _check_shapes(policy: BuiltModel, at: str, served: str) -> None:
    """Raises `UserError` where the model `served` has not the tensors of the policy.

    vLLM must not be handed other tensors: it keeps its own of those that are missing, and ends
    where they have other shapes.
    """
    other = f"{at} has another model than the one in training: {served!r}"
    mend = "start it with the model that the run begins with"
    own = deepcopy(policy.model.config)
    with explained(f"{other} has no configuration that can be read here", OSError, mend=mend):
        kind = PretrainedConfig.get_config_dict(hf_folder(served))[0].get("model_type")
        if kind != own.model_type:
            raise UserError(f"{other} is of the kind {kind}, not {own.model_type}; {mend}.")
        theirs = type(own).from_pretrained(hf_folder(served))
    models = [meta_model(one, "eager", torch.float32) for one in (theirs, own)]
    shapes = [
        {name: (*tensor.shape,) for name, tensor in stored_tensors(model).items()}
        for model in models
    ]
    for name in shapes[0] | shapes[1]:
        found, wanted = (one.get(name, "missing") for one in shapes)
        if found != wanted:
            raise UserError(f"{other}, where {name} is {found}, not {wanted}; {mend}.")


def check_difference(policy: BuiltModel, sampling: RolloutConfig, apart: float) -> None:
    """Raises `UserError` where log-probabilities are too far `apart`, in nats."""
    served = call(sampling, "/server_info?config_format=json")["vllm_config"]["model_config"]
    own = compute_dtype(policy.training, policy.device.type)
    is_exact = {str(served["dtype"]), str(own)} == {"torch.float32"}
    logger.info("log-probabilities of the server and of training differ by %.1e nats", apart)
    if not apart <= (_APART_IN_FLOAT32 if is_exact else _APART):
        raise UserError(
            "rollout.server: with the weights in training the server finds log-probabilities that "
            f"differ by {apart:.2g} nats from those of training: it computes another model. Start "
            "it with the model that the run begins with, and without --hf-overrides."
        )
