"""A GGUF file is a model to start from: read once, and refused where it is not understood."""

import multiprocessing
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoConfig, AutoTokenizer

from gguf_models import python_source, tiny_gguf_model, tokenizer_like
from lacuna.config import UserError
from lacuna.data.unpacked import hf_folder
from lacuna.formats.gguf import export_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is only read."""
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    export_gguf(*tiny_gguf_model("smollm"), str(path), "F16")
    return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    return tmp_path


def rewritten(
    file: str,
    target: Path,
    leave_out: str = "",
    turn: str = "",
    endianess: Any = gguf.GGUFEndian.LITTLE,
    **changes: Any,
) -> str:
    """A copy of a GGUF file: other fields, a tensor gone or its shape turned, another endianess."""
    reader = gguf.GGUFReader(file)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    values = {key: field.contents() for key, field in fields.items()} | changes
    writer = gguf.GGUFWriter(target, values.pop("general.architecture"), endianess=endianess)
    for key, value in values.items():
        kind = fields[key].types[0] if key not in changes else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        if tensor.name != leave_out:
            data = (
                tensor.data.reshape(tensor.data.shape[::-1]) if tensor.name == turn else tensor.data
            )
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(target)


def test_a_file_is_read_once_whoever_asks_and_anew_when_it_is_another(
    file: str, cache: Path
) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        [folder] = set(pool.map(hf_folder, [file] * 3))
    assert Path(folder).is_relative_to(cache)
    written = {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
    assert hf_folder(file) == folder
    assert {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()} == written
    os.utime(file, ns=(1, 1))
    assert hf_folder(file) != folder


def test_what_is_no_gguf_file_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert [hf_folder(name) for name in ("a/hub-id", str(folder))] == ["a/hub-id", str(folder)]


def test_half_a_folder_is_made_again(file: str, cache: Path) -> None:
    name = Path(hf_folder(file)).name
    (cache / "lacuna" / name).rename(cache / "lacuna" / f"new-{name}")
    (cache / "lacuna" / f"new-{name}" / "config.json").write_text("half")
    assert AutoConfig.from_pretrained(hf_folder(file)).num_hidden_layers == 2
    assert [path.name for path in (cache / "lacuna").iterdir() if path.is_dir()] == [name]


def test_a_tokenizer_of_smollm_parts_figures(file: str) -> None:
    read, texts = AutoTokenizer.from_pretrained(hf_folder(file)), python_source(5)
    assert len(read("1234").input_ids) == 4
    assert read(texts).input_ids == tokenizer_like("smollm")(texts).input_ids
    assert read.decode(read(texts[0]).input_ids) == texts[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "mamba"}, "it is a mamba model; known are qwen2"),
        ({"tokenizer.ggml.model": "t5"}, "it has a t5 tokenizer; known are gpt2 and llama"),
        (
            {"tokenizer.ggml.pre": "chameleon"},
            "it has the pre-tokenizer chameleon; known are gpt-2, smollm",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "it scales positions .yarn."),
        ({"llama.rope.scaling.factor": 2.0}, "it scales positions .linear."),
        ({"llama.attention.head_count": 0}, "integer division or modulo by zero"),
        ({"llama.attention.head_count_kv": [2, 2]}, ".*num_key_value_heads"),
        ({"tokenizer.ggml.merges": ["no token"]}, "Error while initializing BPE"),
        (
            {"tokenizer.ggml.add_bos_token": True},
            "texts begin with a token that is not named as bos_token",
        ),
        ({"split.count": 2}, "it is one of several parts"),
        ({"endianess": gguf.GGUFEndian.BIG}, "its numbers are big-endian"),
        (
            {"turn": "blk.0.ffn_up.weight"},
            "its tensors are not those of a llama model: .*blk.0.ffn_up.weight",
        ),
        ({"llama.block_count": 3}, "its tensors are not those of a llama model: .*blk.2"),
        ({"llama.feed_forward_length": 97}, "its tensors are not those of a llama model: .*ffn_"),
        (
            {"leave_out": "output_norm.weight"},
            "its tensors are not those of a llama model: .*output_norm.weight",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    changes: Any, said: str, file: str, tmp_path: Path
) -> None:
    odd = rewritten(file, tmp_path / "odd.gguf", **changes)
    with pytest.raises(UserError, match=rf"odd.gguf: cannot be read as a GGUF model: {said}"):
        hf_folder(odd)
    assert not [
        path for path in tmp_path.rglob("*") if path.name.startswith("odd-") and path.is_dir()
    ]


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"nonsense" * 9])
def test_a_file_that_is_damaged_or_missing_is_refused(
    content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "odd.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"odd.gguf: cannot be read as a GGUF model"):
        hf_folder(str(tmp_path / "odd.gguf"))


def test_half_a_file_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(Path(file).read_bytes()[:-5000])
    with pytest.raises(UserError, match=r"odd.gguf: cannot be read as a GGUF model"):
        hf_folder(str(tmp_path / "odd.gguf"))


def claiming(tensors: int = 0, fields: int = 1, value: bytes = b"") -> bytes:
    """A GGUF file that claims so many tensors and fields; it holds at most one, with this value."""
    name = b"general.architecture"
    field = struct.pack("<Q", len(name)) + name + value if value else b""
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, fields) + field


STRING, ARRAY, BYTES, FLOAT = 8, 9, 0, 6
CLAIMS = {
    "strings": claiming(value=struct.pack("<IIQ", ARRAY, STRING, 2**50)),
    "bytes": claiming(value=struct.pack("<IIQ", ARRAY, BYTES, 2**50)),
    "numbers": claiming(value=struct.pack("<IIQ", ARRAY, FLOAT, 2**63)),
    "arrays": claiming(value=struct.pack("<IIQ", ARRAY, ARRAY, 2**50)),
    "arrays of arrays": claiming(value=struct.pack("<IIQIQ", ARRAY, ARRAY, 2**50, BYTES, 2**50)),
    "a long text": claiming(value=struct.pack("<IQ", STRING, 2**50)),
    "fields": claiming(fields=2**50, value=struct.pack("<IQ5s", STRING, 5, b"llama")),
    "tensors": claiming(tensors=2**50, fields=0),
    "sizes": claiming(1, 0) + struct.pack("<Q1sIQQIQ", 1, b"a", 2, 2**40, 2**20, 0, 0),
    "deep": claiming(value=struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 10_000),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_file_claims_is_bounded_by_its_size(tmp_path: Path, claim: str) -> None:
    (tmp_path / "model.gguf").write_bytes(CLAIMS[claim])
    with pytest.raises(UserError, match="cannot be read as a GGUF model"):
        hf_folder(str(tmp_path / "model.gguf"))


@pytest.mark.timeout(20)
def test_a_file_cannot_claim_more_layers_than_tensors(file: str, tmp_path: Path) -> None:
    many = rewritten(file, tmp_path / "many.gguf", **{"llama.block_count": 2**31 - 1})
    with pytest.raises(UserError, match="it claims 2147483647 layers, and has"):
        hf_folder(many)
