"""The memory estimate knows what each way of spreading a model divides, and what it does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from every_model import configuration_class, small_config
from lacuna.config import Config
from lacuna.config.machine import ParallelismConfig
from lacuna.data import BatchSizes
from lacuna.model.architecture import meta_model
from lacuna.model.layers.lora import add_adapters
from lacuna.model.layers.quantized import quantize_layers, quantized_modules
from lacuna.parallel.batch import resolve_batch
from lacuna.parallel.mesh import Layout
from lacuna.plan.memory import estimate_memory, peak_memory
from runs import make_world, refused, write_model
from tiny import tiny_config

MODEL = LlamaConfig(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=4000,
)


def batch_of(config: Config, layout: Layout) -> BatchSizes:
    return resolve_batch(config.training, config.parallelism, config.optimizer, layout)


def estimate(
    layout: Layout,
    compiled: bool = True,
    pieces: int = 1,
    optimizer_name: str = "AdamW",
    **parallelism: object,
) -> dict[str, float]:
    config = Config(
        optimizer={"name": optimizer_name},
        training={"seq_len": 2048, "batch_size": 16},
        activation_checkpoint={"mlp_chunks": pieces},
        compile={"enable": compiled},
        parallelism=ParallelismConfig(pipeline_parallel_degree=layout.pp, **parallelism),
    )
    model = meta_model(MODEL, "sdpa", torch.float32)
    return estimate_memory(config, layout, batch_of(config, layout), model, "cuda")


def test_one_rank_holds_everything() -> None:
    alone, parameters = (
        estimate(Layout()),
        meta_model(MODEL, "sdpa", torch.float32).num_parameters(),
    )
    assert alone["weights"] == 4 * parameters and alone["optimizer"] == 8 * parameters
    assert alone["gathered"] == 0, "no copy"
    embedding = MODEL.vocab_size * MODEL.hidden_size
    assert alone["gradients"] == 2 * parameters + 2 * embedding, "nothing to reduce"
    assert estimate(Layout(), pieces=2)["gradients"] == 4 * parameters, "weights are used twice"
    assert estimate(Layout(), compiled=False)["gathered"] == 0, "nothing is cast"
    assert estimate(Layout(), compiled=False, pieces=2)["gathered"] == 2 * parameters, (
        "eager code keeps what it has cast"
    )
    assert estimate(Layout(dp_replicate=2))["gathered"] == 2 * parameters, (
        "a copy in the precision of matrix products"
    )


def test_muon_keeps_one_value_for_each_weight_of_a_layers_matrix() -> None:
    matrices = 16 * (4 * 512**2 + 3 * 512 * 2048)
    saved = estimate(Layout())["optimizer"] - estimate(Layout(), optimizer_name="Muon")["optimizer"]
    assert saved == pytest.approx(4 * matrices)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=4), Layout(cp=4), Layout(dp_shard=2, tp=2), Layout(1, 1, 2, 2)]
)
def test_what_is_stored_is_shared_by_shards_and_tensor_parallel_ranks(layout: Layout) -> None:
    alone, spread = estimate(Layout()), estimate(layout)
    for part in ("weights", "optimizer"):
        assert spread[part] == pytest.approx(alone[part] / 4)


def test_of_feed_forward_blocks_in_pieces_one_piece_remains() -> None:
    tokens, wide, layers = 16 * 2048, 3 * MODEL.intermediate_size, MODEL.num_hidden_layers
    whole, pieces = (estimate(Layout(), pieces=count)["activations"] for count in (1, 8))
    assert whole - pieces == pytest.approx(tokens * 2 * wide * (layers - 1 / 8))


def test_context_parallelism_divides_activations_and_tensor_parallelism_most_of_them() -> None:
    alone = estimate(Layout())["activations"]
    assert (
        estimate(Layout(dp_shard=4))["activations"]
        == estimate(Layout(dp_replicate=4))["activations"]
        == alone
    )
    assert estimate(Layout(cp=4))["activations"] == pytest.approx(alone / 4)
    assert alone / 4 < estimate(Layout(tp=4))["activations"] < alone / 2


def test_a_pipeline_divides_the_layers_but_keeps_several_microbatches_in_flight() -> None:
    alone = estimate(Layout())
    one = estimate(Layout(pp=4), pipeline_parallel_microbatches=8)
    all_at_once = estimate(
        Layout(pp=4), pipeline_parallel_microbatches=8, pipeline_parallel_schedule="GPipe"
    )
    assert one["weights"] < 0.3 * alone["weights"]
    assert all_at_once["activations"] == pytest.approx(2 * one["activations"], rel=0.05), (
        "8 against 4 micro-batches"
    )
    assert one["activations"] == pytest.approx(alone["activations"] / 8, rel=0.05), (
        "4 of 8 micro-batches and 16 layers"
    )


def test_beside_adapters_only_they_have_gradients_and_moments() -> None:
    config = Config(training={"seq_len": 2048, "batch_size": 16}, lora={"rank": 8})
    model = meta_model(MODEL, "sdpa", torch.bfloat16)
    frozen = model.num_parameters()
    add_adapters(model, config.lora, torch.float32)
    added = model.num_parameters() - frozen
    parts = estimate_memory(config, Layout(), batch_of(config, Layout()), model, "cuda")
    assert parts["weights"] == pytest.approx(2 * frozen + 4 * added)
    assert (parts["gradients"], parts["optimizer"]) == pytest.approx((4 * added, 8 * added))


def test_quantised_layers_take_their_bits_and_one_gpu_has_no_embedding() -> None:
    training, adapted = (
        {"seq_len": 2048, "batch_size": 16},
        {"lora": {"rank": 8}, "quantization": {"base": "nf4"}},
    )
    config = Config(training=training, **adapted)
    model = meta_model(MODEL, "sdpa", torch.bfloat16)
    quantize_layers(model, "nf4", [])
    add_adapters(model, config.lora, torch.float32)
    dense = sum(layer.weight.numel() for layer in quantized_modules(model).values())
    plain, learning = (
        model.num_parameters(),
        sum(one.numel() for one in model.parameters() if one.requires_grad),
    )
    parts = estimate_memory(config, Layout(), batch_of(config, Layout()), model, "cuda")
    expected = 4.13 / 8 * dense + 2 * (plain - dense - learning) + 4 * learning
    embedding = 2 * model.get_input_embeddings().weight.numel()
    assert parts["weights"] == pytest.approx(expected - embedding, rel=0.01)
    assert (parts["gradients"], parts["optimizer"]) == pytest.approx((4 * learning, 8 * learning))
    shared = estimate_memory(
        config, Layout(dp_shard=2), batch_of(config, Layout(dp_shard=2)), model, "cuda"
    )
    assert shared["weights"] == pytest.approx(expected / 2, rel=0.01), "shards are whole"
    two_layers = 2 * (expected - 2 * embedding) / MODEL.num_hidden_layers
    assert shared["gathered"] == pytest.approx(two_layers + 2 * embedding, rel=0.05)
    narrow = Config(training=training | {"dtype": "bfloat16"}, **adapted)
    narrow_shared = estimate_memory(
        narrow, Layout(dp_shard=2), batch_of(config, Layout(dp_shard=2)), model, "cuda"
    )
    assert narrow_shared["gathered"] < shared["gathered"], (
        "adapters are gathered as they are stored"
    )


def test_a_rank_alone_gives_back_what_it_gathers_from_cpu_memory() -> None:
    config = Config(training={"seq_len": 2048, "batch_size": 16, "enable_cpu_offload": True})
    model = meta_model(MODEL, "sdpa", torch.float32)
    parts = estimate_memory(config, Layout(), batch_of(config, Layout()), model, "cuda")
    assert parts["gathered"] < 2 * model.num_parameters() / 2


def test_what_a_trial_of_the_model_would_refuse_is_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    small_config(configuration_class("lfm2"), vocab_size=64).save_pretrained(world / "model")
    shared = (
        "--cpus",
        2,
        "--parallelism.context_parallel_degree",
        2,
        "--data.document_mask",
        "false",
    )
    said = refused("train", world / "run.toml", *shared, "--dry-run")
    assert "parallelism.context_parallel_degree: shared out like that, Lfm2ForCausalLM" in said


def test_a_rank_gathers_and_computes_with_its_own_experts_only() -> None:
    model = meta_model(tiny_config("qwen3_moe", num_experts=64), "sdpa", torch.float32)
    config = Config(training={"seq_len": 64}, compile={"enable": False})
    together, spread = (
        estimate_memory(config, layout, batch_of(config, layout), model, "cuda")
        for layout in (Layout(dp_shard=4), Layout(dp_shard=4, ep=4))
    )
    assert spread["weights"] == together["weights"]
    assert spread["optimizer"] == together["optimizer"]
    assert spread["gathered"] < together["gathered"] / 2


def test_quantised_stacks_take_their_bits_and_one_layer_of_them_is_dequantised_at_once() -> None:
    shape = {"num_experts": 64, "hidden_size": 256, "moe_intermediate_size": 128}
    model = meta_model(tiny_config("qwen3_moe", **shape), "sdpa", torch.bfloat16)
    plain = model.num_parameters()
    quantize_layers(model, "nf4", [])
    config = Config(training={"seq_len": 64}, lora={"rank": 8}, quantization={"base": "nf4"})
    stacks = sum(weight.numel() for weight in model.parameters() if weight.ndim == 3)
    linear = sum(layer.weight.numel() for layer in quantized_modules(model).values())
    add_adapters(model, config.lora, torch.float32)
    learning = sum(one.numel() for one in model.parameters() if one.requires_grad)
    layouts = (Layout(), Layout(dp_shard=4), Layout(dp_shard=4, ep=4))
    alone, together, spread = (
        estimate_memory(config, layout, batch_of(config, layout), model, "cuda")
        for layout in layouts
    )
    quantised = stacks + linear
    expected = 4.13 / 8 * quantised + 2 * (plain - quantised) + 4 * learning
    embedding = 2 * model.get_input_embeddings().weight.numel()
    assert alone["weights"] == pytest.approx(expected - embedding, rel=0.01)
    assert alone["gathered"] == 2 * stacks / 2, "of one of two layers, in bfloat16"
    assert together["gathered"] > alone["gathered"] + 2 * 4.13 / 8 * stacks / 2
    assert spread["gathered"] < together["gathered"] / 2


def test_a_rank_that_splits_matrices_gathers_whole_experts() -> None:
    model = meta_model(tiny_config("qwen3_moe", num_experts=64), "sdpa", torch.float32)
    config = Config(training={"seq_len": 64}, compile={"enable": False})
    sharded, split, spread = (
        estimate_memory(config, layout, batch_of(config, layout), model, "cuda")
        for layout in (Layout(dp_shard=4), Layout(tp=4), Layout(tp=4, ep=4))
    )
    assert split["weights"] == sharded["weights"]
    assert split["gathered"] > 0.9 * sharded["gathered"]
    assert spread["gathered"] < split["gathered"] / 2


def peak_of(
    model_config: PretrainedConfig, layout: Layout, rows: int, length: int, **more: object
) -> float:
    """The estimated peak, in GiB, of a run whose rows are one document."""
    training = {"seq_len": length, "batch_size": rows}
    config = Config(training=training, data={"document_mask": False}, **more)
    batch = batch_of(config, layout)
    model = meta_model(model_config, "sdpa", torch.float32)
    parts = estimate_memory(config, layout, batch, model, "cuda")
    return peak_memory(parts, batch.accumulation) / 2**30


def test_the_peak_is_near_what_gpus_reserved() -> None:
    half_of_llama_8b = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    by_operation = {"mode": "selective", "selective_ac_option": "op"}
    found = peak_of(
        half_of_llama_8b, Layout(dp_shard=2), 2, 8192, activation_checkpoint=by_operation
    )
    assert found == pytest.approx(46.6, rel=0.1), "docs/log.md, two H100s"
    products = by_operation | {"selective_ac_option": "products"}
    options = ("op", "op/4", "products")
    op, few, most = (
        peak_of(
            half_of_llama_8b,
            Layout(dp_shard=2),
            2,
            8192,
            activation_checkpoint=by_operation | {"selective_ac_option": option},
        )
        for option in options
    )
    assert few == pytest.approx(most - (most - op) / 4)
    moved = products | {"offload": True, "offload_share": 0.41}
    for settings, reserved in ((products, 56.4), (moved, 50.9)):
        found = peak_of(
            half_of_llama_8b, Layout(dp_shard=2), 2, 8192, activation_checkpoint=settings
        )
        assert found == pytest.approx(reserved, rel=0.1), "docs/log.md, two H100s"
    qwen3 = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    assert peak_of(qwen3, Layout(), 4, 8192) == pytest.approx(48.8, rel=0.1), "docs/log.md, an H100"


def test_gradients_of_an_earlier_micro_batch_are_there_beside_activations() -> None:
    parts = {"weights": 1.0, "gradients": 2.0, "activations": 3.0, "loss": 1.0}
    assert peak_memory(parts, 1) == 5.0
    assert peak_memory(parts, 2) == 7.0


LLAMA = LlamaConfig(num_hidden_layers=8, vocab_size=4096, hidden_size=512, intermediate_size=1024)


def parts_of(layout: Layout, device: str = "cuda", **more: Any) -> dict[str, float]:
    """The parts of the estimate of a small Llama whose steps have two micro-batches."""
    training = {"seq_len": 64, "batch_size": 1, "global_batch_size": 2 * layout.data_parallel}
    config = Config(training=training | more.pop("training", {}), **more)
    model = meta_model(LLAMA, "sdpa", torch.float32)
    return estimate_memory(config, layout, batch_of(config, layout), model, device)


def test_whole_gradients_wait_where_they_are_reduced_once_a_step() -> None:
    first, second = (
        parts_of(Layout(dp_shard=2), parallelism={"zero_stage": stage})["gradients"]
        for stage in (1, 2)
    )
    model = meta_model(LLAMA, "sdpa", torch.float32)
    assert first - second == pytest.approx(4 * model.num_parameters(), rel=1e-3)


def test_what_is_in_cpu_memory_or_dropped_at_once_is_not_counted() -> None:
    plain = parts_of(Layout())
    offloaded = parts_of(Layout(), training={"enable_cpu_offload": True})
    assert offloaded["weights"] == offloaded["optimizer"] == 0
    assert offloaded["gathered"] > 0 and offloaded["activations"] == plain["activations"]
    here = parts_of(Layout(), "cpu", training={"enable_cpu_offload": True})
    assert here["weights"] == plain["weights"] and here["optimizer"] == plain["optimizer"]
    early = parts_of(
        Layout(),
        optimizer={"early_step_in_backward": True},
        training={"max_norm": 0.0, "global_batch_size": 1},
    )
    assert 0 < early["gradients"] < plain["gradients"] / 2


@pytest.mark.slow
def test_what_building_the_layers_would_refuse_is_refused(world: Path, tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", num_hidden_layers=1)
    drops = write_model(tmp_path / "drops", attention_dropout=0.1)
    recurrent = write_model(tmp_path / "recurrent")
    small = small_config(configuration_class("qwen3_5_text"))
    small.vocab_size = 257
    small.save_pretrained(recurrent)
    points = "--parallelism.pipeline_parallel_split_points"
    cases: dict[str, tuple[object, ...]] = {
        "layers are not compiled as a whole": ("--activation_checkpoint.offload",),
        "these layers are not compiled": (
            *("--model.config", recurrent, "--packing.mode", "none"),
            *("--activation_checkpoint.offload", "--compile.enable"),
        ),
        "state leaves between layers, and this model has one": (
            *("--model.config", one, "--optimizer.state_offload_share", 0.5),
        ),
        "torch would compute dropout again": (
            *("--model.config", drops, "--activation_checkpoint.mode", "memory_budget"),
            "--compile.enable",
        ),
        "layers.9 are not layers of the model in order": (
            *("--cpus", 2, "--parallelism.pipeline_parallel_degree", 2, points, "layers.9"),
        ),
    }
    for said, flags in cases.items():
        assert said in refused("train", world / "run.toml", *flags, "--dry-run")
        if "--cpus" not in flags:  # of which ranks print it themselves
            assert said in refused("train", world / "run.toml", *flags)
