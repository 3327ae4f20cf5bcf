"""Weights are gathered and cast once for many passes, and afterwards are what they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lacuna.config import Config
from lacuna.config.sections import ModelConfig
from lacuna.model.build import build_model
from lacuna.model.layers.casting import compute_in
from lacuna.model.vocabulary import look_up_on_cpu
from lacuna.parallel.fsdp import inference
from lacuna.parallel.mesh import Layout
from lacuna.rollout.drawing import Asked, Drawing
from lacuna.rollout.engine import complete_in_pages
from lacuna.rollout.gathered import cast_once, gathered, looked_up_on
from lacuna.rollout.generate import generating
from lacuna.rollout.joined import joined, of_one_input
from tiny import (
    CPU,
    compiled_by,
    mesh_of,
    random_model,
    run_ranks,
    sharded_model,
    tiny_config,
    tokenizer_of_words,
)

IDS = torch.arange(5, 13)[None]


def test_weights_are_cast_once_and_then_are_the_same_parameters() -> None:
    model = random_model(tiny_config("llama"))
    compute_in(model, torch.bfloat16)
    before = dict(model.named_parameters())
    product = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        wanted = model(IDS, use_cache=False).logits
        with cast_once(model):
            assert product.weight is product._parameters["weight"], "no cast is left to do"
            assert product.weight.dtype == torch.bfloat16
            assert torch.equal(model(IDS, use_cache=False).logits, wanted)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert after["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32


def test_an_embedding_in_cpu_memory_is_on_the_device_for_as_long_as_is_generated() -> None:
    model = random_model(tiny_config("llama"))
    embedding = model.get_input_embeddings()
    stored = embedding.weight
    wanted = embedding(IDS)
    with looked_up_on(torch.device("meta"), model):
        assert embedding.weight is stored, "one that is on the device is left as it is"
    look_up_on_cpu(embedding)
    look_up = embedding.forward
    with pytest.raises(RuntimeError, match="ends"), looked_up_on(torch.device("meta"), model):
        assert embedding(IDS.to("meta")).is_meta, "nothing is asked of the CPU"
        raise RuntimeError("it ends")
    assert embedding.forward is look_up
    assert embedding.weight is stored
    assert torch.equal(embedding(IDS), wanted)


def pass_alone(folder: str) -> torch.Tensor:
    """Logits by passes that only the first rank makes, and training afterwards."""
    model = sharded_model(tiny_config("llama"), Config(model=ModelConfig(name_or_path=folder)))
    with inference(model), gathered(model):
        logits = torch.zeros(0)
        for _ in range(1 + 2 * (dist.get_rank() == 0)):
            logits = model(IDS, use_cache=False).logits
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(IDS, use_cache=False).logits.sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    return logits


def test_gathered_ranks_pass_by_themselves_and_train_together_again(tmp_path: object) -> None:
    model = random_model(tiny_config("llama"))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model(IDS, use_cache=False).logits
    for logits in run_ranks(2, pass_alone, str(tmp_path)):
        assert torch.allclose(logits, wanted, atol=1e-5)


def said_in_layout(folder: str, degrees: dict[str, int], layout: Layout, backend: str) -> list[Any]:
    """What a rank completes of prompts of its own, uncompiled and compiled, of two sizes."""
    with compiled_by(backend):
        return _said_in_layout(folder, degrees, layout)


def _said_in_layout(folder: str, degrees: dict[str, int], layout: Layout) -> list[Any]:
    config = Config(
        model={"name_or_path": folder},
        training={"seq_len": 64, "batch_size": 2},
        compile={"enable": True},
        parallelism=degrees,
    )
    model = build_model(config, tokenizer_of_words(), mesh_of(layout), CPU).model
    found = []
    for lengths in ((3, 8), (20, 30, 1)[: 2 + dist.get_rank()]):
        asked = [Asked([*range(5, 5 + length)], [length, 7], 3) for length in lengths]
        groups = of_one_input(model, CPU)
        for compiled in (False, True):
            with generating(model, in_pages=True), gathered(model), joined(model, groups):
                drawing = Drawing(0.8)
                given = model, asked, drawing, [2], 64, CPU, True, compiled
                found.append([[one.tokens for one in group] for group in complete_in_pages(*given)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "layout", "backend"),
    [
        ({}, Layout(dp_shard=2), "inductor"),
        ({"tensor_parallel_degree": 2}, Layout(tp=2), "aot_eager"),
    ],
)
def test_compiled_ranks_that_share_a_model_say_the_same(
    degrees: dict[str, int], layout: Layout, backend: str, tmp_path: Path
) -> None:
    random_model(tiny_config("llama")).save_pretrained(tmp_path)
    given = str(tmp_path), degrees, layout, backend
    for plain, compiled, *others in run_ranks(2, said_in_layout, *given):
        assert plain == compiled
        assert others[0] == others[1]
