"""A Hugging Face folder goes into the shards and out again without a change."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from every_model import configuration_class, model_types, small_config
from lacuna.config import Config, UserError
from lacuna.config.sections import ModelConfig
from lacuna.formats import huggingface
from lacuna.formats.huggingface import export_model, save_model_description
from lacuna.model.forward import loss_sums
from lacuna.model.head import Head
from lacuna.model.inputs import Inputs
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.fsdp import inference
from tiny import (
    VOCABULARY,
    differing,
    random_model,
    run_ranks,
    sharded_model,
    tiny_config,
    tokenizer_of_words,
    whole,
)

ARCHITECTURES = (
    "llama",
    "llama_tied",
    "qwen3",
    "gemma",
    "mistral",
    "gpt2",
    "neox",
    "qwen3_moe",
    "qwen2_moe",
)
IDS = torch.arange(40).view(2, 20) * 7 % VOCABULARY
POSITIONS = torch.arange(20).expand(2, 20)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the weight files of a folder, as they are named there."""
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def from_folder(folder: Path) -> Config:
    return Config(model=ModelConfig(name_or_path=str(folder)))


def check_loaded(folder: Path, model: PreTrainedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}
    assert differing(parameters, dict(reference.named_parameters())) == [], folder
    assert differing(dict(model.named_buffers()), dict(reference.named_buffers())) == [], folder
    labels = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], dim=1)
    inputs = Inputs({"input_ids": IDS, "position_ids": POSITIONS}, {"labels": labels})
    with inference(model):
        loss = (
            model.run_forward(loss_sums, Head(), inputs, LanguageModelling.loss)[0]
            / (labels != -100).sum()
        )
        expected = reference(input_ids=IDS, labels=IDS).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6), folder


def load_and_export(root: Path) -> None:
    """Loads each model in `root` into shards, compares, and exports it beside itself."""
    huggingface.FILE_BYTES = 20_000
    for name in ARCHITECTURES:
        model = sharded_model(tiny_config(name), from_folder(root / name))
        check_loaded(root / name, model)
        export_model(model, tokenizer_of_words(), str(root / f"{name}-out"), torch.float32)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_loads_into_shards_and_exports_as_transformers_saves_it(
    ranks: int, tmp_path: Path
) -> None:
    models = {name: random_model(tiny_config(name)) for name in ARCHITECTURES}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    run_ranks(ranks, load_and_export, tmp_path)
    for name, model in models.items():
        exported = tmp_path / f"{name}-out"
        assert differing(files_of(exported), files_of(tmp_path / name)) == [], name
        reopened = AutoModelForCausalLM.from_pretrained(exported).eval()
        with torch.no_grad():
            assert torch.equal(reopened(IDS).logits, model(IDS).logits), name
        assert type(reopened) is type(model)
        tied = reopened.get_output_embeddings().weight is reopened.get_input_embeddings().weight
        assert tied == model.config.tie_word_embeddings, name


def export_with(source: Path | None, target: Path, file_bytes: int, dtype: torch.dtype) -> None:
    """Exports an unsharded tiny Llama; export needs no process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "FILE_BYTES", file_bytes)
        model = random_model(tiny_config("llama"))
        export_model(model, tokenizer_of_words(), str(target), dtype, source and str(source))


def test_an_index_says_which_file_holds_what_when_one_is_not_enough(tmp_path: Path) -> None:
    export_with(None, tmp_path / "many", 20_000, torch.float32)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    tensors = {name: load_file(tmp_path / "many" / name) for name in names}
    assert index["weight_map"] == {key: name for name, file in tensors.items() for key in file}
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(
        size <= 20_000 or len(file) == 1 for size, file in zip(sizes, tensors.values(), strict=True)
    )

    export_with(None, tmp_path / "one", 10**9, torch.float32)
    assert [path.name for path in (tmp_path / "one").glob("model*")] == ["model.safetensors"]


def test_a_mixture_of_experts_leaves_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    model = random_model(tiny_config("qwen3_moe"))
    export_model(model, tokenizer_of_words(), str(tmp_path / "out"), torch.float32)
    tensors = files_of(tmp_path / "out")
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}"
        assert tensors[f"{name}.gate_proj.weight"].shape == (24, 32)
        assert tensors[f"{name}.up_proj.weight"].shape == (24, 32)
        assert tensors[f"{name}.down_proj.weight"].shape == (32, 24)
    assert not [name for name in tensors if "gate_up" in name]


def test_a_replaced_export_holds_nothing_of_the_old_one(tmp_path: Path) -> None:
    export_with(None, tmp_path / "out", 20_000, torch.float32)
    export_with(None, tmp_path / "out", 10**9, torch.float32)
    assert not list(tmp_path.glob("out/*index.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_export_has_tokenizer_generation_settings_and_its_own_dtype(tmp_path: Path) -> None:
    export_with(None, tmp_path / "out", 10**9, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w5 w96").input_ids == [5, 96]
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 0)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["dtype"], written["use_cache"]) == ("bfloat16", True)
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert {tensor.dtype for tensor in files_of(tmp_path / "out").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_generation_settings_of_the_model_it_started_from_are_kept(tmp_path: Path) -> None:
    GenerationConfig(eos_token_id=[2, 5], temperature=0.6, do_sample=True).save_pretrained(
        tmp_path / "source"
    )
    export_with(tmp_path / "source", tmp_path / "out", 10**9, torch.float32)
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.temperature, generation.do_sample) == (
        [2, 5],
        0.6,
        True,
    )


@pytest.mark.parametrize(
    ("kept", "expected"), [([3, 5], [3, 5, 2, 7]), (5, [5, 2, 7]), (None, [2, 7])]
)
def test_generation_also_stops_where_the_chat_template_ends_an_answer(
    kept: list[int] | int | None, expected: list[int], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of_words()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [tokenizer.convert_ids_to_tokens(7)]}
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}"
        + tokenizer.convert_ids_to_tokens(7)
        + "{% endfor %}"
    )
    GenerationConfig(eos_token_id=kept).save_pretrained(tmp_path)
    save_model_description(tiny_config("llama"), tokenizer, str(tmp_path), str(tmp_path / "out"))
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == expected


def test_odd_generation_settings_are_kept_as_well(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "generation_config.json").write_text(
        '{"temperature": 0.6, "eos_token_id": 2}'
    )
    export_with(tmp_path / "source", tmp_path / "out", 10**9, torch.float32)
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.temperature, generation.pad_token_id) == (2, 0.6, 0)


def test_an_export_leaves_the_configuration_of_the_model_alone(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama"))
    before = model.config.to_dict()
    export_model(model, tokenizer_of_words(), str(tmp_path / "out"), torch.bfloat16)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == "sdpa"


def refusals(folders: list[Path]) -> list[str]:
    """The messages with which loading from the folders is refused."""
    messages = []
    for folder in folders:
        with pytest.raises(UserError) as caught:
            sharded_model(tiny_config("llama"), from_folder(folder))
        messages.append(str(caught.value))
    return messages


def test_files_that_do_not_fit_the_model_are_refused_by_name(tmp_path: Path) -> None:
    random_model(tiny_config("llama")).save_pretrained(tmp_path)
    complete = load_file(tmp_path / "model.safetensors")
    narrow = {**complete, "model.layers.0.mlp.up_proj.weight": torch.zeros(40, 32)}
    gone = {
        name: tensor
        for name, tensor in complete.items()
        if name != "model.layers.1.self_attn.q_proj.weight"
    }
    folders = [tmp_path / name for name in ("narrow", "gone", "file", "torn")]
    for folder in folders:
        folder.mkdir()
    save_file(narrow, folders[0] / "model.safetensors", metadata={"format": "pt"})
    save_file(gone, folders[1] / "model.safetensors", metadata={"format": "pt"})
    torn = folders[3] / "model.safetensors"
    torn.write_bytes((tmp_path / "model.safetensors").read_bytes()[:-99])
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folders[2] / "model.safetensors.index.json").write_text(json.dumps(index))
    for messages in run_ranks(2, refusals, folders):
        assert "model.layers.0.mlp.up_proj.weight" in messages[0]
        assert "model.layers.1.self_attn.q_proj.weight" in messages[1]
        assert "model-00002-of-00002.safetensors" in messages[2]
        assert f"{folders[3]}: a weight file is damaged" in messages[3]
        assert all("model.name_or_path" in message for message in messages[:3])


def load_as_float32(folder: Path) -> set[torch.dtype]:
    return {
        parameter.dtype
        for parameter in sharded_model(tiny_config("llama"), from_folder(folder)).parameters()
    }


def test_half_precision_files_become_float32_master_weights(tmp_path: Path) -> None:
    random_model(tiny_config("llama")).to(torch.bfloat16).save_pretrained(tmp_path)
    assert run_ranks(1, load_as_float32, tmp_path) == [{torch.float32}]


JOINED = ("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen4_exp_text")
"""Kinds of models with weights joined, along the dimension that shards cut, of several in files."""


def loaded_otherwise(root: str, kinds: list[str]) -> dict[str, list[str]]:
    """The tensors of models in folders of `root` that differ in shards from transformers'.

    Of two ranks each compares every second model.
    """
    wrong = {}
    for number, kind in enumerate(kinds):
        folder = Path(root, kind)
        model = sharded_model(
            AutoConfig.from_pretrained(folder), from_folder(folder), attention=None
        )
        parameters = {name: whole(parameter) for name, parameter in model.named_parameters()}
        if number % dist.get_world_size() != dist.get_rank():
            continue
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = differing(parameters, dict(own.named_parameters())) + differing(
            dict(model.named_buffers()), dict(own.named_buffers())
        )
        if found:
            wrong[kind] = found
    return wrong


def save_all(kinds: list[str], root: Path) -> None:
    for kind in kinds:
        random_model(small_config(configuration_class(kind)), "eager").save_pretrained(root / kind)


def test_what_files_have_in_several_tensors_is_joined_before_it_is_cut(tmp_path: Path) -> None:
    known = sorted({*JOINED} & {*model_types()})  # by the installed transformers
    save_all(known, tmp_path)
    assert run_ranks(2, loaded_otherwise, str(tmp_path), known) == [{}, {}]


@pytest.mark.slow
def test_every_causal_model_of_transformers_loads_into_shards(tmp_path: Path) -> None:
    no_list_of_layers = {"blt", "hrm_text", "longcat_flash"}
    kinds = [kind for kind in model_types() if kind not in no_list_of_layers]
    save_all(kinds, tmp_path)
    assert run_ranks(2, loaded_otherwise, str(tmp_path), kinds) == [{}, {}]
