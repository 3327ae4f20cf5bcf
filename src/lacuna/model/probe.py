"""Tries a small model before a run: does it compute here what transformers' own code computes?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError
from lacuna.config.attentions import TRAINED
from lacuna.config.row_form import RowForm
from lacuna.data import Batch
from lacuna.data.packing import IGNORED
from lacuna.model.architecture import causal_class, is_soft_capped
from lacuna.model.forward import hidden_states
from lacuna.model.head import relative_difference
from lacuna.model.inputs import prepare_inputs
from lacuna.model.over_tokens import has_convolutions
from lacuna.model.specimen import LENGTH, specimen, specimen_and_layers, tokens_to_try
from lacuna.parallel.backbone import backbone
from lacuna.parallel.precision import store_in

_EXACT = 1e-4

# What other people's code may raise where a length, a layout or an attention does not suit it.
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

# Rows of packed documents, rows of one document each, or rows of texts that see each other.
Rows = Literal["packed", "padded", "whole"]


@dataclass(frozen=True)
class Trial:
    """A batch, and the row, the first token and the end of each of its documents."""

    batch: Batch
    documents: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Result:
    """The hidden states of the documents [tokens, width], and gradients of all weights.

    The gradients are those where the gradient of the states is noise.
    """

    states: Tensor
    gradients: list[Tensor | None]


def find_attention(
    names: Sequence[str],
    model_config: PretrainedConfig,
    rows: Rows,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """The first attention of `names` with which a model trains as by transformers' own code.

    Values and gradients are compared in float32, for `rows` like the run's, with rotations as for
    its `longest` position. Raises `UserError` where no attention is exact, and for a model whose
    tokens see later ones, or that does not run.
    """
    if rows == "packed" and has_convolutions(model_config):
        from lacuna.model.recurrent_rows import keep_documents_apart  # an extension

        keep_documents_apart(model_config)
    if names[0].startswith(TRAINED):
        from lacuna.model.own_attention_choice import require_exact  # an extension

        require_exact(names[0], model_config, rows, longest, device, dtype)
        return names[0]
    kind = causal_class(model_config).__name__
    _require_causal(model_config, longest)
    compared = partial(_reasons_by_name, names, model_config, longest, device)
    reasons = compared(rows, dtype)
    if None in reasons.values():
        return list(reasons)[-1]
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if dtype != torch.float32 and None in compared(rows, torch.float32).values():
        raise UserError(
            f"training.mixed_precision_param: {kind} computes in float32 only ({said}): set it to "
            "that."
        )
    wrong = f"{kind} does not compute here what transformers' own code does ({said})"
    ways: dict[Rows, str] = {
        "padded": 'set packing.mode = "none" to give each document a row of its own',
        "whole": "set data.document_mask = false to have the documents of a row see each other",
    }
    others = [one for one in ways if one != rows and rows != "whole"]
    for precision in dict.fromkeys([dtype, torch.float32]):
        fit = [ways[one] for one in others if None in compared(one, precision).values()]
        also = "" if precision == dtype else 'set training.mixed_precision_param = "float32", and '
        if fit:
            mend = also + ", or ".join(fit)
            raise UserError(f"data.document_mask: in {rows} rows {wrong}: {mend}.")
    raise UserError(f"model: {wrong}: choose another model, layout or model.attention.")


def _reasons_by_name(
    names: Sequence[str],
    model_config: PretrainedConfig,
    longest: int,
    device: torch.device,
    rows: Rows,
    dtype: torch.dtype,
) -> dict[str, str | None]:
    """Why each attention of `names` up to the first exact one is not exact; None for that one."""
    trial = trial_of(model_config, rows)
    own = own_result(model_config, longest, trial, device)
    reasons: dict[str, str | None] = {}
    for name in names:
        ours = partial(our_result, name, model_config, longest, trial, device, dtype)
        reasons[name] = reason_against(ours, own)
        if reasons[name] is None:
            break
    return reasons


def rows_of(form: RowForm) -> Rows:
    """The kind of rows that a run has."""
    if not form.document_mask:
        return "whole"
    return "padded" if form.packing.mode == "none" else "packed"


def trial_of(model_config: PretrainedConfig, rows: Rows) -> Trial:
    """A batch of two rows of `LENGTH` tokens, of which the second is one document."""
    generator = torch.Generator().manual_seed(0)
    tokens = tokens_to_try(model_config)
    ids = torch.randint(tokens.start, tokens.stop, (2, LENGTH), generator=generator)
    first = {"packed": LENGTH // 4, "padded": LENGTH - LENGTH // 4, "whole": LENGTH}[rows]
    documents = [(0, 0, first), (1, 0, LENGTH)]
    if rows == "packed":
        documents.insert(1, (0, first, LENGTH))
    bounds = torch.tensor([0, first, LENGTH, 2 * LENGTH]).unique()
    positions = torch.cat([torch.arange(int(size)) for size in bounds.diff()])
    columns = {
        "input_ids": ids,
        "labels": torch.full_like(ids, IGNORED),
        "position_ids": positions.view_as(ids),
        "real": torch.ones_like(ids, dtype=torch.bool),
    }
    batch = Batch(columns, {}, bounds.int(), int(bounds.diff().max()))
    return Trial(batch, tuple(documents))


def _require_causal(model_config: PretrainedConfig, longest: int) -> None:
    """Raises `UserError` for a model in which a token sees later ones."""
    model = specimen(model_config, _own_attention(model_config), longest)
    tokens = tokens_to_try(model_config)
    ids = torch.arange(LENGTH)[None] % (len(tokens) - 1) + tokens.start
    changed = ids.clone()
    changed[:, -4:] += 1
    with runs_by_itself(model), torch.no_grad():
        states = [_own_states(model, each)[:, :-4] for each in (ids, changed)]
    if relative_difference(*states) > _EXACT:
        raise UserError(
            f"model: in {type(model).__name__} tokens see later ones, so that it cannot learn to "
            "predict them: set is_decoder in its configuration where it has that (of BigBird also "
            "attention_type = original_full), or choose another model."
        )


def _own_attention(model_config: PretrainedConfig) -> str | None:
    """The attention that transformers' own code is to use: None leaves the choice to transformers.

    With a soft cap it is eager, since some versions choose one that leaves the cap out.
    """
    return "eager" if is_soft_capped(model_config) else None


@contextmanager
def runs_by_itself(model: PreTrainedModel) -> Iterator[None]:
    """Turns whatever transformers' own code raises into a `UserError` about the model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except FAULTS as fault:
        problem = f"{type(model).__name__} does not train by transformers' own code"
        length = f"tried on rows of {LENGTH} tokens"
        raise UserError(
            f"model: {problem}, {length} ({in_one_line(fault)}): choose another."
        ) from fault


def _own_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The hidden states that transformers' own code makes of one document [1, T]."""
    states: Tensor = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    return states


def own_result(
    model_config: PretrainedConfig,
    longest: int,
    trial: Trial,
    device: torch.device,
    least: int = 1,
    attention: str | None = None,
) -> Result:
    """The result of every document alone, by transformers' own code and choice of attention.

    The model has at `least` so many layers. It has the `attention` that is given, if one is.
    """
    attention = attention or _own_attention(model_config)
    model, _ = specimen_and_layers(model_config, attention, longest, device, least)
    rows = trial.batch.columns["input_ids"].to(device)
    with runs_by_itself(model):
        alone = (rows[row : row + 1, start:stop] for row, start, stop in trial.documents)
        return _states_and_gradients(
            model, torch.cat([_own_states(model, ids)[0] for ids in alone])
        )


def our_result(
    attention: str,
    model_config: PretrainedConfig,
    longest: int,
    trial: Trial,
    device: torch.device,
    dtype: torch.dtype,
) -> Result:
    """The result of the documents in rows together, as a run computes them.

    It is float32. Raises `ArithmeticError` where it would not be finite in the run's `dtype`.
    """
    model = specimen(model_config, attention, longest, device)
    inputs = prepare_inputs(trial.batch, attention, device)
    result = result_in_rows(model, hidden_states(model, inputs), trial)
    if dtype != torch.float32:
        store_in(model, dtype)
        states = result_in_rows(model, hidden_states(model, inputs), trial).states
        if not states.isfinite().all():
            raise ArithmeticError(f"values in {dtype} are not finite")
    return result


def result_in_rows(model: PreTrainedModel, states: Tensor, trial: Trial) -> Result:
    """The result of a model whose hidden states of the rows of a trial are `states`."""
    rows = states.reshape(*trial.batch.shape, -1)
    return _states_and_gradients(
        model, torch.cat([rows[row, start:stop] for row, start, stop in trial.documents])
    )


def _states_and_gradients(model: PreTrainedModel, states: Tensor) -> Result:
    """The states, and the gradients of every weight where the gradient of the states is noise.

    Afterwards the graph of the states is used up.
    """
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    total = (states.float() * noise.to(states.device)).sum()
    gradients = torch.autograd.grad(total, weights, allow_unused=True)
    return Result(states.detach(), list(gradients))


def reason_against(
    compute: Callable[[], Result], own: Result, tolerance: float = _EXACT
) -> str | None:
    """How the result of `compute` differs from a model's `own`, or how it fails; None if exact."""
    try:
        ours = compute()
    except torch.OutOfMemoryError:
        raise
    except FAULTS as fault:
        return in_one_line(fault)
    values = relative_difference(ours.states, own.states)
    if not values < tolerance:
        return f"values differ by {values:.1g}"
    pairs = zip(ours.gradients, own.gradients, strict=True)
    known = [pair for pair in pairs if any(one is not None for one in pair)]
    if any(one is None for pair in known for one in pair):
        return "other weights have gradients"
    flat = (torch.cat([each.flatten() for each in side]) for side in zip(*known, strict=True))
    gradients = relative_difference(*flat)
    return None if gradients < 10 * tolerance else f"gradients differ by {gradients:.1g}"


def in_one_line(fault: Exception) -> str:
    """What an error says, in one line."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
