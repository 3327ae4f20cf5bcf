"""A layout that the model or the data cannot have is refused before anything is built."""

from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from every_model import configuration_class, small_config
from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.documents import ValidationConfig
from lacuna.config.machine import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.model.architecture import meta_model
from lacuna.model.build import build_model
from lacuna.model.checks import check_layers_stay, check_layout, check_lengths, check_ties
from lacuna.model.layers.bits import dequantize, quantize
from lacuna.model.layers.lora import add_adapters
from lacuna.model.layers.wrapping import plain_tensor
from lacuna.model.vocabulary import embeddings_on_cpu, look_up_on_cpu
from lacuna.model.weights import fill_model
from lacuna.parallel.fsdp import is_alone, local
from lacuna.parallel.mesh import Layout, build_mesh
from tiny import CPU, random_model, relative_error, run_ranks, tiny_config, tokenizer_of_words


def refusal(
    architecture: str, layout: Layout, length: int = 64, prompts: tuple[str, ...] = (), **shape: int
) -> str:
    model_config = tiny_config(architecture, **shape)
    with pytest.raises(UserError) as raised:
        check_lengths(TrainingConfig(seq_len=length), model_config, layout)
        check_tiny_layout(model_config, layout, prompts)
    return str(raised.value)


def check_tiny_layout(
    model_config: PretrainedConfig, layout: Layout, prompts: tuple[str, ...] = ()
) -> None:
    check_layout(
        ParallelismConfig(),
        CompileConfig(),
        ActivationCheckpointConfig(),
        ValidationConfig(prompts=prompts),
        model_config,
        layout,
    )


def test_sequences_must_cut_evenly() -> None:
    text = refusal("llama", Layout(cp=3, tp=2), 64)
    assert (
        "training.seq_len: 64 is no multiple" in text
        and "= 2 × 2 × 3" in text
        and "above is 72" in text
    )
    assert "above is 64" in refusal("llama", Layout(tp=2), 63)


def test_heads_and_matrices_must_share_evenly() -> None:
    assert "4 ranks cannot share the model's num_key_value_heads = 2" in refusal(
        "llama", Layout(tp=4)
    )
    assert "num_attention_heads = 2" in refusal("llama", Layout(tp=4), num_attention_heads=2)


def test_tensor_parallelism_needs_a_plan() -> None:
    assert "no tensor-parallel plan" in refusal("opt", Layout(tp=2))


def test_attention_that_every_rank_computes_whole_has_no_dropout() -> None:
    assert "set the model's attn_pdrop to 0" in refusal("gpt2", Layout(tp=2), attn_pdrop=0.1)


def test_text_is_not_sampled_from_stages_of_a_pipeline() -> None:
    assert "validation.prompts" in refusal("llama", Layout(pp=2), prompts=("the",))
    check_tiny_layout(tiny_config("mistral"), Layout(cp=2, tp=2, pp=2))


def test_one_gpu_has_no_frozen_embedding_beside_quantised_weights() -> None:
    def decided(
        architecture: str = "llama",
        base: str = "nf4",
        shards: int = 1,
        device: str = "cuda",
        tied: bool = False,
        offload: bool = False,
        modules: tuple[str, ...] = (),
    ) -> bool:
        config = Config(
            training={"enable_cpu_offload": offload},
            lora={"rank": 2, "modules": modules},
            quantization={"base": base},
        )
        model = meta_model(
            tiny_config(architecture, tie_word_embeddings=tied), "sdpa", torch.float32
        )
        add_adapters(model, config.lora, torch.float32)
        alone = is_alone(config.training, Layout(dp_shard=shards))
        return bool(embeddings_on_cpu(model, base, alone, device))

    assert decided()
    assert not decided(base="none") and not decided(device="cpu") and not decided(shards=2)
    assert not decided(tied=True), "the head needs it"
    assert not decided(modules=("embed_tokens",)), "it learns"
    assert not decided("gemma3"), "it is scaled by a number on the GPU"
    assert not decided(offload=True)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif("not torch.cuda.is_available()"))],
)
def test_rows_that_are_looked_up_on_the_cpu_are_those_of_the_embedding(device: str) -> None:
    embedding, ids = (
        nn.Embedding(7, 3, device=device).requires_grad_(False),
        torch.tensor([[6, 0], [3, 3]]),
    )
    expected = embedding(ids.to(device))
    look_up_on_cpu(embedding)
    found = embedding(ids.to(device))
    assert (
        embedding.weight.device.type == "cpu"
        and found.device == expected.device
        and found.equal(expected)
    )


def test_an_embedding_that_stays_in_cpu_memory_is_never_elsewhere() -> None:
    model = meta_model(tiny_config("llama"), "sdpa", torch.float32)
    path = "model.embed_tokens"
    nowhere = torch.device("meta")
    settings = ModelConfig(), LoraConfig(), TrainingConfig()
    fill_model(model, set(), *settings, nowhere, fill=False, on_cpu={path})
    on_cpu = [name for name, one in model.named_parameters() if one.device.type == "cpu"]
    assert on_cpu == [f"{path}.weight"]


def _places(folder: Path, device: str, **settings: Any) -> set[str]:
    """The device types that hold the parameters of a model loaded to be trained on `device`."""
    config = Config(
        model={"name_or_path": str(folder)},
        training={"seq_len": 8, "enable_cpu_offload": True},
        **settings,
    )
    built = build_model(
        config, tokenizer_of_words(), build_mesh(Layout(), device), torch.device(device, 0)
    )
    return {local(parameter).device.type for parameter in built.model.parameters()}


@pytest.mark.skipif("not torch.cuda.is_available()")
@pytest.mark.parametrize("base", ["none", "int8", "nf4"])
def test_weights_that_are_offloaded_are_loaded_into_cpu_memory(tmp_path: Path, base: str) -> None:
    random_model(tiny_config("llama_tied")).save_pretrained(tmp_path)
    lora = {"lora": {"rank": 4}, "quantization": {"base": base}} if base != "none" else {}
    assert run_ranks(1, partial(_places, **lora), tmp_path, "cuda") == [{"cpu"}]


def _graphs(folder: Path, **settings: Any) -> int:
    """How many graphs are compiled for a step and a validation."""
    graphs = []
    counted = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    nn.Module.compile = partialmethod(nn.Module.compile, backend=counted)
    config = Config(
        model={"config": str(folder)}, compile={"enable": True}, training={"seq_len": 8}, **settings
    )
    mesh = build_mesh(Layout(), "cpu")
    model = build_model(config, tokenizer_of_words(), mesh, CPU).model
    graphs.clear()  # those of the model that was tried out
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            model(input_ids=torch.arange(8)[None], use_cache=False)
    return len(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("modules", [(), ("embed_tokens",)])
def test_adapters_have_no_more_graphs_compiled(tmp_path: Path, modules: tuple[str, ...]) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    plain = run_ranks(1, _graphs, tmp_path)
    assert plain == [4], "of a layer and of the last norm, learning and not"
    adapted = run_ranks(1, partial(_graphs, lora={"rank": 4, "modules": modules}), tmp_path)
    assert adapted == plain


def _quantized(folder: Path, shards: int, **lora: Any) -> PreTrainedModel:
    """A quantised model from files, beside new adapters."""
    config = Config(
        model={"name_or_path": str(folder)},
        quantization={"base": "nf4"},
        lora=lora,
        training={"seq_len": 8, "mixed_precision_param": "bfloat16"},
    )
    return build_model(
        config, tokenizer_of_words(), build_mesh(Layout(dp_shard=shards), "cpu"), CPU
    ).model


def _begun(folder: Path, names: list[str], shards: int, **lora: Any) -> dict[str, Tensor]:
    """The parameters of a quantised model that is merged with adapters that nothing has trained."""
    model = _quantized(folder, shards, init="loftq", **lora)
    return {name: plain_tensor(model, name) for name in names}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_adapters_can_begin_as_the_best_that_their_rank_has_of_what_quantisation_took(
    architecture: str, tmp_path: Path
) -> None:
    random_model(tiny_config(architecture)).save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    # A layer that the model leaves out, as files of those that guess several tokens have.
    more = {
        f"mtp.{name.partition('.')[2]}": torch.ones_like(weight) for name, weight in whole.items()
    }
    save_file(more | whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ends = (
        ("_proj.weight",)
        if architecture == "llama"
        else ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    )
    whole = {name: weight for name, weight in whole.items() if name.endswith(ends)}
    lost = {
        name: weight - dequantize(quantize(weight, "nf4"), "nf4", weight.shape, torch.float32)
        for name, weight in whole.items()
    }
    sizes = {name: torch.linalg.svdvals(error) for name, error in lost.items()}
    rank = min(len(size) for size in sizes.values())
    half = run_ranks(1, partial(_begun, rank=rank // 2, rslora=True), tmp_path, [*whole], 1)[0]
    full = run_ranks(2, partial(_begun, rank=rank, alpha=3, dropout=0.5), tmp_path, [*whole], 2)
    for name, weight in whole.items():
        beyond = sizes[name][rank // 2 :].norm().item()
        assert (half[name] - weight).norm().item() == pytest.approx(beyond, rel=0.05)
        assert beyond < 0.7 * lost[name].norm().item()
        if len(sizes[name]) == rank:
            torch.testing.assert_close(full[0][name], weight, rtol=0, atol=1e-5)
        torch.testing.assert_close(full[0][name], full[1][name], rtol=0, atol=0)
    assert relative_error(full[0], half) > 1e-3


def test_an_adapter_can_learn_where_quantisation_took_nothing(tmp_path: Path) -> None:
    random_model(tiny_config("llama")).save_pretrained(tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.q_proj"
    stored[f"{name}.weight"].zero_()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = run_ranks(
        1, partial(_begun, rank=4), tmp_path, [f"{name}.weight", f"{name}.lora_A"], 1
    )[0]
    assert not found[f"{name}.weight"].any() and found[f"{name}.lora_A"].all()


def _learning_or_not(folder: Path, name: str, shards: int) -> tuple[Tensor, Tensor, Tensor]:
    """A model's logits with and without gradients, and its weight `name` as it is exported.

    That weight is trained whole.
    """
    model, logits = _quantized(folder, shards, rank=4, modules=("o_proj", "down_proj")), []
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            logits.append(
                model(input_ids=torch.arange(8)[None], use_cache=False).logits.detach().clone()
            )
    return *logits, plain_tensor(model, name)


@pytest.mark.parametrize("shards", [1, 2])
def test_linear_layers_that_are_trained_whole_are_never_quantised(
    tmp_path: Path, shards: int
) -> None:
    random_model(tiny_config("llama")).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    learning, still, exported = run_ranks(shards, _learning_or_not, tmp_path, name, shards)[0]
    assert learning.equal(still) and exported.equal(load_file(tmp_path / "model.safetensors")[name])


@pytest.mark.parametrize(("kind", "shares"), [("zamba", True), ("llama", False)])
def test_layers_that_share_weights_are_not_sharded(kind: str, shares: bool) -> None:
    model = meta_model(
        small_config(configuration_class(kind), tie_word_embeddings=True), "eager", torch.float32
    )
    if shares:
        with pytest.raises(
            UserError,
            match=r"layers\.3\.shared_transf.*are one weight, but layers are sharded one by",
        ):
            check_ties(model)
    else:
        check_ties(model)


@pytest.mark.parametrize(("kind", "name"), [("opt", "layerdrop"), ("bart", "decoder_layerdrop")])
def test_layers_that_ranks_would_leave_out_at_random_are_refused(kind: str, name: str) -> None:
    two = Layout(dp_shard=2)
    check_layers_stay(small_config(configuration_class(kind), **{name: 0.0}), two)
    dropping = small_config(configuration_class(kind), **{name: 0.1})
    check_layers_stay(dropping, Layout())
    with pytest.raises(UserError, match="leaves out layers at random"):
        check_layers_stay(dropping, two)
