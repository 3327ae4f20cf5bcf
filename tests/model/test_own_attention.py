"""Attentions that are not softmax keep documents apart, in every layout, and in generation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from every_model import configuration_class, small_config
from lacuna.config import UserError
from lacuna.config.attentions import TRAINED
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.model import own_attention, softpick
from lacuna.model.architecture import meta_model
from lacuna.model.attention_choice import attention_choices
from lacuna.model.flops import attention_widths, flops_of
from lacuna.model.merged_attention import merged_attention
from lacuna.model.own_attention import OwnAttention, register
from lacuna.model.own_attention_choice import require_exact
from lacuna.model.probe import find_attention
from lacuna.parallel.mesh import Layout
from lacuna.parallel.partial_attention import PARTIAL_ATTENTIONS, Part, visible
from lacuna.rollout.generate import generate_text
from layouts import Case, Outcome, outcomes, pipelined, steps
from runs import checkpoint, lacuna, make_world, refused, rows, train
from tiny import CPU, random_model, relative_error, run_ranks, tiny_config, tokenizer_of_words

HERE = Path(__file__).name.removesuffix(".py")
KINDS = ("softpick", "rectified")
SCALED = ("scaled_softmax", "scaled_softpick")
ALL = (*KINDS, *SCALED)
ALONE = Layout()


def blind(*given: Any) -> Tensor:
    """Softpick of whole rows, whatever their documents are."""
    query, key, value, part, scaling, window = given
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    whole = Part(starts * query.shape[1], starts * part.stop, part.stop, part.stop)
    return merged_attention("softpick", query, key, value, whole, scaling, window)


BLIND = OwnAttention(blind, documents=True, windows=True)


def faulty(*given: Any) -> Tensor:
    """Softpick that fails in rows, which have no padding in `part`, and where there is a window."""
    part, window = given[3], given[5]
    if window is not None:
        raise ValueError("windows have no end")
    if len(part.cu_q) != 5:
        raise IndexError("other pieces")
    return blind(*given)


FAULTY = OwnAttention(faulty, documents=True, windows=True)
UNTOLD = OwnAttention(blind, documents=False, windows=False, relative_flops=0.5)
A_FUNCTION = blind
flash_of_ones_own = UNTOLD


def chosen(
    asked: str, model_config: PretrainedConfig, layout: Layout = ALONE, apart: bool = True
) -> tuple[str, ...]:
    return attention_choices(asked, apart, model_config, "cpu", torch.float32, layout)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("kind", ALL)
def test_documents_in_a_row_are_as_they_are_alone(architecture: str, kind: str) -> None:
    """Alone they are seen by transformers' masks, in rows by the bounds of documents."""
    model_config = tiny_config(architecture)
    [name] = chosen(kind, model_config)
    for rows_like in ("packed", "padded", "whole"):
        require_exact(name, model_config, rows_like, 64, CPU, torch.bfloat16)


HYBRIDS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear")


@pytest.mark.parametrize("architecture", HYBRIDS)
@pytest.mark.parametrize("kind", ["scaled_softpick", "head_gated_softmax"])
def test_hybrids_have_it_in_their_layers_of_attention_alone(architecture: str, kind: str) -> None:
    model_config = small_config(configuration_class(architecture))
    [name] = chosen(kind, model_config)
    assert find_attention((name,), model_config, "packed", 64, CPU, torch.float32) == name
    check_only_attention_learns(model_config, kind)


def check_only_attention_learns(model_config: PretrainedConfig, kind: str) -> None:
    """Layers of linear attention are given no parameter, which nothing would read."""
    model = meta_model(model_config, kind, torch.float32)
    learned = {"scaled_softpick": "attention_scale", "head_gated_softmax": "attention_gate.weight"}
    owners = {
        int(path.split(".layers.")[1].split(".")[0])
        for path, _ in model.named_parameters()
        if path.endswith(learned[kind])
    }
    types = model_config.layer_types
    assert owners == {place for place, of in enumerate(types) if of == "full_attention"}


def test_lightning_attention_learns_no_scale() -> None:
    model_config = small_config(configuration_class("minimax"))
    chosen("scaled_softpick", model_config)
    check_only_attention_learns(model_config, "scaled_softpick")


def test_an_attention_that_forgets_the_documents_is_found() -> None:
    model_config = tiny_config("llama")
    [name] = chosen(f"{HERE}:BLIND", model_config)
    require_exact(name, model_config, "whole", 64, CPU, torch.float32)
    with pytest.raises(UserError, match=r'BLIND" in packed rows is not what it is for documents'):
        require_exact(name, model_config, "packed", 64, CPU, torch.float32)


@pytest.mark.parametrize(
    ("architecture", "asked", "layout", "reason"),
    [
        ("gemma2", "softpick", Layout(), "soft cap"),
        ("gpt2_dropout", "softpick", Layout(), "no dropout"),
        ("bloom", "softpick", Layout(), "BloomForCausalLM computes attention by code of its own"),
        ("llama", f"{HERE}:BLIND", Layout(cp=2, ring=True), r'rotate_method = "allgather"'),
        ("llama", f"{HERE}:UNTOLD", Layout(), "data.document_mask = false"),
        ("llama", f"{HERE}:A_FUNCTION", Layout(), "is no lacuna.model.own_attention.OwnAttention"),
        ("llama", f"{HERE}:flash_of_ones_own", Layout(), "for one of its own"),
    ],
)
def test_what_a_run_cannot_have_is_refused(
    architecture: str, asked: str, layout: Layout, reason: str
) -> None:
    if architecture == "gpt2_dropout":
        model_config = tiny_config("gpt2", attn_pdrop=0.1)
    else:
        model_config = tiny_config(architecture)
    with pytest.raises(UserError, match=rf"model\.attention: .*{reason}"):
        chosen(asked, model_config, layout)


@pytest.mark.parametrize(
    ("architecture", "fault"),
    [("mistral", "ValueError: windows have no end"), ("llama", "IndexError: other pieces")],
)
def test_what_an_attention_of_ones_own_raises_is_told_with_its_line(
    architecture: str, fault: str
) -> None:
    model_config = tiny_config(architecture)
    [name] = chosen(f"{HERE}:FAULTY", model_config)
    line = rf'"{HERE}:FAULTY" fails in a small model \({fault}; {__file__}, line \d+, in faulty\)'
    with pytest.raises(UserError, match=line):
        require_exact(name, model_config, "packed", 64, CPU, torch.float32)


def test_sinks_and_windows_that_an_attention_has_not_are_refused_before_a_run() -> None:
    for architecture, asked, reason in (
        ("gpt_oss", "softpick", "has no sinks"),
        ("mistral", f"{HERE}:UNTOLD", "has no sliding window"),
    ):
        model_config = tiny_config(architecture)
        [name] = chosen(asked, model_config, apart=False)
        with pytest.raises(UserError, match=f'model.attention: ".*" {reason}'):
            require_exact(name, model_config, "whole", 64, CPU, torch.float32)


def test_a_model_that_never_asks_for_attention_is_refused() -> None:
    model_config = tiny_config("mamba")
    with pytest.raises(UserError, match="MambaForCausalLM"):
        [name] = chosen("softpick", model_config)
        require_exact(name, model_config, "packed", 64, CPU, torch.float32)


def test_what_a_model_was_trained_with_is_kept_and_softmax_refused() -> None:
    model_config = tiny_config("llama")
    model_config._attn_implementation = "softpick"
    assert chosen("auto", model_config) == (f"{TRAINED}softpick",)
    assert chosen("rectified", model_config) == (f"{TRAINED}rectified",)
    model_config._attn_implementation = "softpick"
    with pytest.raises(UserError, match='"sdpa" is softmax, and the model was trained with "soft'):
        chosen("sdpa", model_config)
    model_config._attn_implementation = f"{HERE}:BLIND"
    with pytest.raises(UserError, match="which is code of its user: give this name"):
        chosen("auto", model_config)
    assert chosen(f"{HERE}:BLIND", model_config) == (f"{TRAINED}{HERE}:BLIND",)


def test_flops_are_those_that_an_attention_says() -> None:
    model_config = tiny_config("llama")
    lengths = torch.tensor([64])
    [name] = chosen(f"{HERE}:UNTOLD", model_config, apart=False)
    softmax, own = (
        flops_of(meta_model(model_config, each, torch.float32))(64, lengths)
        for each in ("sdpa", name)
    )
    widths = attention_widths(model_config)
    assert softmax - own == 0.5 * 12 * widths[None] * 64 * 64 / 2


def random_mask(causal: Tensor, padding: list[int]) -> Tensor:
    """The mask [2, 1, queries, keys] of rows whose first keys are padding."""
    keys = torch.arange(causal.shape[-1])
    return torch.stack([causal & (keys >= first) for first in padding])[:, None]


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 6), (3, 6)])
@pytest.mark.parametrize("window", [None, 3])
def test_a_mask_of_padded_texts_becomes_their_bounds(
    queries: int, keys: int, window: int | None
) -> None:
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    causal = (distance >= 0) & (distance < (window or keys))
    for padding in ([0, 0], [2, 0], [4, 2]):
        mask = random_mask(causal, padding)
        part = own_attention._part_of(mask, window)
        assert torch.equal(visible(part, 2, queries, window), mask[:, 0])
        assert own_attention._part_of(mask, window) is part, "all layers have the same"


def test_a_mask_of_something_else_is_refused() -> None:
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    windowed = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)[None, None]
    for mask in (everything, windowed, everything.float()):
        with pytest.raises(NotImplementedError, match="tokens see others"):
            own_attention._part_of(mask, None)


def model_of(architecture: str, kind: str) -> PreTrainedModel:
    register(kind)
    return random_model(tiny_config(architecture), kind)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("kind", ALL)
def test_generation_with_a_cache_is_generation_without(architecture: str, kind: str) -> None:
    model = model_of(architecture, kind)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    for cached in (True, False):
        settings = {"max_new_tokens": 12, "do_sample": False, "use_cache": cached}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        if cached:
            expected = output
    assert torch.equal(output, expected)
    logits = model(input_ids=expected).logits[:, :-1].argmax(-1)
    assert torch.equal(logits[:, 4:], expected[:, 5:]), "as one forward pass says"
    softmax = random_model(tiny_config(architecture))(input_ids=expected).logits
    assert relative_error({"": model(input_ids=expected).logits}, {"": softmax}) > 1e-2


@pytest.mark.parametrize("kind", ["rectified", "scaled_softpick"])
def test_a_padded_batch_generates_what_its_texts_do_alone(kind: str) -> None:
    model = model_of("gemma3", kind)
    texts = [[5, 6, 7, 8, 9], [5, 6]]
    padded = torch.tensor([texts[0], [0, 0, 0, *texts[1]]])
    mask = torch.tensor([[1] * 5, [0] * 3 + [1] * 2])
    settings = {"max_new_tokens": 8, "do_sample": False}
    together = model.generate(padded, attention_mask=mask, **settings)[:, 5:]
    for text, made in zip(texts, together, strict=True):
        ids = torch.tensor([text])
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert torch.equal(made[: alone.shape[1] - len(text)], alone[0, len(text) :])


@pytest.mark.parametrize("kind", ALL)
def test_a_model_generates_by_its_own_attention_also_while_it_is_trained(kind: str) -> None:
    """However generation is sped up: its text is that of forward passes without a cache."""
    model = model_of("llama", kind)
    ids = torch.tensor([[5, 6, 7]])
    while ids.shape[1] < 15 and ids[0, -1] != 2:
        ids = torch.cat((ids, model(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
    tokenizer = tokenizer_of_words()
    expected = tokenizer.decode(ids[0, 3:], skip_special_tokens=True)
    softmax = random_model(tiny_config("llama"))
    assert generate_text(softmax, tokenizer, "w5 w6 w7", 12, 0, seed=1) != expected
    for name in (kind, f"{TRAINED}{kind}"):
        model.set_attn_implementation(name)
        assert generate_text(model, tokenizer, "w5 w6 w7", 12, 0, seed=1) == expected
        assert model.config._attn_implementation == name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Makes the folder of a model with random weights that says which attention it has."""

    def made(architecture: str, kind: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        model = model_of(architecture, kind)
        model.config.attn_implementation = kind
        model.save_pretrained(path)
        assert json.loads((path / "config.json").read_text())["attn_implementation"] == kind
        return path

    return made


def check_nearly_same(outcome: Outcome, alone: Outcome) -> None:
    """Softpick magnifies rounding where the scores of a document's first tokens are nearly 0."""
    assert outcome.loss == pytest.approx(alone.loss, rel=1e-6)
    assert relative_error(outcome.gradients, alone.gradients) < 10 * softpick.EPSILON
    assert relative_error(outcome.updated, alone.updated) < softpick.EPSILON


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_every_layout_trains_as_one_process(
    architecture: str, folder: Callable[[str, str], Path]
) -> None:
    model = folder(architecture, "softpick")
    [alone] = outcomes(model, [Case(Layout())])
    ring = {"context_parallel_rotate_method": "alltoall", "context_parallel_degree": 2}
    cases = [Case(Layout(tp=2)), Case(Layout(cp=2)), pipelined(Layout(pp=2), 4)]
    for outcome in outcomes(model, [*cases, Case(Layout(dp_shard=2))]):
        check_nearly_same(outcome, alone)
    [merged] = outcomes(model, [Case(Layout(cp=2, ring=True), parallelism=ring)])
    check_nearly_same(merged, alone)


def computed_once(model: Path) -> list[Outcome]:
    """A step whose backward pass computes no attention again."""
    register("softpick")
    attend, differentiate = PARTIAL_ATTENTIONS["softpick"]
    counted = []

    def counting(*given: Any) -> Any:
        counted.append(1)
        return attend(*given)

    settings = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
    steps(model, [Case()])  # what is tried before is tried once
    PARTIAL_ATTENTIONS["softpick"] = (counting, differentiate)
    [outcome] = steps(model, [Case(accumulation=2, recompute=settings)])
    whole = len(counted)
    counted.clear()
    steps(model, [Case(accumulation=2)])
    assert len(counted) == whole
    return [outcome]


def test_selective_recomputation_keeps_what_attention_made(
    folder: Callable[[str, str], Path],
) -> None:
    model = folder("llama", "softpick")
    [alone] = outcomes(model, [Case()])
    [[outcome]] = run_ranks(1, computed_once, model)
    check_nearly_same(outcome, alone)


def test_recomputation_changes_nothing(folder: Callable[[str, str], Path]) -> None:
    modes = [ActivationCheckpointConfig(mode=mode) for mode in ("full", "selective")]
    cases = [Case(), *(Case(recompute=mode) for mode in modes)]
    alone, *others = outcomes(folder("llama", "softpick"), cases)
    for other in others:
        check_nearly_same(other, alone)


@pytest.mark.slow
def test_compilation_changes_nothing(folder: Callable[[str, str], Path]) -> None:
    alone, compiled = outcomes(folder("llama", "softpick"), [Case(), Case(compiled=True)])
    check_nearly_same(compiled, alone)


def test_a_run_exports_a_model_that_says_its_attention(tmp_path: Path) -> None:
    world, run, on = make_world(tmp_path / "world"), tmp_path / "run", tmp_path / "on"
    train(world, run, "--model.attention", "softpick")
    model_config = AutoConfig.from_pretrained(run / "hf")
    assert model_config._attn_implementation == "softpick"
    said = lacuna("generate", run, "--prompt", "the cat", "--max-new-tokens", 8, apart=True)
    of_step = run / "checkpoint" / "step-8"
    again = lacuna("generate", of_step, "--prompt", "the cat", "--max-new-tokens", 8, apart=True)
    assert said == again
    register("softpick")
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert model.config._attn_implementation == "softpick"
    # Where nobody has made it known, transformers refuses it.
    with mock.patch.dict(AttentionInterface._global_mapping):
        del AttentionInterface._global_mapping["softpick"]
        with pytest.raises(ValueError, match='"softpick"` is not supported'):
            AutoModelForCausalLM.from_pretrained(run / "hf")
    loads = ("--model.config", "none", "--model.name_or_path", run / "hf", "--training.steps", 1)
    train(world, on, *loads)
    assert rows(on)[0]["loss"] < rows(run)[-1]["loss"] + 0.5
    assert AutoConfig.from_pretrained(on / "hf")._attn_implementation == "softpick"
    lacuna("convert", run, tmp_path / "bf16", "--to", "hf", "--dtype", "bfloat16")
    assert AutoConfig.from_pretrained(tmp_path / "bf16")._attn_implementation == "softpick"
    told = train(world, tmp_path / "no", *loads, "--model.attention", "sdpa", status=2)
    assert 'model.attention: "sdpa" is softmax' in told
    told = refused("convert", run, tmp_path / "a.gguf", "--to", "gguf")
    assert "GGUF: the model was trained with the attention softpick" in told


@pytest.mark.parametrize(
    ("first", "then", "mend"),
    [
        ("softpick", "auto", 'set model.attention = "softpick"'),
        pytest.param(
            *("softpick", "rectified", 'set model.attention = "softpick"'), marks=pytest.mark.slow
        ),
        pytest.param("auto", "scaled_softpick", "leave that out", marks=pytest.mark.slow),
    ],
)
def test_a_run_does_not_go_on_with_another_attention(
    first: str, then: str, mend: str, tmp_path: Path
) -> None:
    world, run = make_world(tmp_path / "world"), tmp_path / "run"
    steps = ("--training.steps", 4, "--model.attention")
    train(world, run, *steps, first)
    on = ("--training.steps", 8, "--model.attention")
    before = (run / "config.toml").read_text()
    told = train(world, run, *on, then, status=2)
    assert "model.attention: the run was started with" in told and mend in told
    assert (run / "config.toml").read_text() == before, "refused before anything was written"
    train(world, run, *on, "sdpa" if first == "auto" else first)
    assert len(rows(run)) == 8


def test_weights_of_an_attention_are_not_begun_with_by_another(tmp_path: Path) -> None:
    world, run, new = make_world(tmp_path / "world"), tmp_path / "run", tmp_path / "new"
    train(world, run, "--training.steps", 4, "--model.attention", "softpick")
    begun = ("--training.steps", 1, "--checkpoint.initial_load_path", checkpoint(run, 4))
    for other in ("auto", "rectified"):
        told = train(world, new, *begun, "--model.attention", other, status=2)
        assert "model.attention: the weights of " in told and 'were trained with "softpick"' in told
        assert 'set model.attention = "softpick"' in told
    assert not (new / "config.toml").exists(), "refused before anything was written"
    train(world, new, *begun, "--model.attention", "softpick")
    assert rows(new)[0]["loss"] < rows(run)[-1]["loss"] + 0.5


@pytest.mark.slow
def test_a_new_attention_may_begin_with_weights_of_softmax_in_a_checkpoint(tmp_path: Path) -> None:
    world, run, new = make_world(tmp_path / "world"), tmp_path / "run", tmp_path / "new"
    train(world, run, "--training.steps", 4)
    begun = ("--training.steps", 1, "--checkpoint.initial_load_path", checkpoint(run, 4))
    train(world, new, *begun, "--model.attention", "softpick")
    assert AutoConfig.from_pretrained(new / "hf")._attn_implementation == "softpick"


def test_names_that_nothing_has_are_refused(world: Path) -> None:
    told = refused("train", world / "run.toml", "--model.attention", "softpik")
    assert "model.attention" in told and "softpick" in told
    told = refused("train", world / "run.toml", "--model.attention", "no_such_module:attention")
    assert "model.attention: no_such_module does not import" in told
