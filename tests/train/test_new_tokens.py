"""`train_new_tokens_only` moves only new rows of the vocabulary, in any layout and on a resume."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lacuna.config import Config
from lacuna.config.optimizers import OptimizerConfig
from lacuna.config.sections import ModelConfig, TrainingConfig
from lacuna.data import Batch, run_tokenizer
from lacuna.model.build import build_model
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.step import accumulate_gradients, total_counts
from layouts import LENGTH, Case, own_batches, pipelined
from runs import lacuna, together, train, weights, write_model
from tiny import CPU, random_model, run_ranks, tiny_config, tokenizer_of_words, whole

pytestmark = pytest.mark.slow  # whole runs of the command line

ARCHITECTURES = ("llama", "llama_tied")
NEW, IDS = ("<think>", "w9"), [97, 9]  # one that the tokenizer lacks, and one that it has
CASES = {
    "alone": Case(),
    "dp_shard 2": Case(Layout(dp_shard=2)),
    "dp_replicate 2": Case(Layout(dp_replicate=2), 2),
    "tp 2": Case(Layout(tp=2)),
    "pp 2": pipelined(Layout(pp=2), 4),
}


def thinking(batch: Batch) -> Batch:
    """The batch with the two tokens in place of a good part of the others."""

    def thought(ids: Tensor) -> Tensor:
        return ids.where((ids < 20) | (ids > 49), 9).where((ids < 50) | (ids > 79), 97)

    columns = {name: thought(batch.columns[name]) for name in ("input_ids", "labels")}
    return replace(batch, columns=batch.columns | columns)


def trained(
    case: Case, folder: Path, implementation: str
) -> tuple[dict[str, Tensor], list[float], float]:
    """Weights after two steps, the gradients' norms, and the first norm of trained rows alone."""
    config = Config(
        model=ModelConfig(name_or_path=str(folder), new_tokens=NEW, train_new_tokens_only=True),
        training=TrainingConfig(seq_len=LENGTH, max_norm=0.5),
        optimizer=OptimizerConfig(lr=0.1, weight_decay=0.3, implementation=implementation),
        parallelism=case.parallelism,
    )
    mesh = build_mesh(case.layout, "cpu")
    built = build_model(config, run_tokenizer(config.model, config.conversations), mesh, CPU)
    optimizer = build_optimizer(built.model, config.optimizer, decay_head=False)
    norms, square = [], 0.0
    for step in range(2):
        batches = [thinking(batch) for batch in own_batches(case, mesh)]
        trained = total_counts(built, batches)["trained_tokens"]
        accumulate_gradients(built, batches, LanguageModelling.loss, trained)
        for name, weight in built.model.named_parameters():
            gradient = whole(weight.grad).double()
            ends = "embed_tokens" in name or "lm_head" in name
            square += float(gradient[IDS if ends else ...].square().sum()) if step == 0 else 0.0
        norm, _ = update(built, optimizer, trained)
        norms.append(norm.item())
    return (
        {name: whole(weight).detach() for name, weight in built.model.named_parameters()},
        norms,
        square**0.5,
    )


def check_moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Of the vocabulary only the rows of the new tokens have moved, and everything else has."""
    for key, weight in after.items():
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            grown = torch.cat([before[key], before[key].double().mean(0, keepdim=True).float()])
            assert (weight != grown).any(1).nonzero().flatten().tolist() == sorted(IDS), key
        else:
            assert not torch.equal(weight, before[key]), key


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_old_rows_stay_to_the_bit_and_all_else_is_trained(
    name: str, architecture: str, tmp_path: Path
) -> None:
    case = CASES[name]
    model = random_model(tiny_config(architecture))
    model.save_pretrained(tmp_path)
    tokenizer_of_words().save_pretrained(tmp_path)
    before = dict(model.named_parameters())
    alone, norms, norm = run_ranks(1, trained, CASES["alone"], tmp_path, "foreach")[0]
    check_moved(before, alone)
    assert norms[0] == pytest.approx(norm, rel=1e-6), "nothing else counts"
    for after, also, _ in run_ranks(
        case.layout.data_parallel * case.layout.sharing, trained, case, tmp_path, "fused"
    ):
        check_moved(before, after)
        assert also == pytest.approx(norms, rel=1e-5)


def test_a_run_goes_on_exactly_and_its_export_opens_in_transformers(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    old = LlamaForCausalLM(LlamaConfig.from_pretrained(source))
    old.save_pretrained(source)
    (tmp_path / "train.jsonl").write_text(
        '{"text": "the cat<think>on the mat</think>sat there"}\n' * 40
    )
    (tmp_path / "run.toml").write_text(f"""
[model]
name_or_path = "{source}"
new_tokens = ["<think>", "</think>"]
train_new_tokens_only = true
[data]
dataset = "{tmp_path}/train.jsonl"
num_workers = 0
[training]
batch_size = 2
seq_len = 32
[lr_scheduler]
decay_type = "constant"
[checkpoint]
interval = 2
export_dtype = "float32"
[metrics]
enable_tensorboard = false
""")
    multiple, straight, resumed = (
        "--model.vocabulary_multiple",
        tmp_path / "straight",
        tmp_path / "resumed",
    )
    *_, plain, padded = together(
        lambda: train(tmp_path, straight, "--cpus", 2, "--training.steps", 4, multiple, 8),
        lambda: train(tmp_path, resumed, "--cpus", 2, "--training.steps", 2, multiple, 8),
        lambda: lacuna("plan", tmp_path / "run.toml"),
        lambda: lacuna("plan", tmp_path / "run.toml", multiple, 64),
    )
    going_on, refused = together(
        lambda: train(tmp_path, resumed, "--cpus", 2, "--training.steps", 4, multiple, 8),
        lambda: train(
            tmp_path,
            straight,
            "--training.steps",
            6,
            multiple,
            8,
            "--model.new_tokens",
            "<a>",
            status=2,
        ),
    )
    assert "resuming after step 2" in going_on and weights(resumed) == weights(straight)
    assert "model.new_tokens (was ('<think>', '</think>'), is ('<a>',)) changed" in refused.replace(
        "\n", ""
    )

    tokenizer, model = (
        kind.from_pretrained(straight / "hf") for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    assert tokenizer("a<think>b</think>").input_ids[1::2] == [257, 258]
    assert tokenizer.decode([257, 32, 258], skip_special_tokens=True) == tokenizer.decode([32])
    assert model.config.vocab_size == 264
    for now, end in (
        (model.model.embed_tokens.weight, old.model.embed_tokens),
        (model.lm_head.weight, old.lm_head),
    ):
        assert torch.equal(now[:257], end.weight)
        mean = end.weight.double().mean(0).float()
        assert [torch.equal(row, mean) for row in now[257:]] == [False, False, *[True] * 5]

    shown = [
        int(text.partition(" parameters")[0].split()[-1].replace(",", ""))
        for text in (plain, padded)
    ]
    assert shown == [old.num_parameters() + 2 * 64 * new for new in (2, 320 - 257)]
