"""Attentions that are not softmax: whether a run may have one, and what its model says of it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from traceback import extract_tb

import torch
from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.config.attentions import TRAINED, is_own
from lacuna.model.architecture import causal_class, is_soft_capped
from lacuna.model.attention_choice import has_dropout
from lacuna.model.over_tokens import has_convolutions
from lacuna.model.own_attention import CALLED, register
from lacuna.model.probe import (
    Rows,
    in_one_line,
    our_result,
    own_result,
    reason_against,
    trial_of,
)
from lacuna.parallel.mesh import Layout


def own_choices(
    asked: str, apart: bool, model_config: PretrainedConfig, layout: Layout
) -> tuple[str, ...]:
    """The one attention that a run has if it asks for an own one, or if its model has one.

    It is noted in the configuration, in place, so that what is exported has it too. Raises
    `UserError` where the model or the layout cannot have it.
    """
    stated = str(model_config._attn_implementation)
    name = stated if asked == "auto" else asked
    if not is_own(name):
        raise UserError(
            f'model.attention: "{name}" is softmax, and the model was trained with "{stated}": '
            'leave it out, or take "attn_implementation" out of the model\'s config.json.'
        )
    if asked == "auto" and ":" in name:
        raise UserError(
            f'model.attention: the model was trained with "{name}", which is code of its user: '
            "give this name if that is to run."
        )
    own = register(name)
    kind = causal_class(model_config)
    problem = None
    # Hybrids do not say that theirs can be exchanged; whether it was is tried.
    if not kind._supports_attention_backend and not has_convolutions(model_config):
        problem = f"{kind.__name__} computes attention by code of its own: choose another model"
    elif is_soft_capped(model_config):
        problem = "would leave out the model's soft cap: set its attn_logit_softcapping to null"
    elif has_dropout(model_config):
        problem = "has no dropout, and the model has: set its attention_dropout or attn_pdrop to 0"
    elif apart and not own.documents:
        problem = "knows no documents: set data.document_mask = false"
    elif layout.ring and layout.cp > 1 and own.merged is None:
        problem = (
            "is not known to merge by log-sum-exp, as the ring of context parallelism needs: set "
            'parallelism.context_parallel_rotate_method = "allgather"'
        )
    if problem is not None:
        raise UserError(f'model.attention: "{name}" cannot be had: {problem}.')
    note_attention(model_config, name)
    return (TRAINED + name,)


def note_attention(model_config: PretrainedConfig, name: str) -> None:
    """Has a configuration, in place, say under the public name what its model was trained with.

    transformers reads that from config.json, and refuses a name that nobody has registered.
    """
    model_config.attn_implementation = name


def restore_attention(model_config: PretrainedConfig, trusts: bool) -> None:
    """Makes known, and notes again, the attention of one's own that a configuration of a file says.

    Raises `UserError` for one of a user's own whose code is not trusted.
    """
    name = str(model_config._attn_implementation)
    if ":" in name and not trusts:
        raise UserError(
            f'the model was trained with the attention "{name}", Python code that only runs if it '
            "is trusted (--trust-remote-code): read it first, or take another model."
        )
    register(name)
    note_attention(model_config, name)


def scaled_widths(
    model_config: PretrainedConfig, widths: dict[int | None, int]
) -> dict[int | None, int]:
    """The widths that count FLOPs, of the attention that a model is trained with."""
    own = register(model_config._attn_implementation.removeprefix(TRAINED))
    return {window: round(width * own.relative_flops) for window, width in widths.items()}


@contextmanager
def _own_faults_explained(name: str) -> Iterator[None]:
    """Turns what the code of a user's own attention raises into a `UserError` that says where."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        fault = error.__cause__ or error  # what came of it is blamed on the model
        code = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        frames = [one for one in extract_tb(fault.__traceback__) if one.filename == code]
        if not frames or not isinstance(fault, Exception):
            raise
        place = f"{code}, line {frames[-1].lineno}, in {frames[-1].name}"
        raise UserError(
            f'model.attention: "{name}" fails in a small model ({in_one_line(fault)}; {place}): '
            "mend it there, or choose another attention."
        ) from fault


def require_exact(
    attention: str,
    model_config: PretrainedConfig,
    rows: Rows,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raises `UserError` unless documents in `rows` are to a small model as they are alone.

    Those alone are seen by the masks that transformers makes, as in generation. Values and
    gradients are compared in float32.
    """
    name = attention.removeprefix(TRAINED)
    kind = causal_class(model_config).__name__
    trial = trial_of(model_config, rows)
    CALLED.clear()
    with _own_faults_explained(name):
        own = own_result(model_config, longest, trial, device, attention=name)
    if not CALLED:
        raise UserError(
            f'model.attention: "{name}" cannot be had: {kind} never asks for it: choose another '
            "model."
        )
    ours = partial(our_result, attention, model_config, longest, trial, device, dtype)
    reason = reason_against(_own_faults_explained(name)(ours), own)
    if reason is not None:
        raise UserError(
            f'model.attention: "{name}" in {rows} rows is not what it is for documents alone in '
            f"{kind} ({reason}): choose another model, or mend the attention."
        )
