"""Rotary frequencies that follow a call's longest position are chosen once for a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from every_model import configuration_class, small_config
from lacuna.model.rotation import fix_rotations
from lacuna.parallel.mesh import Layout
from layouts import LENGTH, Case, outcomes, relative_error
from tiny import random_model

ORIGINAL = 8
SCALES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 4.0, 8.0],
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
RING = {"context_parallel_rotate_method": "alltoall"}


def rotating(kind: str) -> PretrainedConfig:
    """A model whose rotations differ for calls of more than `ORIGINAL` positions."""
    limit = {"longrope": 64, "dynamic": ORIGINAL}[kind]
    model = {"longrope": "phi3", "dynamic": "llama"}[kind]
    own = small_config(
        configuration_class(model), max_position_embeddings=limit, rope_parameters=SCALES[kind]
    )
    own.sliding_window = None
    return own


def states(kind: str, ids: torch.Tensor, fixed: int | None) -> torch.Tensor:
    model = random_model(rotating(kind))
    if fixed is not None:
        fix_rotations(model, fixed)
    with torch.no_grad():
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("length", [ORIGINAL, 3 * ORIGINAL])
def test_what_is_chosen_is_what_transformers_chooses_for_that_many_positions(
    kind: str, length: int
) -> None:
    ids = torch.arange(length)[None] + 3
    assert torch.equal(states(kind, ids, fixed=length), states(kind, ids, fixed=None))
    short = ids[:, :4]
    same = torch.equal(states(kind, short, fixed=length), states(kind, short, fixed=None))
    assert same == (length == ORIGINAL), "a short call goes by the run's longest, not by its own"


def test_it_is_said_which_frequencies_were_chosen() -> None:
    said = [fix_rotations(random_model(rotating("longrope")), length) for length in (ORIGINAL, 24)]
    assert said == [
        ["model.rotary_emb: longrope, original frequencies for 8 positions"],
        ["model.rotary_emb: longrope, longer frequencies for 24 positions"],
    ]


def test_models_without_such_rotations_are_left_alone() -> None:
    assert fix_rotations(random_model(small_config(configuration_class("llama"))), 1000) == []


def test_documents_of_all_lengths_train_alike_in_every_layout(tmp_path: Path) -> None:
    random_model(rotating("longrope")).save_pretrained(tmp_path)
    assert LENGTH > ORIGINAL
    [alone, accumulated] = outcomes(tmp_path, [Case(), Case(accumulation=8)])
    layouts = [
        Case(Layout(dp_shard=2), 2),
        Case(Layout(cp=2)),
        Case(Layout(cp=2, ring=True), parallelism=RING),
    ]
    for each in (accumulated, *outcomes(tmp_path, layouts)):
        assert each.loss == pytest.approx(alone.loss, rel=1e-6)
        assert relative_error(each.gradients, alone.gradients) < 2e-6


def test_the_exported_configuration_keeps_both_kinds_of_frequencies(tmp_path: Path) -> None:
    model = random_model(rotating("longrope"))
    fix_rotations(model, 24)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.rotary_emb.rope_type == "longrope"
    assert again.config.rope_parameters["short_factor"] == SCALES["longrope"]["short_factor"]
