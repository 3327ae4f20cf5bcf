"""The Triton kernels of softpick compute what plain torch does, interpreted on a CPU."""

# ruff: noqa: E402

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

# The variable must be there before anything imports Triton.
if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs triton and TRITON_INTERPRET=1", allow_module_level=True)

import fla_on_cpu

fla_on_cpu.interpret()

from lacuna.model import softpick, softpick_kernels
from lacuna.model.own_attention import register
from lacuna.parallel.context import causal_parts
from lacuna.parallel.partial_attention import Part
from tiny import relative_error

KINDS = ("softpick", "rectified")
TOKENS = 70
WHOLE = torch.tensor([0, 70, 140], dtype=torch.int32)
DOCUMENTS = torch.tensor([0, 9, 24, 70, 71, 140, 140], dtype=torch.int32)
SCALING = 0.25
Case = tuple[Part, int, int | None]
TABLES = (softpick_kernels.FORWARD, softpick_kernels.OF_KEYS, softpick_kernels.OF_QUERIES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a short row has several of, of unequal sides."""
    for table in TABLES:
        for width in table:
            monkeypatch.setitem(table, width, (32, 16, 4, 1))


def parts() -> dict[str, Case]:
    """Parts of two rows, the number of queries of each, and a window."""
    documents = Part(DOCUMENTS, DOCUMENTS, TOKENS, TOKENS)
    cases: dict[str, Case] = {
        "whole rows": (Part(WHOLE, WHOLE, TOKENS, TOKENS, whole=True), TOKENS, None),
        "documents": (documents, TOKENS, None),
        "documents in a window": (documents, TOKENS, 20),
    }
    bounds = torch.tensor([0, 9, 24, 80, 83, 160, 160], dtype=torch.int32)
    for number, part in enumerate(causal_parts(bounds, 80, 2, 0, 77)):
        cases[f"chunk {number} of a rank"] = (part, 20, None)
        cases[f"chunk {number} of a rank in a window"] = (part, 20, 7)
    unseeing = (torch.tensor(each, dtype=torch.int32) for each in ([0, 4, 8, 16], [0, 0, 8, 16]))
    cases["queries without keys"] = (Part(*unseeing, 16, 8, causal=False), 8, None)
    return cases


CASES = parts()


def both(
    kind: str, case: Case, width: int, values: int, dtype: torch.dtype, heads: int = 4
) -> tuple[list[Tensor], list[Tensor]]:
    """Output, logarithms and gradients by the kernels, and by plain torch."""
    part, queries, window = case
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (2, queries, heads, width),
        (2, part.stop, 2, width),
        (2, part.stop, 2, values),
        (2, queries, heads, values),
    )
    drawn = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    query, key, value, grad = drawn
    seen = (part, SCALING, window)
    known = _compute_by(False, kind, query, key, value, *seen)
    computed = _compute_by(True, kind, query, key, value, *seen)
    # Gradients are of the same outputs, whose rounding tiny denominators would magnify.
    given = (grad, known[0].to(dtype), known[1], query, key, value)
    ours, plain = (_differentiate_by(kernels, kind, *given, *seen) for kernels in (True, False))
    return [*computed, *ours], [*known, *plain]


def _compute_by(kernels: bool, *given: Any) -> tuple[Tensor, Tensor]:
    with mock.patch.object(softpick, "_takes_kernel", lambda *_: kernels):
        return softpick._compute(*given)


def _differentiate_by(kernels: bool, *given: Any) -> tuple[Tensor, ...]:
    with mock.patch.object(softpick, "_takes_kernel", lambda *_: kernels):
        return softpick._differentiate(*given)


def check(results: tuple[list[Tensor], list[Tensor]], tolerance: float) -> None:
    for ours, plain in zip(*results, strict=True):
        known = plain != -torch.inf
        assert torch.equal(known, ours != -torch.inf), "the same queries see no key"
        if plain[known].any():
            assert relative_error({"": ours[known]}, {"": plain[known]}) < tolerance
        else:
            assert not ours[known].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_plain_torch(kind: str, case: str) -> None:
    check(both(kind, CASES[case], 16, 16, torch.float32), 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "values"), [(24, 8), (64, 64), (80, 80), (16, 32)])
def test_heads_have_any_width(kind: str, width: int, values: int) -> None:
    check(both(kind, CASES["documents in a window"], width, values, torch.float32, 2), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("width", [128, 256])
def test_heads_may_be_wide(width: int) -> None:
    check(both("softpick", CASES["documents"], width, width, torch.float32, 2), 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_differs_by_its_rounding(kind: str) -> None:
    check(both(kind, CASES["documents"], 16, 16, torch.float16), 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_no_score_makes_a_number_that_is_none(kind: str) -> None:
    """Scores of the first row are all negative, those of the second far beyond 88."""
    own = register(kind)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, TOKENS, 2, 16, generator=generator).unbind()
    query[0], key[0] = query[0].abs() + 1, -key[0].abs() - 1
    query[1], key[1] = query[1] * 50, key[1] * 50
    leaves = [one.requires_grad_() for one in (query, key, value)]
    called = []
    with pytest.MonkeyPatch.context() as patch:
        attend = softpick_kernels.attend
        spy = lambda *given: called.append(1) or attend(*given)  # noqa: E731
        patch.setattr(softpick_kernels, "attend", spy)
        output = own.function(*leaves, CASES["documents"][0], SCALING, None)
    assert called, "the kernels have computed it"
    grads = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert all(one.isfinite().all() for one in (output, *grads))
    assert not output[0].any() and output[1].any()
    assert not any(one[0].any() for one in grads)


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "compiled_kernels.py"
    told = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    told["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, script], env=told, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    products = {name: int(count) for name, count in map(str.split, done.stdout.splitlines())}
    assert {"forward_kernel", "keys_kernel", "queries_kernel"} <= products.keys()
    assert min(products[name] for name in ("forward_kernel", "keys_kernel")) > 0
