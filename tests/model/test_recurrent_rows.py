"""Documents in a row are to layers with a state what they are alone, by torch and by kernels."""

import inspect
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.lfm2 import modeling_lfm2

from every_model import configuration_class, model_types, small_config
from lacuna.config import Config, UserError
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.config.sections import TrainingConfig
from lacuna.model import recurrent_rows
from lacuna.model.attention import PACKED
from lacuna.model.attention_choice import attention_choices
from lacuna.model.checks import reason_not_to_compile
from lacuna.model.over_tokens import has_convolutions
from lacuna.model.probe import find_attention, rows_of
from lacuna.model.recurrent_rows import keep_documents_apart
from lacuna.parallel.mesh import Layout
from layouts import Case, Outcome, alone_loss, check_same, merge, pipelined, steps
from tiny import CPU, random_model, relative_error, run_ranks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Where fla is installed, transformers calls its kernels, which need a GPU or the interpreter.
pytestmark = pytest.mark.skipif(
    find_spec("fla") is not None and not INTERPRETED, reason="fla's kernels need a GPU"
)
if INTERPRETED:
    import fla_on_cpu

    fla_on_cpu.interpret()

QUICK = ("qwen3_5_text", "kimi_linear", "lfm2", "bamba")
LATER = (
    *("qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "bailing_hybrid", "lfm2_moe", "lfm3"),
    *("falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
)
KINDS = [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in LATER)]
UNTOLD = ("jamba", "zamba", "mamba")
"""Kinds whose recurrence transformers tells of nothing."""


def config_of(kind: str) -> PretrainedConfig:
    if kind not in model_types():
        pytest.skip(f"the installed transformers has no {kind}")
    found = small_config(configuration_class(kind))
    found.use_cache = False
    return found


def is_lfm2_told() -> bool:
    """Whether LFM2 calls its convolution with what the model was called with, as of late."""
    return "conv.bias, **kwargs)" in inspect.getsource(modeling_lfm2)


def found(kind: str, masked: bool = True) -> str:
    own = config_of(kind)
    names = attention_choices("auto", masked, own, "cpu", torch.float32, Layout())
    config = Config(training=TrainingConfig(seq_len=64), data={"document_mask": masked})
    return find_attention(names, own, rows_of(config.row_form), 64, CPU, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_a_row_are_as_they_are_alone(kind: str) -> None:
    if kind.startswith("lfm") and not is_lfm2_told():
        pytest.skip("the installed transformers tells LFM2's convolutions of nothing")
    assert found(kind) == PACKED
    assert found(kind, masked=False) == "sdpa"


@pytest.mark.parametrize("kind", UNTOLD)
def test_a_recurrence_that_is_told_of_no_documents_is_refused_in_packed_rows(kind: str) -> None:
    with pytest.raises(UserError, match=r"data\.document_mask: in packed rows"):
        found(kind)


@pytest.mark.skipif(INTERPRETED, reason="fla is there")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "bamba"])
def test_packed_rows_are_refused_where_a_kernel_is_missing_that_knows_documents(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where documents are not computed one by one.
    monkeypatch.setattr(recurrent_rows, "is_installed", lambda _: True)
    with pytest.raises(UserError, match=r"data\.document_mask: in packed rows"):
        found(kind)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba"])
def test_without_documents_transformers_own_functions_compute(kind: str) -> None:
    model = random_model(config_of(kind), "eager")
    ids = torch.arange(3, 43).view(2, 20)
    before = model(ids).logits
    keep_documents_apart(model.config)
    keep_documents_apart(model.config)
    assert torch.equal(model(ids).logits, before)


def test_recurrences_are_not_compiled_and_convolutions_are() -> None:
    for kind, is_left in (("qwen3_5_text", True), ("bamba", True), ("lfm2", False)):
        reason = reason_not_to_compile(config_of(kind), 1, torch.bfloat16, "cuda")
        assert (reason is not None) == is_left, kind
        assert has_convolutions(config_of(kind))


def prepared_steps(model: Path, cases: list[Case]) -> list[Outcome]:
    if INTERPRETED:
        fla_on_cpu.interpret()
    return steps(model, cases)


@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", pytest.param("granitemoehybrid", marks=pytest.mark.slow)]
)
def test_every_layout_trains_packed_documents_as_transformers_does_alone(
    kind: str, tmp_path: Path
) -> None:
    random_model(config_of(kind), "eager").save_pretrained(tmp_path)
    [[alone]] = run_ranks(1, prepared_steps, tmp_path, [Case()])
    recompute = ActivationCheckpointConfig(mode="full")
    cases = [
        Case(Layout(dp_shard=2), 2, recompute=recompute),
        pipelined(Layout(pp=2), 4),
    ]
    results = run_ranks(2, prepared_steps, tmp_path, cases)
    for of_ranks in zip(*results, strict=True):
        check_same(merge(of_ranks), alone)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert alone.loss == pytest.approx(alone_loss(model, alone.tokens), rel=1e-5)
    theirs = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert relative_error(alone.gradients, theirs) < 1e-5


@pytest.mark.slow
def test_convolutions_compile_in_packed_rows(tmp_path: Path) -> None:
    random_model(config_of("lfm2"), "eager").save_pretrained(tmp_path)
    cases = [Case(), Case(compiled=True, backend="aot_eager")]
    alone, compiled = run_ranks(1, prepared_steps, tmp_path, cases)[0]
    check_same(compiled, alone)
