"""Moments in fewer bits learn like AdamW's, the same in every layout, and resume to the bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lacuna.config import Config, UserError
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import TrainingConfig
from lacuna.model.parameter_groups import block_length, state_bytes
from lacuna.train import small_state
from lacuna.train.optimizer import build_optimizer, optimizer_tensors, update
from lacuna.train.small_state import SmallStateAdamW, random_bits, rounded_at_random
from layouts import Case
from optimizer_steps import (
    FOUR_RANKS,
    TRAINED,
    TWO_RANKS,
    build,
    give_gradients,
    gradient,
    snapshot,
    three_steps,
)
from runs import (
    checkpoint,
    curve,
    make_world,
    refused,
    stop_after,
    together,
    train,
    weights,
    write_model,
)
from tiny import differing, random_model, relative_error, run_ranks, tiny_config

KINDS = ("bfloat16", "int8")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
# Of three shapes, each of which is compiled by itself: all matrices of a layer are alike.
FEW_SHAPES = {"intermediate_size": 256, "num_key_value_heads": 4, "num_hidden_layers": 1}


def settings_of(kind: str | None, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(state_dtype=kind, lr=1e-2, weight_decay=0.3, **changes)


def test_rounding_at_random_is_right_on_average_and_leaves_what_is_exact() -> None:
    places = torch.arange(200_000)
    for value in (1.0 + 2**-9, -3.3, 1e-30, 0.1):
        values = torch.full((len(places),), value)
        rounded = rounded_at_random(values, random_bits(places, torch.tensor(7))).double()
        assert len(rounded.unique()) == 2
        distance = rounded.unique().diff().item()
        assert abs(rounded.mean().item() - values[0].item()) < 4 * distance / 2 / 200_000**0.5
    exact = torch.randn(1000).bfloat16()
    bits = random_bits(torch.arange(1000), torch.tensor(1))
    assert torch.equal(rounded_at_random(exact.float(), bits), exact)


def test_random_bits_have_no_pattern() -> None:
    bits = random_bits(torch.arange(100_000), torch.tensor(3))
    assert len(bits.unique()) > 99_990
    for shift in range(32):
        assert abs(((bits >> shift) & 1).double().mean().item() - 0.5) < 0.01
    ones = ((bits & 0xFFFF).double() / 2**16 - 0.5, (bits >> 16).double() / 2**16 - 0.5)
    assert abs((ones[0] * ones[1]).mean().item() * 12) < 0.02


def changes_of(kind: str | None, steps: int = 20, **shape: int) -> Any:
    """How a model changes in some steps, and its optimizer's state."""
    torch.manual_seed(0)
    model = random_model(tiny_config("llama", **SHAPE | shape))
    before = {name: one.detach().float().clone() for name, one in model.named_parameters()}
    optimizer = build_optimizer(model, settings_of(kind))
    for step in range(steps):
        for name, parameter in model.named_parameters():
            steady = gradient(name, parameter.shape, 0) + gradient(name, parameter.shape, step + 1)
            parameter.grad = steady
        optimizer.step()
    after = {name: one.detach().float() - before[name] for name, one in model.named_parameters()}
    return after, optimizer_tensors(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 5e-3), ("int8", 5e-2)])
def test_it_learns_like_adamw(kind: str, error: float) -> None:
    plain, _ = changes_of(None)
    changes, state = changes_of(kind)
    assert 1e-4 < relative_error(changes, plain) < error
    of_vector = {name: change for name, change in changes.items() if change.ndim == 1}
    if kind == "int8":  # vectors keep their dtype
        assert relative_error(of_vector, {name: plain[name] for name in of_vector}) < 1e-5
    dtypes = {str(value.dtype) for value in state.values()}
    assert dtypes == {"torch.float32", "torch.bfloat16" if kind == "bfloat16" else "torch.uint8"}


def embeddings_after(kind: str | None, steps: int = 60) -> tuple[Tensor, float]:
    """How rows that seldom have a gradient change, and their largest step in learning rates."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(200, 256))
    settings = OptimizerConfig(state_dtype=kind, lr=1e-3, weight_decay=0.0)
    optimizer = torch.optim.AdamW([weight], 1e-3, (0.9, 0.95), weight_decay=0.0)
    if kind is not None:
        optimizer = SmallStateAdamW([{"params": [weight]}], settings, {weight: "weight"})
    largest = 0.0
    for _ in range(steps):
        before = weight.detach().clone()
        read = torch.rand(200, 1, generator=generator) < torch.linspace(0.01, 0.5, 200)[:, None]
        sizes = torch.randn(200, 256, generator=generator).exp()
        weight.grad = read * sizes * torch.randn(200, 256, generator=generator)
        optimizer.step()
        largest = max(largest, (weight.detach() - before).abs().max().item() / settings.lr)
    return weight.detach(), largest


@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 1e-2), ("int8", 5e-2)])
def test_rows_that_seldom_have_a_gradient_learn_like_adamws(kind: str, error: float) -> None:
    plain, largest = embeddings_after(None)
    ours, ours_largest = embeddings_after(kind)
    assert ours_largest < 1.2 * largest
    assert relative_error({"": ours}, {"": plain}) < error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1000,), (7, 256), (3, 5, 256)])
def test_pieces_are_updated_as_the_whole_is(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def updated(piece: int) -> list[Tensor]:
        monkeypatch.setattr(small_state, "PIECE", piece)
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
        optimizer = SmallStateAdamW([{"params": [weight]}], settings_of(kind), {weight: "weight"})
        for _ in range(3):
            weight.grad = torch.randn(shape, generator=generator).bfloat16()
            optimizer.step()
        return [weight.detach(), *optimizer.state[weight].values()]

    whole, pieces = updated(2**30), updated(600)
    assert whole[1] == pieces[1] == 3  # the number of steps
    assert all(map(torch.equal, whole, pieces))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_updating_takes_little_memory_on_a_gpu(kind: str) -> None:
    weight = nn.Parameter(torch.zeros(64_000, 4096, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = SmallStateAdamW([{"params": [weight]}], settings_of(kind), {weight: "weight"})
    optimizer.step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 32 * small_state.PIECE


def test_weights_in_bfloat16_do_not_lose_small_updates() -> None:
    """Rounded to the nearest, all of them would stay where they are."""
    parameter = nn.Parameter(torch.ones(512, 512, dtype=torch.bfloat16))
    linear = nn.Linear(512, 512, bias=False)
    linear.weight = parameter
    settings = OptimizerConfig(state_dtype="bfloat16", lr=1e-4, weight_decay=0.0)
    group = {"params": [parameter], "lr_ratio": 1.0}
    optimizer = SmallStateAdamW([group], settings, {parameter: "weight"})
    for _ in range(20):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.detach().double().mean().item() == pytest.approx(1 - 20e-4, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_makes_the_same_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = changes_of(kind, 3, **FEW_SHAPES)
    compiled = torch.compile(small_state.advance, fullgraph=True, dynamic=False)
    monkeypatch.setattr(small_state, "advance", compiled)
    graphs = torch._dynamo.utils.counters["stats"]
    changes_of(kind, 1, **FEW_SHAPES)
    after_one = graphs["unique_graphs"]
    changes, _ = changes_of(kind, 3, **FEW_SHAPES)
    assert relative_error(changes, plain) < 1e-4
    assert graphs["unique_graphs"] == after_one > 0


@pytest.mark.slow
def test_eight_bits_are_torchaos() -> None:
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit

    ours, theirs = (nn.Parameter(torch.randn(32, 2048)) for _ in range(2))
    theirs.data.copy_(ours.data)
    start = ours.detach().clone()
    settings = settings_of("int8")
    optimizer = SmallStateAdamW([{"params": [ours]}], settings, {ours: "weight"})
    oracle = AdamW8bit([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    for step in range(5):
        ours.grad = gradient("weight", ours.shape, step)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        oracle.step()
    moved = {"": ours.detach() - start}
    assert relative_error(moved, {"": theirs.detach() - start}) < 1e-3


def check_layouts(folder: Path, cases: dict[str, Case], kind: str) -> None:
    tiny_config("llama", **SHAPE).save_pretrained(folder)
    settings = settings_of(kind)
    [(_, alone)] = run_ranks(1, three_steps, folder, [Case()], settings)[0]
    ranks = {case.layout.data_parallel * case.layout.sharing for case in cases.values()}.pop()
    results = run_ranks(ranks, three_steps, folder, [*cases.values()], settings)
    for name, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        after: dict[str, Tensor] = {}
        for _, last in of_ranks:
            both = after.keys() & last.keys()
            equal = {key: after[key] for key in both}, {key: last[key] for key in both}
            assert differing(*equal) == [], name
            after |= last
        assert differing(after, alone) == [], name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_on_some_ranks_are_those_of_one_to_the_bit(kind: str, tmp_path: Path) -> None:
    check_layouts(tmp_path, FOUR_RANKS if kind == "int8" else TWO_RANKS, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_everything_untouched(kind: str, tmp_path: Path) -> None:
    tiny_config("llama", **SHAPE).save_pretrained(tmp_path)
    run_ranks(1, skipped_steps, tmp_path, kind)


def skipped_steps(folder: Path, kind: str) -> None:
    training = TrainingConfig(seq_len=24, skip_nan_inf=True)
    built = build(folder, Case(), settings_of(kind), training)
    optimizer = build_optimizer(built.model, settings_of(kind))
    for divisor, broken in ((1.0, False), (0.0, False), (1.0, True), (1.0, False)):
        before = snapshot(built.model, optimizer)
        give_gradients(built.model, 0)
        if broken:
            built.model.model.layers[0].self_attn.q_proj.weight.grad[0, 0] = torch.nan
        _, skip = update(built, optimizer, TRAINED * divisor)
        assert skip.item() == (broken or divisor == 0)
        assert (differing(snapshot(built.model, optimizer), before) == []) == bool(skip)


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_its_bytes_are_those_that_plans_count(kind: str | None) -> None:
    model = random_model(tiny_config("llama", **SHAPE))
    settings = settings_of(kind)
    state = optimizer_tensors(model, build_optimizer(model, settings))
    kept = sum(one.nbytes for name, one in state.items() if not name.endswith(".step"))
    assert kept == pytest.approx(state_bytes(model, settings, 4) * model.num_parameters())


@pytest.mark.parametrize(
    ("shape", "length"),
    [((4096, 4096), 256), ((8, 11008), 172), ((576, 576), 72), ((2, 64, 768), 96), ((99, 256), 32)],
)
def test_an_eighth_of_a_row_has_whole_blocks(shape: tuple[int, ...], length: int) -> None:
    assert block_length(torch.Size(shape)) == length


@pytest.mark.parametrize("shape", [(4096,), (4096, 8), (100, 100), ()])
def test_vectors_and_narrow_matrices_have_no_blocks(shape: tuple[int, ...]) -> None:
    assert block_length(torch.Size(shape)) is None


def shards_without_whole_blocks() -> str:
    mesh = init_device_mesh("cpu", (3,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(8, 768), mesh, [Shard(1)]))
    with pytest.raises(UserError) as caught:
        SmallStateAdamW([{"params": [parameter]}], settings_of("int8"), {parameter: ""})
    return str(caught.value)


def test_a_layout_that_cuts_blocks_is_refused() -> None:
    for said in run_ranks(3, shards_without_whole_blocks):
        assert "blocks of 96 values in rows of 768, and this layout gives a rank 256" in said


@pytest.fixture(scope="module")
def wide_world(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world whose model has rows wide enough for a state in 8 bits."""
    folder = make_world(tmp_path_factory.mktemp("wide"))
    write_model(folder / "model", hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    return folder


def flags_of(kind: str | None) -> tuple[str, ...]:
    return () if kind is None else ("--optimizer.state_dtype", kind)


@pytest.fixture(scope="module")
def of_each_kind(
    wide_world: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, Path]:
    """Finished runs of two steps, by `state_dtype`."""
    folder = tmp_path_factory.mktemp("runs")
    found = {kind: folder / str(kind) for kind in (None, *KINDS)}
    for kind, own in found.items():
        train(wide_world, own, "--training.steps", 2, *flags_of(kind))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now"),
    [("int8", None), ("int8", "bfloat16"), (None, "int8"), ("bfloat16", "int8")],
)
def test_a_state_in_8_bits_is_not_taken_for_another(
    before: str | None, now: str | None, of_each_kind: dict[str | None, Path], wide_world: Path
) -> None:
    """Its codes would be loaded as if they were the moments."""
    folder = ("--job.dump_folder", of_each_kind[before])
    flags = (*folder, "--training.steps", 4, *flags_of(now))
    said = refused("train", wide_world / "run.toml", *flags)
    assert str(checkpoint(of_each_kind[before], 2)) in said
    assert "exp_avg' has the dtype" in said
    assert "another optimizer ([optimizer])" in said


@pytest.mark.slow
def test_moments_in_bfloat16_go_on_in_float32(
    of_each_kind: dict[str | None, Path], wide_world: Path, tmp_path: Path
) -> None:
    shutil.copytree(of_each_kind["bfloat16"], tmp_path, dirs_exist_ok=True)
    train(wide_world, tmp_path, "--training.steps", 4)
    assert [step for step, *_ in curve(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_run_is_resumed_to_the_bit_and_goes_on_in_another_layout(
    kind: str, wide_world: Path, tmp_path: Path
) -> None:
    flags = ("--optimizer.state_dtype", kind, "--training.dtype", "bfloat16")
    straight, resumed, moved = (tmp_path / name for name in ("straight", "resumed", "moved"))
    together(
        lambda: train(wide_world, straight, *flags, "--cpus", 2),
        lambda: stop_after(3, wide_world, resumed, *flags, "--cpus", 2),
        lambda: stop_after(3, wide_world, moved, *flags, "--cpus", 2),
    )
    train(wide_world, resumed, *flags, "--cpus", 2)
    train(wide_world, moved, *flags, "--training.global_batch_size", 8)
    assert curve(resumed) == curve(straight)
    assert weights(resumed) == weights(straight)
    for (_, ours, _), (_, theirs, _) in zip(curve(moved), curve(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_early_and_offloaded_steps_are_the_same(
    kind: str, wide_world: Path, tmp_path: Path
) -> None:
    plain = ("--optimizer.state_dtype", kind, "--training.max_norm", 0, "--training.steps", 4)
    ways = {
        "plain": (),
        "early": ("--optimizer.early_step_in_backward",),
        "offloaded": ("--training.enable_cpu_offload",),
    }
    together(
        *(
            lambda name=name: train(wide_world, tmp_path / name, *plain, *ways[name])  # type: ignore[misc]
            for name in ways
        )
    )
    assert weights(tmp_path / "early") == weights(tmp_path / "plain")
    for (_, ours), (_, theirs) in zip(
        curve(tmp_path / "offloaded", "loss"), curve(tmp_path / "plain", "loss"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-5)


REFUSED = {
    "Muon": (("--optimizer.name", "Muon"), "it is AdamW's"),
    "an implementation": (("--optimizer.implementation", "foreach"), "of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_go_with_is_refused(name: str, world: Path) -> None:
    flags, wrong = REFUSED[name]
    said = refused("train", world / "run.toml", "--optimizer.state_dtype", "int8", *flags)
    assert "optimizer.state_dtype" in said and wrong in said


def test_the_names_of_the_field_are_understood() -> None:
    for name, dtype in (("bf16", "bfloat16"), ("8bit", "int8")):
        assert Config(optimizer={"state_dtype": name}).optimizer.state_dtype == dtype


@pytest.mark.slow
def test_a_run_says_for_how_many_weights_its_state_is_in_8_bits(
    wide_world: Path, tmp_path: Path
) -> None:
    flags = ("--optimizer.state_dtype", "int8", "--training.steps", 1)
    layout = ("--cpus", 2, "--parallelism.pipeline_parallel_degree", 2)
    for name, own in {"one": (), "pipeline": layout}.items():
        said = train(wide_world, tmp_path / name, *flags, *own)
        assert "optimizer: the moments of 918,016 of 919,296 trained weights are in 8 bits" in said


def test_a_model_of_narrow_rows_has_no_state_in_8_bits(world: Path) -> None:
    for way in ((), ("--dry-run",)):
        flags = ("--optimizer.state_dtype", "int8", "--job.dump_folder", world / "narrow", *way)
        said = refused("train", world / "run.toml", *flags)
        assert "optimizer.state_dtype: no trained matrix of this model has rows" in said
