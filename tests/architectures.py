"""Makes the table of architectures: python tests/architectures.py > docs/architectures.md.

It takes an hour on two cores. Every causal language model of the installed transformers, in small
and with random weights, trains three steps here and in a plain loop of transformers' and torch's
own code (adapters: peft's). Losses, gradient norms and the first gradients are compared. A cell is
the largest relative difference, or why lacuna refuses the combination when it reads the
configuration. If kinds of models are named behind the command, it prints the rows of these alone.
"""

import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from every_model import INCOMPLETE, configuration_class, model_types, small_config
from lacuna.config import Config, UserError
from lacuna.config.adapters import LoraConfig
from lacuna.config.documents import PackingConfig
from lacuna.config.optimizers import OptimizerConfig
from lacuna.formats.adapter import export_adapter, misread_by_peft
from lacuna.formats.huggingface import export_model
from lacuna.model.build import BuiltModel, build_model
from lacuna.objective.language_modelling import LanguageModelling
from lacuna.parallel.mesh import Layout, build_mesh
from lacuna.train.optimizer import build_optimizer, update
from lacuna.train.step import accumulate_gradients, total_counts
from layouts import LENGTH, SEQUENCES, Case, configuration, micro_batch, own_batches, pipelined
from tiny import CPU, relative_error, run_ranks, tokenizer_of_words, whole

STEPS = 3
OPTIMIZER = OptimizerConfig(lr=0.01, eps=1e-2, weight_decay=0.0)
ADAPTER = LoraConfig(rank=2, alpha=4.0)
EXACT = 1e-5
RING = {"context_parallel_rotate_method": "alltoall"}
SHARED = {
    "FSDP 2": Case(Layout(dp_shard=2), 2),
    "TP 2": Case(Layout(tp=2), 2),
    "CP 2": Case(Layout(cp=2, ring=True), 2, parallelism=RING),
    "PP 2": pipelined(Layout(pp=2), 4),
}
ROUNDING = "rounding"
ALONE = (ROUNDING, "one document a row", "packed", "LoRA", "exported")
COLUMNS = (*ALONE, *SHARED)
Curve = list[tuple[float, float]]
Outcome = tuple[Curve, dict[str, Tensor]]


def settings(folder: str, case: Case, packed: bool) -> Config:
    config = configuration(Path(folder), case)
    mode = "auto" if packed else "none"
    return config.model_copy(update={"optimizer": OPTIMIZER, "packing": PackingConfig(mode=mode)})


def own_steps(model: nn.Module, packed: bool) -> Outcome:
    """Trains a plain loop, document by document.

    Returns loss and gradient norm of each step, and the gradients of the first.
    """
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    optimizer = torch.optim.AdamW(
        trained.values(), OPTIMIZER.lr, betas, OPTIMIZER.eps, weight_decay=0.0
    )
    curve: Curve = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        batch = micro_batch(slice(0, SEQUENCES), seed=step, packed=packed)
        ids, labels = batch.columns["input_ids"].flatten(), batch.columns["labels"].flatten()
        total = torch.zeros(())
        for start, stop in zip(
            batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
        ):
            logits = model(input_ids=ids[None, start:stop], use_cache=False).logits[0]
            total = total + F.cross_entropy(
                logits.float(), labels[start:stop], ignore_index=-100, reduction="sum"
            )
        loss = total / batch.counts["trained_tokens"]
        optimizer.zero_grad()
        loss.backward()
        if not first:
            first = {
                name: one.grad.clone() for name, one in trained.items() if one.grad is not None
            }
        norm = nn.utils.clip_grad_norm_(trained.values(), Case().max_norm)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve, first


def our_steps(built: BuiltModel, case: Case, packed: bool) -> Outcome:
    """Returns the same, trained by lacuna's own parts."""
    optimizer = build_optimizer(built.model, OPTIMIZER)
    curve: Curve = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        batches = own_batches(case, built.mesh, seed=step, packed=packed)
        trained = total_counts(built, batches)["trained_tokens"]
        loss = accumulate_gradients(built, batches, LanguageModelling.loss, trained)[0]
        dist.all_reduce(loss)
        if not first:
            named = built.model.named_parameters()
            first = {name: whole(one.grad).clone() for name, one in named if one.grad is not None}
        norm, _ = update(built, optimizer, trained)
        curve.append((loss.item() / trained.item(), norm.item()))
    return curve, first


def reference(folder: str) -> nn.Module:
    """Returns transformers' own model in training mode.

    One that draws at random there, even without dropout, is in evaluation mode.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    ids = micro_batch(slice(0, 1)).columns["input_ids"]
    with torch.no_grad():
        first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    return model.train(torch.equal(first, second))


def build(folder: str, case: Case, packed: bool) -> BuiltModel:
    mesh = build_mesh(case.layout, "cpu")
    built = build_model(settings(folder, case, packed), tokenizer_of_words(), mesh, CPU)
    built.model.train(reference(folder).training)
    return built


def train(folder: str, case: Case, packed: bool) -> Outcome:
    return our_steps(build(folder, case, packed), case, packed)


def adapt(folder: str, packed: bool) -> str:
    """Adapters beside the same ones by peft, and the folder that both began from."""
    built = build(folder, Case(lora=ADAPTER), packed)
    start = os.path.join(folder, "adapter")
    export_adapter(built.model, tokenizer_of_words(), ADAPTER, folder, start)
    trained = [name for name, weight in built.model.named_parameters() if weight.requires_grad]
    if misread_by_peft(trained, built.model):
        raise UserError("hf/adapter: peft, the reference, does not find some tensors, as runs say.")
    ours, _ = our_steps(built, Case(), packed)
    base = reference(folder)
    theirs, _ = own_steps(
        PeftModel.from_pretrained(base, start, is_trainable=True).train(base.training), packed
    )
    return shown(curve_difference(ours, theirs))


def export(folder: str, packed: bool) -> str:
    """What transformers opens of a trained model, beside the model itself."""
    built = build(folder, Case(), packed)
    our_steps(built, Case(), packed)
    target = os.path.join(folder, "hf")
    export_model(built.model, tokenizer_of_words(), target, torch.float32, folder)
    opened = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trained.load_state_dict(built.model.state_dict())
    ids = micro_batch(slice(0, 1)).columns["input_ids"]
    with torch.no_grad():
        logits = [model(input_ids=ids, use_cache=False).logits for model in (opened, trained)]
    return shown(relative_error({"logits": logits[0]}, {"logits": logits[1]}))


def cell(measure: Callable[[], str]) -> str:
    """What was measured, or the refusal, or that neither was to be had."""
    try:
        return measure()
    except UserError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"FAILS: {type(error).__name__} {' '.join(str(error).split())[:150]}"


def alone(folder: str) -> dict[str, str]:
    """The cells of one process."""
    references = {packed: own_steps(reference(folder), packed) for packed in (False, True)}
    fresh = reference(folder)
    moved = [compared(own_steps(nudged(fresh), packed=False), references[False]) for _ in range(3)]
    cells = {ROUNDING: max(moved, key=float)} | {
        name: cell(
            lambda packed=packed: compared(train(folder, Case(), packed), references[packed])
        )
        for name, packed in (("one document a row", False), ("packed", True))
    }
    torch.save(references, os.path.join(folder, "references"))
    packed = is_exact(cells["packed"])
    cells["LoRA"] = cell(lambda: adapt(folder, packed))
    cells["exported"] = cell(lambda: export(folder, packed))
    return cells


def shared(folder: str, packed: bool) -> dict[str, str]:
    """The cells of two processes."""
    expected = torch.load(os.path.join(folder, "references"))[packed]
    return {
        name: cell(
            lambda case=case: compared(train(folder, case, packed), expected, case.layout.pp > 1)
        )
        for name, case in SHARED.items()
    }


def compared(ours: Outcome, theirs: Outcome, parted: bool = False) -> str:
    """The largest difference; where layers are `parted` a rank has some of the gradients."""
    gradients, expected = ours[1], theirs[1]
    if parted:
        expected = {name: one for name, one in expected.items() if name in gradients}
        gradients = {name: one for name, one in gradients.items() if name in expected}
    return shown(max(curve_difference(ours[0], theirs[0]), relative_error(gradients, expected)))


def curve_difference(ours: Curve, theirs: Curve) -> float:
    """The largest relative difference of losses and norms."""
    pairs = zip(
        (number for row in ours for number in row),
        (number for row in theirs for number in row),
        strict=True,
    )
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def shown(difference: float) -> str:
    return f"{difference:.0e}"


def nudged(model: nn.Module) -> nn.Module:
    """A copy whose weights are another by their last bit: what is another then is rounding."""
    copy = deepcopy(model)
    with torch.no_grad():
        for weight in copy.parameters():
            weight.mul_(
                1 + (torch.randint_like(weight, 0, 2) * 2 - 1) * torch.finfo(torch.float32).eps
            )
    return copy


def is_exact(text: str) -> bool:
    """Whether a cell is a difference of 1e-5 at most."""
    return re.fullmatch(r"\d+e[+-]\d+", text) is not None and float(text) <= EXACT


def row(kind: str) -> dict[str, str]:
    """The cells of a kind of model."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        try:
            model = AutoModelForCausalLM.from_config(
                small_config(configuration_class(kind)), dtype=torch.float32
            )
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.05)
            model.save_pretrained(folder)
            [cells] = run_ranks(1, alone, folder)
        except Exception as error:
            said = " ".join(str(error).strip().splitlines()[-1:])[:150]
            return {name: f"transformers: {said}" for name in COLUMNS}
        ranks = run_ranks(2, shared, folder, is_exact(cells["packed"]))
        for name in SHARED:
            results = [each[name] for each in ranks]
            wrong = [one for one in results if not is_exact(one)]
            cells[name] = wrong[0] if wrong else max(results, key=float)
        return cells


def rows(kinds: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row as it is done; each takes two cores at most."""
    at_once = max(len(os.sched_getaffinity(0)) // 2, 1)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        at_once, fresh, initializer=transformers.logging.set_verbosity_error
    ) as pool:
        for kind, cells in zip(kinds, pool.map(row, kinds), strict=True):
            print(
                kind,
                *(cells[name][:160] for name in COLUMNS),
                sep=" | ",
                file=sys.stderr,
                flush=True,
            )
            yield kind, cells


def generalised(refusal: str) -> str:
    """A refusal without what is one model's own: names of classes, numbers, what differed."""
    text = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", refusal)
    text = re.sub(r"'/[^']+' is a '[\w-]+' model", "it is a model", text)
    text = re.sub(r"'[\w-]+' models", "these models", text)
    return re.sub(
        r"\b\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration|GenerationDecoder|ModelWithLMHead)\b",
        "the model",
        text,
    )


def main(kinds: list[str]) -> None:
    table = dict(rows(kinds or model_types()))
    if kinds:
        for kind, cells in table.items():
            print(kind, *(f"{name}: {text}" for name, text in cells.items()), sep="\n  ")
        return
    print_table(table)


def print_table(table: dict[str, dict[str, str]]) -> None:
    refusals: list[str] = []

    def short(text: str) -> str:
        if text.startswith("FAILS") or re.fullmatch(r"\d+e[+-]\d+", text):
            return text
        reason = generalised(text)
        if reason not in refusals:
            refusals.append(reason)
        return f"({refusals.index(reason) + 1})"

    lines = []
    for kind, cells in table.items():
        texts = [cells[ROUNDING], *(short(cells[name]) for name in COLUMNS[1:])]
        lines.append(f"| {kind} | " + " | ".join(texts) + " |")
    measured = [cells for cells in table.values() if not cells[ROUNDING].startswith("transformers")]
    counts = [f"{name} {sum(is_exact(cells[name]) for cells in measured)}" for name in COLUMNS[1:]]
    print("# Every causal language model of transformers\n")
    libraries = (
        f"transformers {version('transformers')}, torch {version('torch').partition('+')[0]}"
    )
    print(
        f"{libraries}, float32 on CPUs. Each model is tiny, made of its own configuration class, "
        f"with random weights. It trains {STEPS} steps of {SEQUENCES} rows of {LENGTH} tokens, "
        "beyond every window. BigBird has full attention, and MiniMax-M3 no layers that choose "
        "blocks: these are refused in packed rows, BigBird's blocks everywhere. Beside it, a plain "
        "loop of transformers' own model and torch's AdamW (with LoRA: peft's) trains on the same "
        "documents one by one.\n"
    )
    print(
        "A cell is the largest relative difference of losses, gradient norms and the first step's "
        "gradients; for the exported model, of its logits. A number in brackets is the reason, "
        "below, for which lacuna refuses the combination when it reads the configuration "
        "(`transformers:` where transformers' own loop fails on the small model). "
        f"`{ROUNDING}` is by how much transformers' own loop moves when the last bit of each "
        "weight is changed. A model that draws at random in training even without dropout "
        "(PhiMoE's router) is compared with that off. On two ranks rows are packed where they can "
        "be.\n"
    )
    print("Made by `python tests/architectures.py > docs/architectures.md`.\n")
    print(f"Of {len(table)} models exact: {', '.join(counts)}.\n")
    print("| model | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
    print(*lines, sep="\n")
    print("\nRefused:\n")
    for number, refusal in enumerate(refusals, 1):
        print(f"{number}. {refusal}")
    print("\nNot in the table:\n")
    for kind, reason in INCOMPLETE.items():
        print(f"- {kind}: {reason}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the code of some models goes to a GPU by itself
    main(sys.argv[1:])
