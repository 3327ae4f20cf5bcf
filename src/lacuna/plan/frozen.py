"""How much memory a second model takes beside a run's own: a reference, a teacher, a critic."""

from dataclasses import replace

import torch

from lacuna.data import BatchSizes
from lacuna.data.tokenizer import grown_tokenizer
from lacuna.model.build import build_meta_model
from lacuna.model.parameter_groups import used_groups
from lacuna.objective.language_modelling import FrozenModel
from lacuna.parallel.fsdp import is_alone
from lacuna.parallel.mesh import Layout
from lacuna.parallel.precision import compute_dtype, frozen_training
from lacuna.plan.memory import estimate_memory


def frozen_memory(
    frozen: FrozenModel, layout: Layout, batch: BatchSizes, device: str, here: torch.device | None
) -> float:
    """Bytes that a second model takes on the rank that needs most; one that is trained, to learn.

    It is spread over the ranks by `layout`, and its layers are gathered when the other's are not.
    Its attention is tried out where there is a device `here` to try it on. Raises `UserError` for a
    model that cannot be spread or quantised so.
    """
    config = frozen.config
    layout = replace(layout, ep=config.parallelism.expert_parallel_degree)
    if not frozen.is_trained:
        training = frozen_training(config.training, device)
        config = config.model_copy(update={"training": training})
    model = build_meta_model(config, grown_tokenizer(config.model), layout, device, here)
    if frozen.is_trained:
        # Groups of parameters are the first model's, of which this one need not have all. Its
        # weights are whole, as foreach has them.
        changes = {"groups": used_groups(model, config.optimizer), "implementation": "foreach"}
        optimizer = config.optimizer.model_copy(update=changes)
        config = config.model_copy(update={"optimizer": optimizer})
        estimate = estimate_memory(config, layout, batch, model, device)
        return sum(estimate[part] for part in ("weights", "gradients", "optimizer"))
    weights = estimate_memory(config, layout, batch, model, device)["weights"]
    if not frozen.keeps_states:
        return weights
    text = model.config.get_text_config()
    whole_head = 0 if is_alone(config.training, layout) else text.vocab_size
    rows = batch.micro_batch * batch.accumulation * frozen.rows
    tokens = rows * config.training.seq_len / layout.cp
    states: float = (tokens + whole_head) * text.hidden_size
    return weights + states * compute_dtype(config.training, device).itemsize
