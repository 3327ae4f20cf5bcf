"""Stages share the layers evenly, and a pipeline that a model cannot have is refused, and why."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from lacuna.config import UserError
from lacuna.config.machine import ActivationCheckpointConfig, CompileConfig
from lacuna.model.architecture import decoder_layers, meta_model
from lacuna.model.build import build_model
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.parallel.stages import balanced_stages, check_pipeline, keep_own_stages, stage_ranges
from lacuna.train.step import accumulate_gradients, sums_of, total_counts
from layouts import Case, check_same, configuration, outcomes, own_batches, pipeline, pipelined
from tiny import CPU, run_ranks, tiny_config, tokenizer_of_words


@pytest.mark.parametrize(
    ("layers", "stages", "head"), [(8, 4, 0.0), (7, 4, 0.5), (5, 5, 3.0), (61, 16, 2.4), (32, 2, 1)]
)
def test_no_other_split_has_a_faster_slowest_stage(layers: int, stages: int, head: float) -> None:
    parts = balanced_stages(layers, stages, head)
    assert [layer for part in parts for layer in part] == list(range(layers))
    loads = [len(part) + (head if part is parts[-1] else 0) for part in parts]
    movable = [load for part, load in zip(parts, loads, strict=True) if len(part) > 1]
    assert all(max(loads) <= load + 1 for load in loads) or max(loads) not in movable


def ranges(points: Sequence[str], stages: int = 3) -> list[range]:
    model = meta_model(tiny_config("llama", num_hidden_layers=6), "eager", torch.float32)
    return stage_ranges(points, stages, model, decoder_layers(model))


def test_split_points_are_the_first_layers_of_their_stages() -> None:
    assert ranges(["layers.1", "model.layers.5"]) == [range(1), range(1, 5), range(5, 6)]
    assert sum(map(len, ranges([]))) == 6


@pytest.mark.parametrize(
    "points", [["layers.4", "layers.2"], ["layers.0"], ["layers.6"], ["norm"], ["ers.2"]]
)
def test_points_that_are_no_layers_in_order_are_refused(points: list[str]) -> None:
    with pytest.raises(
        UserError,
        match=r"pipeline_parallel_split_points: .* from model\.layers\.1 to model\.layers\.5",
    ):
        ranges(points, len(points) + 1)


def refusal_of_a_projection() -> str:
    model, mesh = (
        meta_model(tiny_config("opt"), "eager", torch.float32),
        build_mesh(Layout(pp=2), "cpu"),
    )
    with pytest.raises(UserError) as raised:
        keep_own_stages(model, decoder_layers(model), mesh, pipeline("1F1B", 2))
    return str(raised.value)


def test_a_model_with_unknown_parts_before_its_layers_is_refused() -> None:
    for text in run_ranks(2, refusal_of_a_projection):
        assert "OPTForCausalLM has a Linear before its layers" in text and text.endswith(
            "use other parallelisms."
        )


def shapes_of_the_loss(model_config: Path) -> tuple[list[int], list[int]]:
    """The shapes of what the last stage gives to the schedule, and of what a validation gets."""
    case = pipelined(Layout(pp=2), 2)
    mesh = build_mesh(case.layout, "cpu")
    built = build_model(configuration(model_config, case), tokenizer_of_words(), mesh, CPU)
    batch, _ = own_batches(case, mesh)
    with torch.no_grad():
        judged = sums_of(built, batch, LanguageModelling.held_out_loss)
        hidden = torch.zeros(*batch.columns["input_ids"].shape, built.pipeline.width)
        given = built.stages[0].module(hidden, torch.zeros(1, dtype=torch.int64))
    return [*given.shape], [*judged.shape]


def test_a_schedule_that_learns_shapes_without_gradients_gets_a_loss_alone(tmp_path: Path) -> None:
    tiny_config("llama").to_json_file(tmp_path / "config.json")
    *_, last = run_ranks(2, shapes_of_the_loss, tmp_path / "config.json")
    assert last == ([], [2])  # torch 2.11 does so, and holds training to what it learnt


def refused(
    model_config: PretrainedConfig,
    schedule: str,
    ranks: int,
    compiled: CompileConfig | None = None,
    recomputed: ActivationCheckpointConfig | None = None,
) -> str:
    compiled = compiled or CompileConfig()
    recomputed = recomputed or ActivationCheckpointConfig()
    with pytest.raises(UserError) as raised:
        check_pipeline(pipeline(schedule, ranks), compiled, recomputed, model_config)
    return str(raised.value)


def test_pipelines_that_cannot_run_are_refused() -> None:
    untied, tied = (tiny_config(name, num_hidden_layers=4) for name in ("llama", "llama_tied"))
    assert "8 stages, more than the 4 layers" in refused(untied, "Interleaved1F1B", 4)
    assert "cannot share the model's tied embedding" in refused(tied, "ZBVZeroBubble", 2)
    compiled = CompileConfig(enable=True)
    assert "leave compile.enable out" in refused(
        untied, "InterleavedZeroBubble", 2, compiled=compiled
    )
    for recomputed in (
        ActivationCheckpointConfig(mode="full"),
        ActivationCheckpointConfig(mlp_chunks=2),
    ):
        assert 'mode = "none"' in refused(untied, "InterleavedZeroBubble", 2, recomputed=recomputed)
    for schedule, model_config in (("1F1B", tied), ("ZBVZeroBubble", untied)):
        check_pipeline(
            pipeline(schedule, 2), CompileConfig(), ActivationCheckpointConfig(), model_config
        )


def test_with_fewer_microbatches_than_stages_no_gradient_is_lost(tmp_path: Path) -> None:
    tiny_config("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    alone = outcomes(tmp_path, [Case()])[0]
    for outcome in outcomes(
        tmp_path, [pipelined(Layout(pp=2), count, "InterleavedZeroBubble") for count in (1, 2)]
    ):
        check_same(outcome, alone)


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that held its own graph would never go


def most_kept(model_config: Path) -> tuple[float, int]:
    """The most graphs of a micro-batch that a zero-bubble step keeps, and the tensors left."""
    case = pipelined(Layout(pp=2), 8, "InterleavedZeroBubble")
    mesh = build_mesh(case.layout, "cpu")
    built = build_model(configuration(model_config, case), tokenizer_of_words(), mesh, CPU)
    kept, counts = weakref.WeakSet[Kept](), list[int]()

    def keep(tensor: Tensor) -> Kept:
        holder = Kept(tensor)
        kept.add(holder)
        counts.append(len(kept))
        return holder

    batches = own_batches(case, mesh)
    gc.disable()  # as in training
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.tensor)
    for layer in [layer for stage in built.stages for layer in stage.layers]:
        layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
        layer.register_forward_hook(lambda *_: hooks.__exit__())
    accumulate_gradients(
        built, batches, LanguageModelling.loss, total_counts(built, batches)["trained_tokens"]
    )
    return max(counts) / len(counts) * 8, len(kept)


def test_zero_bubble_keeps_a_micro_batch_no_longer_than_to_its_gradients_of_weights(
    tmp_path: Path,
) -> None:
    tiny_config("llama", num_hidden_layers=4).to_json_file(tmp_path / "config.json")
    for most, after in run_ranks(2, most_kept, tmp_path / "config.json"):
        assert most < 3 and after == 0
