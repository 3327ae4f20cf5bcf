"""Experts are counted, told of and balanced in any layout as a plain loop of one process does."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from every_model import configuration_class, model_types, small_config
from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig
from lacuna.config.optimizers import OptimizerConfig
from lacuna.data import Batch
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.build import build_model
from lacuna.model.router_kinds import biases_of, check_routers
from lacuna.model.router_load import RouterLoad
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.around_layers import call_before
from lacuna.parallel.expert_stacks import stacks_of
from lacuna.parallel.mesh import Layout
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.step import accumulate_gradients, evaluate, total_counts
from layouts import (
    LOSS,
    SEQUENCES,
    Case,
    configuration,
    micro_batch,
    own_batches,
    pipelined,
)
from tiny import CPU, compiled_by, mesh_of, random_model, run_ranks, tiny_config, tokenizer_of_words

RATE = 0.05
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-2)
RING = {"context_parallel_rotate_method": "alltoall"}
FULL = ActivationCheckpointConfig(mode="full")
BY_OPERATION = ActivationCheckpointConfig(mode="selective", selective_ac_option="op")
ALONE = {
    "one micro-batch": Case(),
    "four": Case(accumulation=4),
    "recomputed": Case(accumulation=2, recompute=FULL),
    "by operation": Case(recompute=BY_OPERATION),
}
COMPILED = {"compiled where nothing is counted": Case(compiled=True)}
TRACED = Case(Layout(dp_shard=2, ep=2), 2, compiled=True, backend="aot_eager")
IN_PARTS = {"compiled around what is counted": TRACED}
ON_TWO = {
    "FSDP": Case(Layout(dp_shard=2), 2),
    "replicas, recomputed": Case(Layout(dp_replicate=2), recompute=FULL),
    "cp": Case(Layout(cp=2)),
    "ring": Case(Layout(cp=2, ring=True), 2, parallelism=RING),
    "ep": Case(Layout(dp_shard=2, ep=2), 2),
    "ep, cp, recomputed": Case(Layout(cp=2, ep=2), 2, recompute=FULL),
    "pp": pipelined(Layout(pp=2), 4),
    "interleaved": pipelined(Layout(pp=2), 4, "Interleaved1F1B"),
    "zero bubble": pipelined(Layout(pp=2), 4, "ZBVZeroBubble"),
}


def config_of(kind: str) -> PretrainedConfig:
    if kind in ("deepseek_v3", "gpt_oss"):
        return tiny_config(kind, num_hidden_layers=4)
    return small_config(configuration_class(kind))


def saved(kind: str, folder: Path) -> Path:
    model = random_model(config_of(kind), "eager")
    with torch.no_grad():
        for layer in decoder_layers(model):
            for bias in biases_of(layer):
                bias.copy_(torch.linspace(-0.1, 0.1, bias.numel()).view_as(bias))
    model.save_pretrained(folder)
    return folder


def padded(batches: list[Batch]) -> list[Batch]:
    """The same batches, with the last three tokens of every row for padding."""
    for batch in batches:
        batch.columns["real"][:, -3:] = False
        batch.columns["labels"][:, -4:] = -100
    return batches


Steps = tuple[dict[int, Tensor], list[dict[str, object]]]


def lacunas_steps(folder: Path, cases: list[Case], rate: float, packed: bool = True) -> list[Steps]:
    """The biases by layer after three steps of each case, and the row of metrics of each step."""
    results = []
    for case in cases:
        mesh = mesh_of(case.layout)
        with compiled_by(case.backend):
            built = build_model(configuration(folder, case), tokenizer_of_words(), mesh, CPU)
        optimizer = build_optimizer(built.model, OPTIMIZER)
        load = RouterLoad(built, rate, reported=True)
        rows = []
        for step in range(3):
            batches = padded(own_batches(case, mesh, step, packed))
            trained = total_counts(built, batches)["trained_tokens"]
            accumulate_gradients(built, batches, LOSS, trained)
            _, skip = update(built, optimizer, trained)
            load.after_step(skip)
            rows.append(load.report() | {"tokens": load.counted[:, -1].unique().tolist()})
        layers = enumerate(decoder_layers(built.model))
        biases = {place: bias for place, layer in layers for bias in biases_of(layer)}
        results.append((biases, rows))
    return results


def entropy(logits: Tensor, by_sigmoid: bool) -> Tensor:
    shares = logits.double().softmax(-1)
    if by_sigmoid:
        shares = logits.double().sigmoid()
        shares = shares / shares.sum(-1, keepdim=True)
    return -(shares * shares.log()).sum(-1)


def recorded(model: PreTrainedModel, batch: Batch) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The choices and router logits of each layer with experts, and the loss of a batch, summed."""
    chosen: list[Tensor] = []
    handles = [
        stack.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1]))
        for stack in stacks_of(decoder_layers(model))
    ]
    output = model(
        input_ids=batch.columns["input_ids"],
        position_ids=batch.columns["position_ids"],
        use_cache=False,
        output_router_logits=True,
    )
    for handle in handles:
        handle.remove()
    labels = batch.columns["labels"].flatten()
    loss = F.cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum", ignore_index=-100)
    return chosen, list(output.router_logits), loss


def plain_steps(folder: Path, rate: float, by_sigmoid: bool, packed: bool = True) -> Steps:
    """The same of a loop over all sequences at once, with transformers' model and torch alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    optimizer = build_optimizer(model, OPTIMIZER)
    layers = decoder_layers(model)
    places = [place for place, layer in enumerate(layers) if stacks_of([layer])]
    rows = []
    for step in range(3):
        [batch] = padded([micro_batch(slice(0, SEQUENCES), step, packed)])
        real = batch.columns["real"].flatten()
        chosen, logits, loss = recorded(model, batch)
        (loss / (batch.columns["labels"] != -100).sum()).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        row: dict[str, object] = {}
        for place, picked, own in zip(places, chosen, logits, strict=True):
            load = torch.stack([(picked[real] == one).sum() for one in range(own.shape[-1])])
            for bias in biases_of(layers[place]):
                bias += rate * (load.double().mean() - load).sign().float()
            row[f"router_load_{place}"] = (load / load.sum()).tolist()
            row[f"router_violation_{place}"] = (load.max() / load.double().mean() - 1).item()
            row[f"router_entropy_{place}"] = entropy(own[real], by_sigmoid).mean().item()
        row["router_violation"] = max(row[f"router_violation_{place}"] for place in places)
        entropies = [row[f"router_entropy_{place}"] for place in places]
        row["router_entropy"] = sum(entropies) / len(places)
        dense = [0] if len(places) < len(layers) else []
        rows.append(row | {"tokens": [*dense, real.sum().item()]})
    return {place: bias for place in places for bias in biases_of(layers[place])}, rows


def check_rows(rows: list[dict[str, object]], expected: list[dict[str, object]]) -> None:
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-4), name


def check_cases(kind: str, folder: Path, cases: dict[str, Case]) -> None:
    saved(kind, folder)
    expected, rows = plain_steps(folder, RATE, by_sigmoid=True)
    start = torch.linspace(-0.1, 0.1, 4)
    assert all(((bias - start).abs() > RATE / 2).any() for bias in expected.values())
    ranks = max(case.layout.data_parallel * case.layout.sharing for case in cases.values())
    results = run_ranks(ranks, lacunas_steps, folder, [*cases.values()], RATE)
    for name, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        found = set()
        for biases, own_rows in of_ranks:
            check_rows(own_rows, rows)
            found |= biases.keys()
            for place, bias in biases.items():
                assert bias.dtype == torch.float32
                assert torch.equal(bias, expected[place]), (name, place)
        assert found == expected.keys(), name


KINDS = ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_moves_biases_as_a_plain_loop_does(kind: str, tmp_path: Path) -> None:
    check_cases(kind, tmp_path, ALONE)


@pytest.mark.slow
def test_compiled_layers_move_biases_as_a_plain_loop_does(tmp_path: Path) -> None:
    check_cases("glm4_moe", tmp_path, COMPILED)


def calls_around_counted_layers(folder: Path) -> int:
    """How many layers a pass calls before which something was to be called, while they count."""
    case = Case(compiled=True)
    mesh = mesh_of(case.layout)
    with compiled_by("eager"):
        built = build_model(configuration(folder, case), tokenizer_of_words(), mesh, CPU)
        called: list[Tensor] = []
        for layer in decoder_layers(built.model):
            call_before(layer, called.append)
        RouterLoad(built, rate=0.0, reported=True)
        batches = own_batches(case, mesh, 0)
        accumulate_gradients(built, batches, LOSS, total_counts(built, batches)["trained_tokens"])
    assert called[0].shape[-1] == built.model.config.hidden_size
    return len(called)


def test_what_is_called_around_layers_is_called_where_these_count(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    layers = len(decoder_layers(random_model(config_of("qwen3_moe"))))
    assert run_ranks(1, calls_around_counted_layers, folder) == [layers]


@pytest.mark.slow
def test_layers_compiled_in_parts_move_biases_as_a_plain_loop_does(tmp_path: Path) -> None:
    check_cases("glm4_moe", tmp_path, IN_PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_move_biases_as_a_plain_loop_does(kind: str, tmp_path: Path) -> None:
    check_cases(kind, tmp_path, ON_TWO)


SOFTMAX = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")


def rows_of_each(folders: list[Path]) -> list[list[dict[str, object]]]:
    return [lacunas_steps(folder, [Case()], 0.0, False)[0][1] for folder in folders]


def test_what_is_reported_follows_from_the_models_own_logits(tmp_path: Path) -> None:
    folders = [saved(kind, tmp_path / kind) for kind in SOFTMAX]
    [reported] = run_ranks(1, rows_of_each, folders)
    for folder, rows in zip(folders, reported, strict=True):
        check_rows(rows, plain_steps(folder, 0.0, by_sigmoid=False, packed=False)[1])


def unlearnt_steps(folder: Path) -> tuple[Tensor, Tensor, dict[str, object]]:
    """The biases after a skipped step and after a validation, and the row of the validation."""
    mesh = mesh_of(Layout())
    built = build_model(configuration(folder, Case()), tokenizer_of_words(), mesh, CPU)
    [bias] = biases_of(decoder_layers(built.model)[-1])
    load = RouterLoad(built, RATE, reported=True)
    batches = own_batches(Case(), mesh)
    accumulate_gradients(built, batches, LOSS, total_counts(built, batches)["trained_tokens"])
    load.after_step(torch.tensor(1.0))
    skipped = bias.clone()
    evaluate(built, batches, LanguageModelling())
    load.after_step(torch.tensor(0.0))
    return skipped, bias.clone(), load.report()


def test_a_skipped_step_and_a_validation_move_nothing(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    [(skipped, validated, row)] = run_ranks(1, unlearnt_steps, tmp_path)
    start = torch.linspace(-0.1, 0.1, 4)
    assert torch.equal(skipped, start)
    assert torch.equal(validated, start)
    assert {*row.values()} == {None}


def shadow(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return meta_model(small_config(configuration_class(kind)), None, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        ("llama", torch.float32, "'llama' models have no stacks of experts"),
        ("qwen3_moe", torch.float32, "'qwen3_moe' models have no bias by which routers choose"),
        ("ernie4_5_moe", torch.float32, "'ernie4_5_moe' models have frozen weights"),
        ("minimax_m2", torch.bfloat16, "kept in torch.bfloat16.*set training.dtype = float32"),
    ],
)
def test_a_model_whose_load_no_bias_can_even_out_is_refused(
    kind: str, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(UserError, match=rf"model\.router_bias_update_rate: .*{reason}"):
        check_routers(shadow(kind, dtype), RATE, reported=False)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("llama", "no stacks of experts"), ("phimoe", "neither a softmax nor a sigmoid")],
)
def test_a_model_whose_routers_are_not_known_is_not_reported(kind: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"metrics\.router: .*{kind}.*{reason}"):
        check_routers(shadow(kind), 0.0, reported=True)


def test_a_bias_that_routers_do_not_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(router: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.view(-1, router.hidden_dim), router.weight)
        return logits, *logits.sigmoid().topk(router.top_k)

    monkeypatch.setattr(DeepseekV3TopkRouter, "forward", forget)
    with pytest.raises(UserError, match="do not choose the experts whose bias is large"):
        check_routers(shadow("deepseek_v3"), RATE, reported=False)


BALANCED = {
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "dots1",
    "dots3_note_text",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v3",
    "hy_v4",
    "inkling2_text",
    "inkling_text",
    "kimi_linear",
    "kolibri1",
    "lfm2_moe",
    "mimo_v2_flash",
    "minimax_m2",
    "minimax_m3_vl_text",
    "nemotron_h",
    "solar_open",
}
UNKNOWN = {"deepseek_v4", "phimoe", "qwen4_exp", "qwen4_exp_text", "zaya"}


def is_refused(model: PreTrainedModel, rate: float) -> bool:
    try:
        check_routers(model, rate, reported=not rate)
    except UserError:
        return True
    return False


@pytest.mark.slow
def test_every_kind_with_experts_is_balanced_and_reported_or_refused() -> None:
    balanced, unknown = set(), set()
    for kind in model_types():
        try:
            model = shadow(kind)
            stacks = stacks_of(decoder_layers(model))
        except (UserError, ImportError, AttributeError):  # Blt has no list of layers
            continue
        if stacks and not is_refused(model, RATE):
            balanced.add(kind)
        if stacks and is_refused(model, 0.0):
            unknown.add(kind)
    present = {*model_types()}
    assert balanced == BALANCED & present
    assert unknown == UNKNOWN & present
