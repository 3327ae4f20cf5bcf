"""Models that score learn from pairs, and transformers finds the scores that training found."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lacuna.config import Config, UserError
from lacuna.config.contradictions import contradictions_of
from lacuna.model.build import build_model
from lacuna.objective.reward import Reward, padding_of, reward_sums, with_last_places
from lacuna.parallel.mesh import Layout
from layouts import Case
from policies import batch_of, one_rank, policy_of
from rewarded import CHAT, SHARED_LAYOUTS
from runs import curve, lacuna, refused, rows, train, weights, write_pairs
from tasks import STEPS, Task, steps_of, write_weights
from tiny import CPU, mesh_of, random_model, tiny_config, tokenizer_of_words

LOGGED = ("loss", "grad_norm", "score_chosen", "score_margin", "score_accuracy")


def test_the_loss_is_that_of_bradley_and_terry() -> None:
    found = reward_sums(torch.tensor([1.0, -0.5, 0.25, 2.0]), {})
    wanted = math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(1.75))
    assert found["loss"].item() == pytest.approx(wanted, rel=1e-6)
    said = [found[name].item() for name in ("score_chosen", "score_rejected", "right")]
    assert said == [1.25, 1.5, 1.0]


def test_a_sequence_is_scored_at_its_last_token_that_is_no_padding() -> None:
    columns = {"chosen": [1.0, 0.0, 1.0, 0.0]}
    batch = batch_of([([5, 6], [7, 2]), ([5], [2, 9]), ([2], [2]), ([4], [8])], columns)
    for padding, wanted in ((2, [2, 6, 7, 10]), (None, [3, 6, 8, 10])):
        scored = with_last_places(batch, padding).columns["scored"].flatten()
        assert scored.nonzero().flatten().tolist() == wanted
        assert scored[wanted].tolist() == [1, 2, 3, 4]
    assert padding_of(7, tokenizer_of_words()) == 7
    tokenizer = tokenizer_of_words()
    tokenizer.pad_token = None
    assert padding_of(None, tokenizer) == tokenizer.eos_token_id


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_pairs(folder / "pairs.jsonl", random.Random(0), 60)
    write_pairs(folder / "held_out.jsonl", random.Random(1), 10)
    return folder


def flags(data: Path, *more: object) -> list[object]:
    return [
        *("--job.task", "reward", "--data.dataset", data / "pairs.jsonl"),
        *("--validation.dataset", data / "held_out.jsonl", "--validation.freq", 4),
        *("--training.seq_len", 128, "--training.batch_size", 2),
        *("--chat.template", "chatml", "--model.new_tokens", "<|im_start|>,<|im_end|>"),
        *("--lr_scheduler.decay_type", "constant", *more),
    ]


@pytest.mark.parametrize("task", ["reward", "preference", "sft"])
def test_texts_need_no_template_and_messages_do(
    task: str, world: Path, data: Path, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "who"}
    if task == "sft":
        text = {"prompt": "the cat", "completion": " sat"}
        talk = {"prompt": [asked], "completion": [{"role": "assistant", "content": " sat"}]}
    else:
        text = {"chosen": "the cat sat", "rejected": "the dog ran"}
        talk = {one: [asked, {"role": "assistant", "content": said}] for one, said in text.items()}
    (tmp_path / "texts.jsonl").write_text(f"{json.dumps(text)}\n" * 8)
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 8)
    own = flags(data, "--job.task", task, "--training.steps", 1, "--validation.dataset", "none")
    own += ["--chat.template", "none", "--model.new_tokens", "none"]
    train(world, tmp_path / "run", *own, "--data.dataset", tmp_path / "texts.jsonl")
    assert len(curve(tmp_path / "run", "loss")) == 1
    for words in ((), ("--dry-run",), ("--data.streaming",)):
        talks = ("--data.dataset", tmp_path / "talks.jsonl", *words)
        said = train(world, tmp_path / "other", *own, *talks, status=2)
        assert "chat.template: the tokenizer has none of its own" in said
        assert f"column {' and '.join(talk)}: has messages" in said


@pytest.fixture(scope="module")
def scored(world: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run without interruption, and what it said."""
    folder = tmp_path_factory.mktemp("scored") / "run"
    return folder, train(world, folder, *flags(data))


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit(
    world: Path, data: Path, scored: tuple[Path, str], tmp_path: Path
) -> None:
    straight, said = scored
    train(world, tmp_path, *flags(data), "--training.steps", 4)
    train(world, tmp_path, *flags(data))
    assert curve(straight, *LOGGED) == curve(tmp_path, *LOGGED)
    assert weights(straight) == weights(tmp_path)
    held_out = [row for row in rows(straight) if "val_loss" in row]
    assert [row["step"] for row in held_out] == [0, 4, 8]
    assert held_out[-1]["val_score_accuracy"] > 0.9 and held_out[-1]["val_score_margin"] > 0.3
    assert "AutoModelForSequenceClassification" in said and "lacuna generate" not in said


def test_transformers_finds_the_same_scores(data: Path, scored: tuple[Path, str]) -> None:
    folder = scored[0] / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    pairs = [json.loads(line) for line in (data / "held_out.jsonl").read_text().splitlines()]
    means = []
    for answer in ("chosen", "rejected"):
        texts = [pair["prompt"] + pair[answer] + tokenizer.eos_token for pair in pairs]
        with torch.no_grad():
            means.append(model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.mean())
    [last] = [row for row in rows(scored[0]) if "val_loss" in row and row["step"] == 8]
    wanted = (last["val_score_chosen"], last["val_score_rejected"])
    assert [one.item() for one in means] == pytest.approx(wanted, abs=1e-5)


LAYOUTS = {
    "shards": ("--cpus", 2, "--training.batch_size", 1),
    "replicas": (
        *("--cpus", 2, "--training.batch_size", 1),
        *("--parallelism.data_parallel_replicate_degree", 2),
        *("--parallelism.data_parallel_shard_degree", 1),
    ),
    "accumulated": ("--training.batch_size", 1, "--training.gradient_accumulation_steps", 2),
    "unpacked": ("--training.batch_size", 1, "--cpus", 2),
    **{name: SHARED_LAYOUTS[name] for name in ("tp 2", "cp 2, ring", "cp 2 × tp 2")},
    "pp 2": (
        *("--cpus", 2, "--parallelism.pipeline_parallel_degree", 2),
        *("--training.batch_size", 1, "--training.gradient_accumulation_steps", 2),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("shards", "tp 2") else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_every_layout_trains_as_one_process_does(
    name: str, world: Path, data: Path, tmp_path: Path
) -> None:
    # Scores begin at 0: what rounding makes of the first gradients, AdamW would scale up.
    more: tuple[object, ...] = ("--optimizer.eps", 1e-3)
    if name == "unpacked":
        more += ("--packing.mode", "none")
    train(world, tmp_path / "alone", *flags(data, *more))
    train(world, tmp_path / "run", *flags(data, *LAYOUTS[name], *more))
    wanted = curve(tmp_path / "alone", *LOGGED)
    for row, other in zip(curve(tmp_path / "run", *LOGGED), wanted, strict=True):
        assert row == pytest.approx(other, rel=2e-4, abs=1e-5)


def test_experts_over_ranks_learn_to_score_as_those_of_one_process(tmp_path: Path) -> None:
    model = write_weights(tmp_path, tiny_config("qwen3_moe"), seed=1)
    spread = Case(Layout(dp_shard=2, ep=2), parallelism={"expert_parallel_degree": 2})
    alone, other = steps_of(model, [(Case(), Task("reward")), (spread, Task("reward"))])
    assert len({loss for loss, _ in alone}) == STEPS, "nothing is learnt"
    for found, wanted in zip(other, alone, strict=True):
        assert found == pytest.approx(wanted, rel=4e-6)


def test_a_causal_model_begins_with_scores_of_0_and_one_that_scores_with_its_own(
    world: Path, data: Path, scored: tuple[Path, str], tmp_path: Path
) -> None:
    train(world, tmp_path / "base", "--training.steps", 2)
    anew = flags(data, "--model.name_or_path", tmp_path / "base" / "hf", "--training.steps", 1)
    train(world, tmp_path / "anew", *anew, "--model.config", "none")
    [(_, loss, norm)] = curve(tmp_path / "anew")
    assert loss == pytest.approx(math.log(2)) and norm > 0
    further = flags(data, "--model.name_or_path", scored[0] / "hf", "--training.steps", 1)
    train(world, tmp_path / "further", *further, "--model.config", "none")
    [first] = [row for row in rows(tmp_path / "further") if row["step"] == 0]
    [last] = [row for row in rows(scored[0]) if "val_loss" in row and row["step"] == 8]
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def base(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model with weights, whose tokenizer has its chat template."""
    folder = tmp_path_factory.mktemp("base")
    train(world, folder, "--training.steps", 2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "hf")
    return folder / "hf"


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["none", "nf4"])
def test_adapters_learn_beside_the_layer_that_scores(
    bits: str, world: Path, data: Path, base: Path, tmp_path: Path
) -> None:
    beside = ("--model.config", "none", "--model.name_or_path", base, "--model.new_tokens", "none")
    learning = ("--lora.rank", 4, "--lora.modules", "score", "--optimizer.lr", 0.01)
    own = flags(data, *beside, *learning, "--quantization.base", bits, "--chat.template", "none")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    said = train(world, straight, *own)
    train(world, resumed, *own, "--training.steps", 4)
    train(world, resumed, *own)
    assert curve(straight, *LOGGED) == curve(resumed, *LOGGED)
    assert weights(straight) == weights(resumed)
    assert "lacuna convert" not in said
    train(world, tmp_path / "shards", *own, *LAYOUTS["shards"])
    pairs = zip(curve(straight, *LOGGED), curve(tmp_path / "shards", *LOGGED), strict=True)
    for row, other in pairs:
        assert row == pytest.approx(other, rel=2e-4, abs=1e-5)
    [last] = [row for row in rows(straight) if "val_loss" in row and row["step"] == 8]
    assert last["val_score_margin"] > 0.1
    adapter = straight / "hf" / "adapter"
    assert "lora.modules: 'score' matches no module" in refused(
        "generate", adapter, "--prompt", "the"
    )
    if bits == "none":
        ids = torch.tensor([[5, 6, 7, 8]])
        merged = AutoModelForSequenceClassification.from_pretrained(straight / "hf", num_labels=1)
        whole = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        beside_base = PeftModel.from_pretrained(whole, adapter)
        with torch.no_grad():
            assert merged(ids).logits.item() == pytest.approx(
                beside_base(ids).logits.item(), abs=1e-5
            )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma2", "qwen3_moe"])
def test_transformers_own_classes_score_as_lacuna_does(kind: str, tmp_path: Path) -> None:
    # `build_model` refuses a class whose scores are not those that it reads.
    random_model(tiny_config(kind), "eager").save_pretrained(tmp_path)
    settings = {"model": {"name_or_path": str(tmp_path)}, "training": {"seq_len": 16}}
    config = Config(job={"task": "reward"}, **settings)
    with one_rank():
        built = build_model(config, tokenizer_of_words(), mesh_of(Layout()), CPU)
    assert built.head.chunked and type(built.model).__name__.endswith("ForSequenceClassification")
    assert built.model.score.weight.shape[0] == 1 and built.model.score.weight.requires_grad


def test_a_model_without_a_classifier_is_refused(tmp_path: Path) -> None:
    tiny_config("cohere").save_pretrained(tmp_path)
    settings = {"model": {"config": str(tmp_path)}, "training": {"seq_len": 16}}
    config = Config(job={"task": "reward"}, **settings)
    with one_rank(), pytest.raises(UserError, match="no sequence classifier.*'cohere'"):
        build_model(config, tokenizer_of_words(), mesh_of(Layout()), CPU)


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"lora": {"rank": 4}}, "lora.modules"),
        ({"model": {"train_new_tokens_only": True}}, "model.train_new_tokens_only"),
        ({"validation": {"prompts": ("The",)}}, "validation.prompts"),
        ({"preference": {"beta": 0.5}}, "preference.beta"),
    ],
)
def test_what_a_model_that_scores_cannot_have_is_refused(sections: dict, setting: str) -> None:
    found = contradictions_of(Config(job={"task": "reward"}, **sections))
    assert any(one.startswith(f"{setting}, job.task") for one in found), found


def test_a_model_that_scores_makes_no_text(world: Path, scored: tuple[Path, str]) -> None:
    for place in (scored[0], scored[0] / "checkpoint" / "step-8"):
        assert "is a model that scores" in refused("generate", place, "--prompt", "the")
    said = refused("convert", scored[0] / "checkpoint" / "step-8", world / "no", "--to", "hf")
    assert "is a model that scores" in said


def test_an_objective_that_inherits_needs_a_model_that_scores() -> None:
    objective = Reward()
    objective.check(Config(), tokenizer_of_words())
    with one_rank(), pytest.raises(UserError, match="made for reward alone"):
        objective.prepare(policy_of(random_model(tiny_config("llama"))), lambda: [])


def test_the_memory_of_a_run_is_planned(world: Path, data: Path, tmp_path: Path) -> None:
    said = lacuna("plan", world / "run.toml", "--job.dump_folder", tmp_path, *flags(data))
    assert "GiB" in said or "MiB" in said
