"""Before a run a model is tried in small, in the shares that ranks would have.

Where that would compute something else, the run is refused.
"""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.model import probe_shares, specimen
from lacuna.model.probe_shares import require_shareable, tried_attention
from lacuna.parallel.mesh import Layout
from tiny import CPU, tiny_config

CONTEXT = Layout(cp=2)
PIPELINE = Layout(pp=2)


def require(kind: str, layout: Layout, masked: bool = True) -> None:
    rows = "packed" if masked else "whole"
    require_shareable(small_config(configuration_class(kind)), layout, rows, 64, CPU)


@pytest.mark.parametrize("layout", [CONTEXT, PIPELINE], ids=["context", "pipeline"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmo2", "gpt_oss", "deepseek_v3"])
def test_models_that_pass_tokens_through_attention_alone_and_layers_in_turn_are_shared_out(
    kind: str, layout: Layout
) -> None:
    require(kind, layout)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_no_rank_convolves_or_scans_its_part_of_a_sequence_alone(kind: str) -> None:
    refused = rf"shared out like that, {kind[:3]}\w+ would compute something else"
    with pytest.raises(UserError, match=f"(?i)context_parallel_degree: {refused}"):
        require(kind, CONTEXT, masked=False)


def test_layers_that_use_what_earlier_ones_hand_them_stay_on_one_stage() -> None:
    with pytest.raises(
        UserError, match=r"pipeline_parallel_degree: shared out like that, Gemma3nForCausalLM"
    ):
        require("gemma3n_text", PIPELINE)


def test_what_was_tried_is_tried_again_only_where_something_is_different(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def counted(*settings: Any) -> str:
        tried.append(settings)
        return str(settings[0][0])

    monkeypatch.setattr(specimen, "_found", {})
    monkeypatch.setattr(probe_shares, "find_attention", counted)

    def find(name: str = "sdpa", dtype: torch.dtype = torch.float32, **shape: Any) -> str:
        config = tiny_config("llama", **shape)
        return tried_attention([name], config, "packed", 64, dtype, Layout(), CPU)

    assert find() == find() == "sdpa" and len(tried) == 1
    find(dtype=torch.bfloat16)
    find(rms_norm_eps=1e-3)
    assert len(tried) == 3
    name = "tried_again"
    for attend in (sdpa_attention_forward, lambda *given, **told: None):
        AttentionInterface.register(name, attend)
        find(name)
    assert len(tried) == 5, "a name may be given to another function"
