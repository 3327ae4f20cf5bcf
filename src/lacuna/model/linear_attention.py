"""Models of flash-linear-attention: documents by their bounds, what is refused, and their FLOPs."""

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.model.architecture import causal_class, decoder_layers, non_embedding_parameters
from lacuna.model.attention import BOUNDS, UNTOLD
from lacuna.model.fla_softmax import use_our_softmax_attention
from lacuna.model.forward import hidden_states
from lacuna.model.inputs import prepare_inputs
from lacuna.model.probe import Result, Rows, Trial, reason_against, result_in_rows, trial_of
from lacuna.model.specimen import LENGTH, specimen_and_layers
from lacuna.parallel.backbone import backbone
from lacuna.parallel.mesh import Layout
from lacuna.parallel.precision import store_in
from lacuna.parallel.stages import stage_of

_STAGES = 2

# How far documents in one row may be from the same documents alone. A document that sees another
# differs by about 1; in half precision, kernels round differently for rows of other lengths.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}

# Products of a head's state [key width, value width] with a token's vectors, by the layer that has
# the state: one to write to it, one to read it; the delta rule reads once more before it writes,
# and RWKV7 then writes what it removes apart from what it adds.
STATE_PRODUCTS = {
    "GatedLinearAttention": 2,
    "HGRN2Attention": 2,
    "LightNetAttention": 2,
    "LinearAttention": 2,
    "Mamba2": 2,
    "MultiScaleRetention": 2,
    "RWKV6Attention": 2,
    "SimpleGatedLinearAttention": 2,
    "Comba": 3,
    "DeltaNet": 3,
    "GatedDeltaNet": 3,
    "KimiDeltaAttention": 3,
    "RWKV7Attention": 4,
}
# Layers without products beside those of their weights.
_ELEMENTWISE = ("HGRNAttention",)
# Attributes of those layers with a head's width of keys, and of values.
_KEY_WIDTHS = ("head_k_dim", "head_f_dim", "ssm_state_size", "head_dim")
_VALUE_WIDTHS = ("head_v_dim", "head_i_dim", "head_dim")


def bounds_choices(
    asked: str, model_config: PretrainedConfig, device_type: str, layout: Layout
) -> tuple[str, ...]:
    """The ways to tell a model of fla's of the documents in a row, the best first.

    With `BOUNDS` it is told where they begin; with `UNTOLD` nothing is told, which is right where a
    row is one document. Raises `UserError` for what no model of fla's can have.
    """
    kind = causal_class(model_config).__name__
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"model: the kernels of {kind} need a GPU, and this run is on the CPU: run it on a GPU."
        )
    if asked not in ("auto", "varlen"):
        raise UserError(
            f'model.attention: "{asked}" cannot be had: {kind} has kernels of its own: leave it '
            "out."
        )
    shared = {"tensor_parallel_degree": layout.tp, "context_parallel_degree": layout.cp}
    for setting, degree in shared.items():
        if degree > 1:
            raise UserError(
                f"parallelism.{setting}: {kind} has no plan for it: use data or pipeline "
                "parallelism."
            )
    use_our_softmax_attention()
    return (BOUNDS,) if layout.pp > 1 or asked == "varlen" else (BOUNDS, UNTOLD)


def find_bounds(
    names: Sequence[str],
    model_config: PretrainedConfig,
    rows: Rows,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
) -> str:
    """The first of `names` with which documents in `rows` are to a small model as they are alone.

    Values and gradients are compared in the run's `dtype`, since some of fla's kernels have no
    float32. Raises `UserError` where none will do, or where the model cannot be cut into the stages
    of a pipeline.
    """
    kind = causal_class(model_config).__name__
    specimens = partial(_specimen, model_config, longest, device, dtype)
    tried = partial(_reasons_by_name, names, specimens, kind, _TOLERANCE[dtype])
    reasons = tried(trial_of(model_config, rows))
    if None not in reasons.values():
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        wrong = f"{kind} does not compute in rows what it computes of documents alone ({said})"
        if rows == "packed" and None in tried(trial_of(model_config, "padded")).values():
            raise UserError(
                f'data.document_mask: in packed rows {wrong}: set packing.mode = "none" to give '
                "each document a row of its own, or set data.document_mask = false to have the "
                "documents of a row see each other."
            )
        raise UserError(f"model: {wrong}: choose another model.")
    if layout.pp > 1:
        trial = trial_of(model_config, rows)
        by_stages = partial(_by_stages, specimens, trial)
        reason = reason_against(by_stages, _run_alone(specimens, trial, kind), _TOLERANCE[dtype])
        if reason is not None:
            raise UserError(
                f"parallelism.pipeline_parallel_degree: cut into stages, {kind} would compute "
                f"something else ({reason}): use data parallelism."
            )
    return list(reasons)[-1]


def _reasons_by_name(
    names: Sequence[str], specimens: Any, kind: str, tolerance: float, trial: Trial
) -> dict[str, str | None]:
    """Why each of `names` up to the first exact one is not exact; None for that one."""
    own = _run_alone(specimens, trial, kind)
    reasons: dict[str, str | None] = {}
    for name in names:
        reasons[name] = reason_against(partial(_in_rows, specimens, name, trial), own, tolerance)
        if reasons[name] is None:
            break
    return reasons


def _specimen(
    model_config: PretrainedConfig,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> tuple[PreTrainedModel, nn.ModuleList]:
    """A small model that trains: in evaluation, fla takes kernels without a backward pass."""
    model, layers = specimen_and_layers(model_config, attention, longest, device, _STAGES)
    store_in(model, dtype)
    return model.train(), layers


def _run_alone(specimens: Any, trial: Trial, kind: str) -> Result:
    """The result of every document alone, by fla's own code."""
    model, _ = specimens(UNTOLD)
    rows = trial.batch.columns["input_ids"].to(model.device)
    try:
        states = [
            backbone(model)(input_ids=rows[row : row + 1, start:stop]).last_hidden_state[0]
            for row, start, stop in trial.documents
        ]
        return _result(model, torch.cat(states))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as fault:
        reason = " ".join(str(fault).split())[:200]
        raise UserError(
            f"model: {kind} does not train by fla's own code in {model.dtype}, tried on rows of "
            f"{LENGTH} tokens ({reason}): choose another, or another "
            "training.mixed_precision_param."
        ) from fault


def _result(model: PreTrainedModel, states: Tensor) -> Result:
    """The states of documents one behind the other [tokens, width], and gradients of noise."""
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    total = (states.float() * noise.to(states.device)).sum()
    return Result(states.detach(), list(torch.autograd.grad(total, weights, allow_unused=True)))


def _in_rows(specimens: Any, name: str, trial: Trial) -> Result:
    """The result of the documents together in rows, as a run computes them."""
    model, _ = specimens(name)
    states = hidden_states(model, prepare_inputs(trial.batch, name, model.device))
    return result_in_rows(model, states, trial)


def _by_stages(specimens: Any, trial: Trial) -> Result:
    """The result of the documents in rows, computed by the two stages of a pipeline."""
    model, layers = specimens(BOUNDS)
    half = len(layers) // _STAGES
    ranges = [range(half), range(half, len(layers))]
    first, last = (stage_of(model, layers, ranges, index) for index in range(_STAGES))
    inputs = prepare_inputs(trial.batch, BOUNDS, model.device)
    last.entrance.received = hidden_states(first.module, inputs)
    return result_in_rows(model, hidden_states(last.module, inputs), trial)


def products_and_widths(model: PreTrainedModel) -> tuple[int, dict[int | None, int]]:
    """What `step_flops` counts of a model of fla's.

    The first is the number of products of a token with weights and with states of linear attention:
    `STATE_PRODUCTS` · heads · key width · value width for each layer, as the recurrence computes
    them. The second is the summed width of the heads with softmax attention, by window.
    """
    products = non_embedding_parameters(model)
    widths: Counter[int | None] = Counter()
    unknown = set()
    module: Any
    for module in decoder_layers(model).modules():
        name = type(module).__name__
        if not type(module).__module__.startswith("fla.layers."):
            continue
        heads: Any = getattr(module, "num_v_heads", None) or getattr(module, "num_heads", None)
        if name == "GatedSlotAttention":  # keys by slots, then slots by values
            slots = module.num_slots
            products += 2 * heads * slots * (module.head_k_dim + module.head_v_dim)
        elif name == "GatedDeltaProduct":
            count = 2 * module.num_householder + 1
            products += count * heads * module.head_k_dim * module.head_v_dim
        elif name in STATE_PRODUCTS:
            size = heads * _first_of(module, _KEY_WIDTHS) * _first_of(module, _VALUE_WIDTHS)
            products += STATE_PRODUCTS[name] * size
        elif hasattr(module, "window_size") and hasattr(module, "head_dim"):
            widths[module.window_size] += heads * module.head_dim
        elif heads is not None and name not in _ELEMENTWISE:
            unknown.add(name)
    if unknown:
        logger.warning(
            "mfu is too low: only the weights of %s are counted, not what mixes tokens",
            ", ".join(sorted(unknown)),
        )
    return products, dict(widths)


def _first_of(module: nn.Module, names: Sequence[str]) -> int:
    """The first of several attributes that a module has."""
    value: int = next(getattr(module, name) for name in names if hasattr(module, name))
    return value
