"""Tries a small model: does it say with keys and values in pages what it says without?"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lacuna.config import UserError, logger
from lacuna.config.attentions import TRAINED, is_own
from lacuna.model.attention import BOUNDS, UNTOLD
from lacuna.model.head import relative_difference
from lacuna.model.probe import in_one_line
from lacuna.model.specimen import LENGTH, specimen, tokens_to_try
from lacuna.parallel.precision import store_in
from lacuna.rollout.pages import PAGED, Pool
from lacuna.rollout.passes import prompt_logits

_EXACT = 1e-4
_SIZE = 16
# Tokens of two sequences that are read as prompts; the others come one by one.
_PROMPTS = (3, 11)

_known: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()


def reason_against_pages(model: PreTrainedModel, device: torch.device) -> str | None:
    """Why a model cannot have its keys and values in pages; None if it can."""
    if model not in _known:
        _known[model] = _reason(model, device)
        if _known[model] is not None:
            logger.info("generating beside padding, without pages: %s", _known[model])
    return _known[model]


def _reason(model: PreTrainedModel, device: torch.device) -> str | None:
    attention = model.config._attn_implementation
    if attention in (BOUNDS, UNTOLD):
        return "it has kernels of its own"
    if is_own(attention.removeprefix(TRAINED)):
        return "its attention is not softmax"
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind is not None and ("dynamic" in kind or kind == "longrope"):
                return "its rotations follow the longest position"
    # A GPU multiplies half precision by other instructions. Rounding, also of what experts are
    # chosen by, errs less than this, and a wrong product more.
    bounds = {torch.float32: _EXACT} | ({torch.bfloat16: 0.3} if device.type == "cuda" else {})
    for dtype, bound in bounds.items():
        try:
            difference = _difference(model.config, device, dtype)
        except torch.OutOfMemoryError:
            raise
        except UserError as refusal:
            return str(refusal)
        except Exception as fault:  # whatever other people's models and a compiler may raise
            return in_one_line(fault)
        if not difference < bound:
            return f"what follows differs by {difference:.1g}"
    return None


@torch.no_grad()
def _difference(model_config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> float:
    """How the logits of a small model in `dtype` differ with pages, from prompts' last tokens on.

    They are compared with those of transformers' own code in float32.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = tokens_to_try(model_config)
    ids = torch.randint(tokens.start, tokens.stop, (2, LENGTH), generator=generator).to(device)
    own = specimen(model_config, device=device)
    whole: Tensor = own(input_ids=ids, use_cache=False).logits
    model = specimen(model_config, PAGED, device=device)
    if dtype != torch.float32:
        store_in(model, dtype)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    prompts = [
        (ids[row, :count].tolist(), table[row].tolist()) for row, count in enumerate(_PROMPTS)
    ]
    first = torch.tensor(_PROMPTS, device=device)
    rows = torch.arange(2, device=device)
    with Pool(5, _SIZE) as pool:
        found = [prompt_logits(model, prompts, pool, device)]
        for number in range(LENGTH - max(_PROMPTS)):
            positions = first + number
            output = model(
                input_ids=ids[rows, positions][:, None],
                position_ids=positions[:, None],
                use_cache=False,
                page_table=table,
                new_positions=positions,
            )
            found.append(output.logits[:, -1])
    wanted = [whole[rows, first + number - 1] for number in range(len(found))]
    return relative_difference(torch.stack(found), torch.stack(wanted))
