"""Tensor parallelism splits all of a layer as transformers' plan says, or says what is left out."""

import pytest
import torch

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.parallel.tensor import check_split


def check(kind: str) -> None:
    model_config = small_config(configuration_class(kind))
    model = meta_model(model_config, "eager", torch.float32)
    check_split(decoder_layers(model), model_config)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "olmo2", "qwen3", "mixtral"])
def test_a_plan_of_every_part_is_followed(kind: str) -> None:
    check(kind)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("gemma3n_text", "leaves out altup.correct_output_scale"),
        ("apertus", "leaves out mlp.act_fn.alpha_p"),
        ("qwen3_5_text", r"splits self_attn.k_norm, which not all layers have"),
        ("deepseek_v2", "splits mla_kv_a_proj, which is not available yet"),
        ("deepseek_v3", r"leaves out self_attn\.q_a_proj"),
        ("mamba", "for which transformers has no tensor-parallel plan"),
    ],
)
def test_a_plan_that_leaves_something_open_is_refused_by_the_name_of_that(
    kind: str, wrong: str
) -> None:
    with pytest.raises(UserError, match=rf"tensor_parallel_degree: .*{wrong}"):
        check(kind)
