"""A model in small is made in little time and memory, however large the model is."""

import pytest
import torch

from every_model import NO_SPECIMEN, configuration_class, model_types, small_config
from lacuna.model import few_experts
from lacuna.model.few_experts import most_experts
from lacuna.model.specimen import LENGTH, specimen
from lacuna.parallel.expert_stacks import stacks_of

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MANY = 64
WIDE = 192
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
GROUPS = {"n_group": 8, "num_expert_group": 8, "topk_group": 4}


def mixtures() -> list[str]:
    kinds = [kind for kind in model_types() if kind not in NO_SPECIMEN]
    return [kind for kind in kinds if most_experts(small_config(configuration_class(kind)))]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "inkling_text" else [])
        for kind in mixtures()
    ],
)
def test_a_mixture_in_small_has_few_narrow_experts_and_chooses_among_them(kind: str) -> None:
    config = small_config(configuration_class(kind))
    text_config = config.get_text_config()
    few = most_experts(config)
    for name in COUNTS:
        if getattr(text_config, name, None) == few:
            setattr(text_config, name, MANY)
    for name, value in vars(text_config).items():
        if name.endswith(("intermediate_size", "ffn_hidden_size", "ffn_dim")) and value in (24, 48):
            setattr(text_config, name, WIDE)
    for name in CHOSEN:
        if getattr(text_config, name, None) == 2:
            setattr(text_config, name, 8)
    for name, value in GROUPS.items():
        if getattr(text_config, name, None) == 1:
            setattr(text_config, name, value)
    assert most_experts(config) == MANY
    model = specimen(config)
    assert 16 <= most_experts(model.config) <= MANY // 2
    stacks = stacks_of([model])
    assert {stack.down_proj.numel() / len(stack.down_proj) / 32 for stack in stacks} == {128}
    assert most_experts(config) == MANY, "the run's own configuration is as it was"
    with torch.no_grad():
        output = model(input_ids=torch.arange(3, 3 + LENGTH)[None], use_cache=False)
    assert output.logits.isfinite().all()


def test_a_large_matrix_has_no_row_twice() -> None:
    config = small_config(configuration_class("llama"), intermediate_size=40_000)
    weight = specimen(config).get_parameter("model.layers.0.mlp.gate_proj.weight").detach()
    assert weight.numel() > 1_000_003, "not all numbers are drawn"
    assert weight.unique(dim=0).shape == weight.shape
    assert weight.std().item() * weight.shape[1] ** 0.5 == pytest.approx(1, abs=0.01)


def test_no_experts_are_looked_for_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(few_experts, "with_few_experts")
    specimen(small_config(configuration_class("llama")))
    with pytest.raises(ImportError):
        specimen(small_config(configuration_class("qwen3_moe")))
