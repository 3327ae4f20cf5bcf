import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from lacuna.config import UserError
from lacuna.model import flash
from lacuna.model.attention import PACKED
from lacuna.model.build import install_fastest_kernels
from lacuna.model.flash import use_flash_attention_4
from lacuna.parallel.mesh import Layout
from tiny import tiny_config

# Stands for the package, by the names and the results of its own: an output and log-sum-exps
# [heads, tokens].
PACKAGE = """
import torch


def documents(query, key, bounds, scale, left):
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        distance = torch.arange(start, stop)[:, None] - torch.arange(start, stop)
        hidden = (distance < 0) | (distance > (left if left is not None else len(query)))
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], key[start:stop]) * scale
        yield slice(start, stop), scores.masked_fill(hidden, -torch.inf)


def _flash_attn_fwd(
    query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
    causal, window_size_left, window_size_right, return_lse,
):
    assert return_lse and max_seqlen_q == max_seqlen_k == 9 and (causal or window_size_right == 0)
    assert window_size_left is None or window_size_left >= 0, "no window is None, not -1"
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1])
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    for part, scores in documents(query, key, cu_seqlens_q, softmax_scale, window_size_left):
        output[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[part])
        lse[:, part] = scores.logsumexp(-1)
    return output, lse, None, None, None


def _flash_attn_bwd(
    query, key, value, output, grad, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, causal, window_size_left, window_size_right, deterministic,
):
    assert max_seqlen_q == max_seqlen_k == 9 and not deterministic
    groups, grads = query.shape[1] // key.shape[1], [torch.empty_like(query) for _ in range(3)]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    for part, scores in documents(query, key, cu_seqlens_q, softmax_scale, window_size_left):
        weights = (scores - lse[:, part, None]).exp()
        inner = torch.einsum("qhd,khd->hqk", grad[part], value[part])
        of_output = (grad[part] * output[part]).sum(-1).T[:, :, None]
        inner = weights * (inner - of_output) * softmax_scale
        grads[0][part] = torch.einsum("hqk,khd->qhd", inner, key[part])
        grads[1][part] = torch.einsum("hqk,qhd->khd", inner, query[part])
        grads[2][part] = torch.einsum("hqk,qhd->khd", weights, grad[part])
    return grads[0], *(tensor.unflatten(1, (-1, groups)).sum(2) for tensor in grads[1:])
"""


ALONE = Layout()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "interface.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    library = use_flash_attention_4("cpu")
    yield
    library._destroy()
    use_flash_attention_4.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def plain(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, window: int | None) -> Tensor:
    document = torch.searchsorted(bounds, torch.arange(len(query)), right=True)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (
        (document[:, None] == document)
        & (distance >= 0)
        & (distance <= (len(query) if window is None else window))
    )
    heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        *heads, seen, scale=0.3, enable_gqa=True
    )
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("package")
def test_varlen_attention_is_computed_by_the_package(window: int | None, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(20, 4, 8, generator=generator, requires_grad=True)
    key, value = torch.randn(2, 20, 2, 8, generator=generator, requires_grad=True).unbind()
    grouped = {"enable_gqa": True} if torch.__version__ > "2.12" else {}
    bounds, sees = (
        torch.tensor([0, 5, 14, 20], dtype=torch.int32),
        (-1 if window is None else window, 0),
    )

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return varlen_attn(
            query, key, value, bounds, bounds, 9, 9, scale=0.3, window_size=sees, **grouped
        )

    found = (torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend)(
        query, key, value
    )
    expected = plain(query, key, value, bounds, window)
    assert torch.allclose(found, expected, atol=1e-6)
    grad = torch.randn(found.shape, generator=generator)
    grads = torch.autograd.grad(found, (query, key, value), grad)
    for one, other in zip(
        grads, torch.autograd.grad(expected, (query, key, value), grad), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_package_without_what_it_needs_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder / "interface.py").write_text("import the_compiler_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"flash-attn-4.*the_compiler_that_is_missing.*uninstall"):
        use_flash_attention_4("cpu")


def test_the_package_is_used_where_it_is_installed_and_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    monkeypatch.setattr(flash, "use_flash_attention_4", lambda: used.append(True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str) -> None:
        folder = tmp_path / f"{name}-4.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 4.0\n")

    def chosen(layout: Layout = ALONE, attention: str = PACKED, **changes: float) -> bool:
        model_config = tiny_config("llama", **changes)
        model_config._attn_implementation = attention
        used.clear()
        said = install_fastest_kernels(model_config, layout, "cuda")
        return "FlashAttention 4" in said and used == [True]

    install("flash_attn")
    assert not chosen(), "FlashAttention 2 has a module of the same name"
    install("flash_attn_4")
    assert chosen() and chosen(Layout(tp=2))
    assert not (chosen(Layout(cp=2)) or chosen(Layout(pp=2)) or chosen(attention="sdpa"))
    assert not chosen(attention_dropout=0.1) and not used
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert not chosen() and not used
