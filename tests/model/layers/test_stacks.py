"""Adapters of fused experts compute and learn as peft's of the same file do, in every layout."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as TheirConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from every_model import configuration_class, small_config
from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.checks import problems_of
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.formats.adapter import export_adapter
from lacuna.formats.convert import convert
from lacuna.model.architecture import meta_model
from lacuna.model.layers.adapter_files import file_name, load_adapters
from lacuna.model.layers.lora import add_adapters, trained_names
from lacuna.model.layers.wrapping import merge
from lacuna.parallel.mesh import Layout
from layouts import Case, check_same, outcomes, pipelined
from runs import checkpoint, curve, make_world, train
from tiny import random_model, relative_error, tiny_config, tokenizer_of_words

BOTH = ("experts.gate_up_proj", "experts.down_proj")


def adapted_by_peft(
    architecture: str, folder: Path, parameters: tuple[str, ...] = BOTH
) -> PeftModel:
    """A tiny model with random adapters of peft's, which are saved in `folder`."""
    about = TheirConfig(
        r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=[*parameters]
    )
    model = get_peft_model(random_model(tiny_config(architecture), "eager"), about)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return model


def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    return model(input_ids=torch.arange(4, 64).reshape(2, 30), use_cache=False).logits


def gradients(model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    logits(model).square().sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("architecture", "parameters"),
    [("qwen3_moe", BOTH), ("qwen3_moe", BOTH[1:]), ("gpt_oss", BOTH)],
)
def test_adapters_of_experts_are_pefts(
    architecture: str, parameters: tuple[str, ...], tmp_path: Path
) -> None:
    theirs = adapted_by_peft(architecture, tmp_path / "theirs", parameters)
    ours, settings = (
        random_model(tiny_config(architecture), "eager"),
        LoraConfig(adapter=str(tmp_path / "theirs")),
    )
    add_adapters(ours, settings, torch.float32)
    load_adapters(ours, trained_names(ours), settings)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logits(ours), logits(theirs), **close)
    twice = LoraConfig(adapter=(str(tmp_path / "theirs"),) * 2)
    add_adapters(several := random_model(tiny_config(architecture), "eager"), twice, torch.float32)
    with pytest.raises(UserError, match="has no sum over several adapters"):
        load_adapters(several, trained_names(several), twice)
    expected = {
        name.replace(".default", ""): gradient for name, gradient in gradients(theirs).items()
    }
    assert (
        relative_error({file_name(name): one for name, one in gradients(ours).items()}, expected)
        < 1e-5
    )

    export_adapter(ours, tokenizer_of_words(), settings, None, str(tmp_path / "ours"))
    again = PeftModel.from_pretrained(
        random_model(tiny_config(architecture), "eager"), tmp_path / "ours"
    )
    assert torch.equal(logits(again), logits(theirs))
    merge(ours)
    plain = random_model(tiny_config(architecture), "eager")
    assert [*ours.state_dict()] == [*plain.state_dict()]
    torch.testing.assert_close(logits(ours), logits(theirs), **close)
    assert (logits(ours) - logits(plain)).abs().max() > 0.1


@pytest.mark.slow
def test_adapters_of_experts_learn_the_same_in_every_layout(tmp_path: Path) -> None:
    adapted_by_peft("qwen3_moe", tmp_path / "theirs")
    random_model(tiny_config("qwen3_moe")).save_pretrained(tmp_path / "base")
    case = Case(accumulation=2, lora=LoraConfig(adapter=str(tmp_path / "theirs")))
    full = ActivationCheckpointConfig(mode="full")
    alone, again, *lower = outcomes(
        tmp_path / "base",
        [
            case,
            replace(case, recompute=full),
            replace(case, precision="bfloat16"),
            replace(case, base="nf4"),
        ],
    )
    assert len(alone.gradients) == 2 * 2 * 3 and all(
        gradient.any() for gradient in alone.gradients.values()
    )
    layouts = [
        Case(Layout(dp_shard=2)),
        Case(Layout(dp_shard=2), recompute=full),
        pipelined(Layout(pp=2), 4),
    ]
    spread = [replace(layout, lora=case.lora) for layout in layouts]
    *others, packed = outcomes(tmp_path / "base", [*spread, replace(spread[0], base="nf4")])
    for outcome in (again, *others):
        check_same(outcome, alone)
    check_same(packed, lower[1])
    assert all(one.loss == pytest.approx(alone.loss, rel=0.01) for one in lower)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        ("gpt_oss", Case(backend="aot_eager")),
        ("qwen3_moe", Case(base="nf4", recompute=ActivationCheckpointConfig(mode="full"))),
    ],
)
def test_compiled_adapters_of_experts_learn_the_same(
    architecture: str, case: Case, tmp_path: Path
) -> None:
    random_model(tiny_config(architecture), "eager").save_pretrained(tmp_path)
    plain = replace(case, lora=LoraConfig(rank=3, parameters=("*.experts.*",)))
    alone, compiled = outcomes(tmp_path, [plain, replace(plain, compiled=True)])
    check_same(compiled, alone)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_from_a_checkpoint_on_two_ranks_and_is_converted(tmp_path: Path) -> None:
    world, run = make_world(tmp_path), tmp_path / "run"
    random_model(tiny_config("qwen3_moe", vocab_size=257)).save_pretrained(world / "base")
    start = (
        "--model.name_or_path",
        world / "base",
        "--model.config",
        "none",
        "--model.tokenizer_path",
    )
    adapters = (
        "--lora.rank",
        4,
        "--lora.targets",
        "",
        "--lora.parameters",
        "*.experts.*",
        "--lora.rslora",
    )
    train(world, run, *start, world / "model", *adapters)
    straight = curve(run)
    again = ("--cpus", 2, "--training.batch_size", 2, "--checkpoint.load_step", 4)
    train(world, run, *start, world / "model", *adapters, *again)
    for one, other in zip(straight, curve(run), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    convert(str(checkpoint(run, 8)), str(world / "converted"), "hf", None, None, False)
    found, wanted = (
        load_file(folder / "model.safetensors") for folder in (world / "converted", run / "hf")
    )
    torch.testing.assert_close(found, wanted)
    base = AutoModelForCausalLM.from_pretrained(world / "base")
    before, beside = (
        logits(base).detach(),
        logits(PeftModel.from_pretrained(base, run / "hf" / "adapter")),
    )
    merged = logits(AutoModelForCausalLM.from_pretrained(run / "hf"))
    torch.testing.assert_close(merged, beside, rtol=1e-5, atol=1e-5)
    assert (merged - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"parameters": ("experts.w1",)},
            "'experts.w1' matches no stack of weights of the model: choose of down_proj, g",
        ),
        (
            {"parameters": ("experts.*",), "rank": 25},
            "lora.rank: 25 is more than 24, the rank of model.layers.1.mlp.",
        ),
        (
            {"parameters": ("experts.*",), "modules": ("experts",)},
            "lora.parameters: 'experts.*' matches no stack",
        ),
    ],
)
def test_adapters_of_experts_that_cannot_be_are_refused(
    settings: dict[str, object], said: str
) -> None:
    model = meta_model(tiny_config("qwen3_moe"), "sdpa", torch.float32)
    with pytest.raises(UserError, match=re.escape(said)):
        add_adapters(model, LoraConfig(**({"rank": 2, "targets": ()} | settings)), torch.float32)


@pytest.mark.parametrize("more", [{"dropout": 0.1}, {"dora": True}, {"rank": 0}])
def test_settings_that_stacks_cannot_have_are_refused(more: dict[str, object]) -> None:
    config = Config(lora={"rank": 2, "parameters": ("experts.*",)} | more)
    assert any("lora.parameters" in problem for problem in problems_of(config))


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe"])
def test_dense_layers_beside_experts_stay_what_they_are_for_peft(kind: str, tmp_path: Path) -> None:
    """peft takes their names for those of experts that were not yet fused."""
    model_config = small_config(configuration_class(kind))
    random_model(model_config, "eager").save_pretrained(tmp_path / "base")
    ours, settings = random_model(model_config, "eager"), LoraConfig(rank=2, dropout=0.5)
    add_adapters(ours, settings, torch.float32)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3)
    export_adapter(
        ours, tokenizer_of_words(), settings, str(tmp_path / "base"), str(tmp_path / "ours")
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert torch.allclose(logits(ours.eval()), logits(theirs), rtol=1e-4, atol=1e-4)
    assert any("gate_proj.lora_A" in name for name in trained_names(ours))
    again, read = random_model(model_config, "eager"), LoraConfig(adapter=str(tmp_path / "ours"))
    add_adapters(again, read, torch.float32)
    load_adapters(again, trained_names(again), read)
    assert torch.equal(logits(again.eval()), logits(ours.eval()))
