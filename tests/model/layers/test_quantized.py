"""Quantised weights have bitsandbytes' forms, and adapters learn beside them as beside others."""

import warnings
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lacuna.config.adapters import LoraConfig
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model.architecture import meta_model
from lacuna.model.layers.bits import dequantize, packed_sizes, quantize
from lacuna.model.layers.quantized import quantize_layers, quantized_modules
from lacuna.parallel.mesh import Layout
from layouts import Case, Outcome, check_same, outcomes, steps
from tiny import differing, random_model, relative_error, run_ranks, tiny_config

FORMS = ("nf4", "int8")
ADAPTERS = LoraConfig(rank=3)
FORMS_SLOW = ["nf4", pytest.param("int8", marks=pytest.mark.slow)]


def weight(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(96, 40), (33, 64), (3, 5), (128, 896), (1, 1)])
def test_a_packed_weight_of_any_shape_is_near_to_the_weight(
    form: str, shape: tuple[int, int]
) -> None:
    packed, dense = quantize(weight(*shape), form), weight(*shape)
    assert packed.shape == (sum(packed_sizes(form, shape)),)
    assert relative_error({"": dequantize(packed, form, shape, torch.float32)}, {"": dense}) < 0.11
    assert not dequantize(quantize(torch.zeros(shape), form), form, shape, torch.float32).any()


def test_nf4_takes_4_13_bits_and_int8_little_more_than_8() -> None:
    assert 8 * sum(packed_sizes("nf4", (4096, 4096))) / 4096**2 == pytest.approx(4.127, abs=1e-3)
    assert 8 * sum(packed_sizes("int8", (4096, 4096))) / 4096**2 == pytest.approx(8.0078, abs=1e-4)


def test_the_bytes_are_those_of_bitsandbytes() -> None:
    # Checksums of what its version 0.50.2 makes of the same weights: codes of scales and of
    # weights.
    shape, checksums = (
        (257, 100),
        [(3590193152, 2224232835, 353044437), (378114232, 1380059364, 540400706)],
    )
    for seed, (scales, codes, rows) in enumerate(checksums):
        dense = weight(*shape, seed=seed)
        parts = quantize(dense, "nf4").split(packed_sizes("nf4", shape))[1:3]
        parts += quantize(dense.half(), "int8").split(packed_sizes("int8", shape))[1:2]
        assert [crc32(bytes(part.tolist())) for part in parts] == [scales, codes, rows]


@pytest.fixture(scope="module", params=["llama_tied", pytest.param("gpt2", marks=pytest.mark.slow)])
def bases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A model with weights, and what its weights are once quantised, by form."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("none", *FORMS)}
    model = random_model(tiny_config(request.param))
    model.save_pretrained(folders["none"])
    for form in FORMS:
        whole = load_file(folders["none"] / "model.safetensors")
        named = meta_model(model.config, "sdpa", torch.float32)
        quantize_layers(named.requires_grad_(False), form, [])
        names = {f"{name}.weight" for name in quantized_modules(named)}
        assert len(names) == {"llama": 14, "gpt2": 8}[model.config.model_type]
        for name in names & whole.keys():
            whole[name] = dequantize(
                quantize(whole[name], form), form, whole[name].shape, torch.float32
            )
        save_file(whole, folders[form] / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(folders[form])
    return folders


def trained_only(outcome: Outcome) -> Outcome:
    """The outcome without what is frozen, which is not the same as what it stands for."""
    kept = {name: tensor for name, tensor in outcome.updated.items() if name in outcome.gradients}
    return Outcome(outcome.loss, outcome.norm, outcome.tokens, outcome.gradients, kept)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_model_learns_beside_quantised_weights_as_beside_what_they_stand_for(
    bases: dict[str, Path], form: str
) -> None:
    alone = trained_only(outcomes(bases[form], [Case(lora=ADAPTERS)])[0])
    again = {"recompute": ActivationCheckpointConfig(mode="full")}
    by_operation = {
        "recompute": ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
    }
    pipeline = {"parallelism": {"pipeline_parallel_degree": 2}}
    apart = LoraConfig(
        rank=3, dropout=1e-12
    )  # which drops nothing, but is no part of the quantised product
    kinds = (
        (Layout(), {}, again, by_operation, {"offload": True}, {"lora": apart}),
        (Layout(1, 2), {}, {"offload": True, **again}, {"zero_stage": 1}),
        (Layout(2, 1), {}),
        (Layout(cp=2), again),
        (Layout(pp=2), pipeline),
        (Layout(1, 4), {}),
    )
    for layout, *settings in kinds:
        common = {"accumulation": 1 if layout.pp == 1 else 2, "lora": ADAPTERS, "base": form}
        cases = [Case(layout, **(common | changes)) for changes in settings]
        for outcome in outcomes(bases["none"], cases):
            check_same(trained_only(outcome), alone)
            packed = [name for name in outcome.updated if name.endswith("proj.weight")]
            assert len(packed) in (14, 4) and all(
                outcome.updated[name].ndim == 1 for name in packed
            )


@pytest.mark.parametrize("bases", ["llama_tied"], indirect=True)
def test_modules_that_are_trained_whole_beside_quantised_weights_have_no_adapters(
    bases: dict[str, Path],
) -> None:
    whole = LoraConfig(rank=3, modules=("mlp", "up_proj"))
    found = outcomes(bases["none"], [Case(lora=whole, base="nf4")])[0].gradients
    learns = {name for name, gradient in found.items() if gradient.any()}
    assert (
        "model.layers.0.mlp.up_proj.weight" in learns
        and "model.layers.0.self_attn.q_proj.lora_B" in learns
    )
    assert not any("mlp" in name and "lora" in name for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("bases", ["llama_tied"], indirect=True)
def test_compiled_layers_learn_the_same_beside_quantised_weights(bases: dict[str, Path]) -> None:
    again = ActivationCheckpointConfig(mode="full")
    settings = {"lora": ADAPTERS, "base": "nf4", "recompute": again}
    alone = outcomes(bases["none"], [Case(**settings)])[0]
    traced = Case(Layout(1, 2), compiled=True, backend="aot_eager", **settings)
    for outcome in outcomes(bases["none"], [traced]):
        check_same(outcome, alone)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_ranks_that_compute_in_bfloat16_learn_as_one_does(
    bases: dict[str, Path], form: str
) -> None:
    settings = {"lora": ADAPTERS, "base": form, "precision": "bfloat16"}
    alone = outcomes(bases["none"], [Case(**settings)])[0]
    dense = outcomes(bases[form], [Case(lora=ADAPTERS, precision="bfloat16")])[0]
    assert relative_error(alone.gradients, dense.gradients) < 0.02
    for outcome in outcomes(
        bases["none"], [Case(Layout(1, 2), **settings), Case(Layout(2, 1), **settings)]
    ):
        assert relative_error(outcome.gradients, alone.gradients) < 0.02


def _gathered_as_on_a_gpu(folder: Path, cases: list[Case]) -> list[Outcome]:
    """The steps of `cases` where a copy of several tensors takes them through float32.

    torch's copies on a GPU do that.
    """
    warnings.filterwarnings(
        "error", "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed"
    )
    copies = torch._foreach_copy_
    torch._foreach_copy_ = lambda into, found: copies(
        into, [one.float().to(one.dtype) if one.is_floating_point() else one for one in found]
    )
    return steps(folder, cases)


@pytest.mark.slow
@pytest.mark.parametrize("bases", ["llama_tied"], indirect=True)
@pytest.mark.parametrize("form", FORMS_SLOW)
def test_packed_bytes_that_are_no_number_are_gathered_as_they_are(
    bases: dict[str, Path], form: str
) -> None:
    for adapters in ("float32", "bfloat16"):
        cases = [Case(Layout(1, 2), lora=ADAPTERS, base=form, precision="bfloat16", dtype=adapters)]
        expected, found = (
            outcomes(bases["none"], cases)[0],
            run_ranks(2, _gathered_as_on_a_gpu, bases["none"], cases),
        )
        assert differing(found[0][0].gradients, expected.gradients) == []
