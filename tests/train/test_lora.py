"""A run that trains adapters saves, resumes and exports what peft makes of the same files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lacuna.config import UserError
from lacuna.config.adapters import LoraConfig as Settings
from lacuna.formats.adapter import export_adapter
from lacuna.formats.opening import open_model
from lacuna.model.layers.adapter_files import load_adapters
from lacuna.model.layers.casting import compute_in
from lacuna.model.layers.lora import (
    adapted_modules,
    add_adapters,
    trained_names,
    without_adapters,
)
from runs import (
    checkpoint,
    curve,
    lacuna,
    make_world,
    refused,
    stop_after,
    together,
    train,
    weights,
)
from tiny import random_model, tiny_config, tokenizer_of_words

pytestmark = pytest.mark.slow  # whole runs of the command line

KINDS = {
    "plain": ("--lora.targets", "q_proj,*.mlp.*"),
    "summand": ("--lora.targets", "q_proj,*.mlp.*", "--lora.rslora"),
    "scaled": ("--lora.rslora", "--lora.modules", "norm,embed_tokens"),
    "DoRA": ("--lora.dora", "--lora.dropout", "0.2"),
    "two ranks": ("--cpus", "2", "--training.batch_size", "2"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a run, and a base of random weights."""
    folder = make_world(tmp_path_factory.mktemp("lora"))
    random_model(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "base")
    return folder


def settings(world: Path) -> tuple[object, ...]:
    start = (
        "--model.name_or_path",
        world / "base",
        "--model.config",
        "none",
        "--model.tokenizer_path",
    )
    return *start, world / "model", "--lora.rank", 4, "--lora.alpha", 8


@pytest.fixture(scope="module")
def runs(world: Path) -> dict[str, Path]:
    folders = {kind: world / "runs" / kind for kind in KINDS}
    together(
        *(
            lambda kind=kind: train(world, folders[kind], *settings(world), *KINDS[kind])
            for kind in KINDS
        )
    )
    return folders


def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    return model.eval()(input_ids=torch.arange(5, 65).reshape(2, 30)).logits.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_what_peft_computes_from_the_adapter(
    world: Path, runs: dict[str, Path], kind: str
) -> None:
    base = AutoModelForCausalLM.from_pretrained(world / "base")
    before = logits(base)
    beside = logits(PeftModel.from_pretrained(base, runs[kind] / "hf" / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(runs[kind] / "hf"))
    torch.testing.assert_close(merged, beside, rtol=1e-5, atol=1e-5)
    assert (merged - before).abs().max() > 1e-2


def test_two_ranks_train_the_same_adapter(world: Path, runs: dict[str, Path]) -> None:
    alone = world / "runs" / "alone"
    train(world, alone, *settings(world))
    for (_, *one), (_, *two) in zip(curve(alone), curve(runs["two ranks"]), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize("kind", ("scaled", "DoRA"))
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    world: Path, runs: dict[str, Path], kind: str
) -> None:
    again = world / "again" / kind
    stop_after(2, world, again, *settings(world), *KINDS[kind])
    train(world, again, *settings(world), *KINDS[kind])
    assert curve(again) == curve(runs[kind])
    assert weights(again) == weights(runs[kind])


def test_a_checkpoint_holds_what_was_trained_and_becomes_the_merged_model(
    world: Path, runs: dict[str, Path]
) -> None:
    last = checkpoint(runs["DoRA"], 8)
    stored = sum(file.stat().st_size for file in last.glob("*.distcp"))
    assert stored < (world / "base" / "model.safetensors").stat().st_size
    lacuna("convert", last, world / "converted", "--to", "hf")
    found, wanted = (
        load_file(folder / "model.safetensors")
        for folder in (world / "converted", runs["DoRA"] / "hf")
    )
    torch.testing.assert_close(found, wanted)


def test_training_goes_on_from_an_adapter_of_pefts(world: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(world / "base")
    theirs = get_peft_model(
        base, LoraConfig(r=3, lora_alpha=5, target_modules=["k_proj", "o_proj"], use_rslora=True)
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(world / "theirs")
    still = ("--lora.adapter", world / "theirs", "--optimizer.lr", 0, "--training.steps", 1)
    train(world, world / "on", *settings(world)[:6], *still)
    started = load_file(world / "theirs" / "adapter_model.safetensors")
    torch.testing.assert_close(
        load_file(world / "on" / "hf" / "adapter" / "adapter_model.safetensors"), started
    )
    merged = AutoModelForCausalLM.from_pretrained(world / "on" / "hf")
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=1e-5, atol=1e-5)
    shutil.rmtree(world / "theirs")  # which the run needs no more
    lacuna("convert", checkpoint(world / "on", 1), world / "of-step", "--to", "hf")
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(world / "of-step")), logits(merged)
    )
    lacuna("train", world / "on" / "config.toml", "--training.steps", 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--lora.targets", "wq"),
            "lora.targets: 'wq' matches no linear layer of the model: choose of down_proj",
        ),
        (("--lora.targets", "lm_head"), "'lm_head' matches no linear layer"),
        (("--lora.modules", "nrm"), "lora.modules: 'nrm' matches no module"),
        (
            ("--lora.targets=",),
            "lora.targets, lora.parameters, lora.modules: they name nothing that could learn",
        ),
        (("--lora.rank", "33"), "lora.rank: 33 is more than 32"),
        (
            ("--lora.rank", "0", "--lora.dora"),
            "lora.dora, lora.rank: without the second there is no adapter",
        ),
        (
            ("--lora.rank", "0", "--lora.targets", "q_proj"),
            "lora.targets, lora.rank: without the second there is no adapter",
        ),
        (
            ("--model.new_tokens", "<a>", "--model.train_new_tokens_only"),
            "adapters leave the vocabulary frozen: name its embedding in lora.modules",
        ),
        (("--lora.adapter", "nowhere"), "lora.adapter: cannot read nowhere/adapter_config.json"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    world: Path, flags: tuple[str, ...], said: str
) -> None:
    given = settings(world)[:6] if "--lora.rank" in flags else settings(world)
    assert said in refused("train", world / "run.toml", *given, *flags, "--dry-run")


@pytest.mark.parametrize(
    ("architecture", "modules"),
    [
        ("llama", ("mlp", "up_proj")),
        ("llama_tied", ("embed_tokens",)),
        ("llama_tied", ("lm_head",)),
    ],
)
def test_modules_that_are_trained_whole_are_so_in_peft(
    architecture: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    ours, given = random_model(tiny_config(architecture)), Settings(rank=3, modules=modules)
    add_adapters(ours, given, torch.float32)
    with torch.no_grad():
        for parameter in filter(lambda one: one.requires_grad, ours.parameters()):
            parameter.normal_(std=0.2)
    export_adapter(ours, tokenizer_of_words(), given, None, str(tmp_path))
    theirs = PeftModel.from_pretrained(random_model(tiny_config(architecture)), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    again, stated = random_model(tiny_config(architecture)), Settings(adapter=(str(tmp_path),))
    add_adapters(again, stated, torch.float32)
    load_adapters(again, trained_names(again), stated)
    assert torch.equal(logits(again), logits(ours))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    if stored.pop("base_model.model.lm_head.weight", None) is not None:
        save_file(stored, tmp_path / "adapter_model.safetensors")
        with pytest.raises(UserError, match="are one weight in the model, and not the same there"):
            load_adapters(again, trained_names(again), stated)


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": r".*layers\.1.*(q|up)_proj"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"target_modules": "all-linear"},
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2_moe"])
def test_an_adapter_is_for_the_layers_that_peft_chose(
    architecture: str, chosen: dict[str, object], tmp_path: Path
) -> None:
    base = random_model(tiny_config(architecture, mlp_only_layers=[1]))
    theirs = get_peft_model(base, LoraConfig(r=3, init_lora_weights=False, **chosen))
    theirs.save_pretrained(tmp_path)
    described = tmp_path / "adapter_config.json"
    described.write_text(
        json.dumps(json.loads(described.read_text()) | {"target_modules": chosen["target_modules"]})
    )
    ours, stated = random_model(base.config), Settings(adapter=(str(tmp_path),))
    add_adapters(ours, stated, torch.float32)
    load_adapters(ours, trained_names(ours), stated)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)


def test_a_gate_of_one_output_gets_a_new_adapter_by_its_name_alone() -> None:
    for targets, rank, gates in ((("all-linear",), 4, 0), (("shared_expert_gate",), 1, 2)):
        chosen, *_ = add_adapters(
            random_model(tiny_config("qwen2_moe")),
            Settings(rank=rank, targets=targets),
            torch.float32,
        )
        assert sum(name.endswith("shared_expert_gate") for name in chosen) == gates


def test_an_adapters_files_that_cannot_be_read_are_refused(
    world: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder, no = (
        shutil.copytree(runs["plain"] / "hf" / "adapter", tmp_path / "adapter"),
        tmp_path / "no",
    )
    AutoTokenizer.from_pretrained(world / "model").save_pretrained(world / "base")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-99])
    assert f"lora.adapter: cannot read {file}" in refused("convert", folder, no, "--to", "hf")
    file.unlink()
    assert f"lora.adapter: cannot read {file}" in refused("convert", folder, no, "--to", "hf")


def test_an_adapter_brings_the_chat_template_that_it_was_trained_with(
    world: Path, tmp_path: Path
) -> None:
    tokenizer_of_words().save_pretrained(base := tmp_path / "base")
    random_model(tiny_config("llama")).save_pretrained(base)
    given, tokenizer = Settings(rank=2), tokenizer_of_words()
    tokenizer.chat_template = "{{ messages[0].content }}"
    ours = AutoModelForCausalLM.from_pretrained(base)
    add_adapters(ours, given, torch.float32)
    export_adapter(ours, tokenizer, given, str(base), str(tmp_path / "adapter"))
    assert open_model(str(tmp_path / "adapter")).tokenizer.chat_template == tokenizer.chat_template


def test_a_run_that_goes_on_with_less_than_it_trained_is_refused(
    world: Path, runs: dict[str, Path]
) -> None:
    shutil.copytree(runs["plain"], world / "fewer")
    more = (*settings(world), "--lora.targets", "q_proj", "--training.steps", 9)
    said = train(world, world / "fewer", *more, status=2)
    assert "model.model.layers.0.mlp.down_proj.lora_A' is not among what is trained" in said


def test_an_adapter_of_an_equally_shaped_model_is_refused(
    world: Path, runs: dict[str, Path], tmp_path: Path
) -> None:
    random_model(AutoConfig.from_pretrained(world / "model"), seed=1).save_pretrained(
        tmp_path / "twin"
    )
    given = ("--model.name_or_path", tmp_path / "twin", *settings(world)[2:6])
    said = refused(
        "train",
        world / "run.toml",
        *given,
        "--lora.adapter",
        runs["plain"] / "hf" / "adapter",
        "--dry-run",
    )
    assert (
        f"lora.adapter: {tmp_path / 'twin'} is another model than the adapters', {world / 'base'}"
        in said
    )


def test_an_adapter_of_another_model_is_refused(world: Path, runs: dict[str, Path]) -> None:
    other = ("--model.name_or_path", "none", "--model.config", world / "other.json")
    AutoConfig.from_pretrained(world / "model", hidden_size=32).to_json_file(world / "other.json")
    tokens = ("--model.tokenizer_path", world / "model")
    said = train(
        world,
        world / "no",
        *other,
        *tokens,
        "--lora.adapter",
        runs["plain"] / "hf" / "adapter",
        status=2,
    )
    assert "is of another model" in said


def test_an_adapter_with_more_than_the_run_takes_is_refused(
    world: Path, runs: dict[str, Path]
) -> None:
    given = (
        *settings(world)[:6],
        "--lora.adapter",
        runs["plain"] / "hf" / "adapter",
        "--lora.targets",
        "q_proj",
    )
    said = train(world, world / "less", *given, status=2)
    assert (
        "or of other settings than lora.*: nothing here takes base_model.model.model.layers.0.mlp"
        in said
    )


def test_several_adapters_are_started_from_as_their_sum(world: Path, runs: dict[str, Path]) -> None:
    both = [runs[kind] / "hf" / "adapter" for kind in ("summand", "plain")]
    given = (
        *settings(world)[:6],
        "--lora.adapter",
        *both,
        "--training.steps",
        1,
        "--optimizer.lr",
        0,
    )
    train(world, world / "sum", *given)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(world / "base"), both[0], "first"
    )
    theirs.load_adapter(both[1], "second")
    theirs.base_model.set_adapter(["first", "second"])
    merged = AutoModelForCausalLM.from_pretrained(world / "sum" / "hf")
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=1e-5, atol=1e-5)
    summed = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(world / "base"), world / "sum/hf/adapter"
    )
    torch.testing.assert_close(logits(summed), logits(theirs), rtol=1e-5, atol=1e-5)


def test_several_adapters_without_a_sum_are_refused(world: Path, runs: dict[str, Path]) -> None:
    other = (
        "--lora.adapter",
        runs["plain"] / "hf" / "adapter",
        runs["two ranks"] / "hf" / "adapter",
    )
    assert "lora.adapter: " in train(world, world / "less", *settings(world)[:6], *other, status=2)
    whole = ("--lora.adapter", runs["scaled"] / "hf" / "adapter", runs["scaled"] / "hf" / "adapter")
    said = train(world, world / "less", *settings(world)[:6], *whole, status=2)
    assert "has no sum over several adapters" in said


def test_an_adapter_with_ranks_of_its_own_for_some_layers_is_refused(
    world: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(world / "base")
    theirs = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], alpha_pattern={"q_proj": 5})
    get_peft_model(base, theirs).save_pretrained(tmp_path)
    said = train(world, world / "less", *settings(world)[:6], "--lora.adapter", tmp_path, status=2)
    assert "has alpha_pattern, which lacuna does not know" in said


def test_only_new_rows_of_a_vocabulary_trained_beside_adapters_move(world: Path) -> None:
    new = (
        "--model.new_tokens",
        "<a>",
        "--model.train_new_tokens_only",
        "--lora.modules",
        "embed_tokens,lm_head",
    )
    train(world, world / "rows", *settings(world), *new)
    base = load_file(world / "base" / "model.safetensors")["model.embed_tokens.weight"]
    rows = load_file(world / "rows" / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert len(rows) > len(base) and torch.equal(rows[: len(base)], base)
    lacuna("convert", checkpoint(world / "rows", 8), world / "rows_converted", "--to", "hf")
    converted = load_file(world / "rows_converted" / "model.safetensors")
    torch.testing.assert_close(converted, load_file(world / "rows" / "hf" / "model.safetensors"))


@pytest.mark.parametrize("casting", [False, True])
def test_without_its_adapters_a_model_is_its_base(casting: bool) -> None:
    ids = torch.arange(5, 35)[None]
    model = random_model(tiny_config("llama"))
    base = model(input_ids=ids).logits
    add_adapters(model, Settings(rank=3), torch.bfloat16 if casting else torch.float32)
    for module in adapted_modules(model).values():
        torch.nn.init.normal_(module.lora_A)
        torch.nn.init.normal_(module.lora_B)
    if casting:
        compute_in(model, torch.float32)
    beside = model(input_ids=ids).logits
    assert (beside - base).abs().max() > 0.1
    with pytest.raises(KeyError), without_adapters(model):
        assert torch.equal(model(input_ids=ids).logits, base)
        raise KeyError
    assert torch.equal(model(input_ids=ids).logits, beside)


@pytest.mark.slow
def test_adapters_of_a_checkpoint_are_taken_beside_their_own_base_and_as_large(
    world: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    random_model(AutoConfig.from_pretrained(world / "model"), seed=5).save_pretrained(other)
    begun = ("--training.steps", 2, "--lora.rank", 4)
    start = "--checkpoint.initial_load_path"
    beside = ("--model.config", "none", "--model.tokenizer_path", world / "model")
    beside += ("--model.name_or_path",)
    train(world, tmp_path / "one", *beside, world / "base", *begun)
    train(world, tmp_path / "random", *begun)
    one, random = (checkpoint(tmp_path / name, 2) for name in ("one", "random"))
    cases = {
        "is another model than the adapters'": (one, *beside, other),
        "count 4 times, and 16 times here": (one, *beside, world / "base", "--lora.alpha", 64),
        "beside random weights of training.seed = 42": (random, "--training.seed", 7),
        "were trained beside random weights": (random, *beside, world / "base"),
    }
    for said, (path, *flags) in cases.items():
        output = train(world, tmp_path / "new", *begun, start, path, *flags, status=2)
        assert "checkpoint.initial_load_path: " in output and said in output
    train(world, tmp_path / "right", *begun, start, one, *beside, world / "base")
    train(world, tmp_path / "right, random", *begun, start, random)
