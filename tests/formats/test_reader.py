"""Opening a checkpoint runs nothing that is in it, by whatever command it is opened."""

import json
import os
import pickle
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as kinds

from lacuna.config import logger
from lacuna.formats.checkpoint import find_damage
from lacuna.formats.reader import Reader, read_state
from lacuna.parallel.processes import Process
from runs import checkpoint, curve, refused, train, weights

STEP = 8


class Payload:
    """Unpickled by whoever knows no better, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.target}",)


class GetAttribute:
    """Unpickled it is an attribute of something."""

    def __init__(self, *reached: object) -> None:
        self.reached = reached

    def __reduce__(self) -> tuple[Callable, tuple]:
        return getattr, self.reached


def in_metadata(folder: Path, payload: Payload) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = payload
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def as_metadata(folder: Path, payload: Payload) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(payload, protocol=0))


def in_state(folder: Path, payload: Payload) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    torch.save(state | {"more": payload}, folder / "state.pt")


def as_tensors(folder: Path, payload: Payload) -> None:
    """Each tensor is a file within the file, at a place that the metadata tell."""
    torch.save(payload, folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size
    metadata = FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def seal(folder: Path) -> None:
    """Writes the manifest anew: checksums say that nothing is damaged, not who made it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    checksums = {
        str(file.relative_to(folder)): [file.stat().st_size, zlib.crc32(file.read_bytes())]
        for file in files
    }
    (folder / "manifest.json").write_text(json.dumps(checksums))
    assert find_damage(str(folder), Process()) is None


def resume(world: Path, step: Path) -> tuple[object, ...]:
    """A run whose newest checkpoint is this one."""
    run = step.parent / "run"
    shutil.copytree(step, checkpoint(run, STEP))
    return "train", world / "run.toml", "--job.dump_folder", run, "--training.steps", STEP + 1


OPENED_BY: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "generate": lambda world, step: ("generate", step, "--prompt", "the"),
    "convert to hf": lambda world, step: ("convert", step, step.parent / "made", "--to", "hf"),
    "convert to dcp": lambda world, step: ("convert", step, step.parent / "made", "--to", "dcp"),
    "resume": resume,
    "initial_load_path": lambda world, step: (
        "train",
        world / "run.toml",
        "--job.dump_folder",
        step.parent / "run",
        "--checkpoint.initial_load_path",
        step,
    ),
}


@pytest.fixture
def left_as_it_was() -> Iterator[None]:
    """What a run that ends in this process leaves there is undone."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handler, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handler, propagate
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("left_as_it_was")
@pytest.mark.parametrize("command", OPENED_BY)
@pytest.mark.parametrize("put", [in_metadata, as_metadata, in_state, as_tensors])
def test_a_payload_in_a_checkpoint_is_refused_by_name_and_never_run(
    world: Path, straight: Path, tmp_path: Path, put: Callable[[Path, Payload], None], command: str
) -> None:
    if put is in_state and command != "resume":
        pytest.skip("the state is not opened for the weights alone")
    step = shutil.copytree(checkpoint(straight, STEP), tmp_path / "step-8")
    put(step, Payload(tmp_path / "harm"))
    seal(step)
    said = refused(*OPENED_BY[command](world, step))
    assert not (tmp_path / "harm").exists()
    assert "step-8: " in said
    assert "it names posix.system, which no weights need" in said
    assert said.count("lacuna: ") == 1
    assert "weights_only" not in said, "torch's advice is to run it"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_a_payload_in_a_pytorch_model_is_refused_by_name_and_never_run(
    straight: Path, tmp_path: Path, command: str
) -> None:
    model = shutil.copytree(straight / "hf", tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload(tmp_path / "harm")}, model / "pytorch_model.bin")
    more = ("--prompt", "the") if command == "generate" else (tmp_path / "made", "--to", "hf")
    said = refused(command, model, *more)
    assert not (tmp_path / "harm").exists()
    assert f"{model}: its file of weights cannot be used: it names posix.system" in said
    assert said.count("\n") == 1


def test_metadata_that_lead_out_of_their_folder_are_refused(straight: Path, tmp_path: Path) -> None:
    step = shutil.copytree(checkpoint(straight, STEP), tmp_path / "step-8")
    metadata = FileSystemReader(step).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "/dev/zero"
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="a file of another folder, /dev/zero"):
        Reader(step).read_metadata()


def test_what_is_read_is_what_torch_reads(straight: Path) -> None:
    step = str(checkpoint(straight, STEP))
    expected, found = FileSystemReader(step).read_metadata(), Reader(step).read_metadata()
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert read_state(step)["loop"]["step"] == STEP


def as_in_version_0_1(step: Path) -> None:
    """Writes the state of a checkpoint as it was before it had parts."""
    state = torch.load(step / "state.pt", weights_only=True)
    loop = state["loop"]
    loop["counters"]["stage"] = loop["counters"].pop("curriculum_stage")
    old = loop | {"data": state["source"], "objective": state["objective"]}
    torch.save(old, step / "state.pt")


def test_metadata_of_python_before_3_11_4_are_read_and_its_getattr_gets_nothing_else(
    straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step"
    shutil.copytree(checkpoint(straight, STEP), folder)
    metadata = FileSystemReader(folder).read_metadata()

    def reduced(member: Enum, _: int) -> tuple[Callable, tuple]:
        """As those versions pickle a member of an enumeration."""
        return getattr, (type(member), member.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds._MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert Reader(folder).read_metadata().state_dict_metadata == metadata.state_dict_metadata
    for reached in ((kinds.Metadata, "__init__"), ("text", "join")):
        (folder / ".metadata").write_bytes(pickle.dumps(GetAttribute(*reached)))
        with pytest.raises(pickle.UnpicklingError, match=r"it names builtins\.getattr"):
            Reader(folder).read_metadata()


def test_a_state_that_has_no_parts_is_read_as_one_that_has(straight: Path, tmp_path: Path) -> None:
    step = shutil.copytree(checkpoint(straight, STEP), tmp_path / "step-8")
    new = read_state(str(step))
    assert new.keys() == {"loop", "source", "objective"}
    as_in_version_0_1(step)
    assert read_state(str(step)) == new
    torch.save({"step": 0}, step / "state.pt")  # of weights alone, which `convert` wrote
    assert read_state(str(step)) == {"loop": {"step": 0}, "objective": {}}


def test_a_run_goes_on_from_a_checkpoint_of_version_0_1(
    world: Path, straight: Path, tmp_path: Path
) -> None:
    step = shutil.copytree(checkpoint(straight, 4), checkpoint(tmp_path / "run", 4))
    as_in_version_0_1(step)
    seal(step)
    assert "resuming after step 4" in train(world, tmp_path / "run", "--checkpoint.interval", 2)
    assert weights(tmp_path / "run") == weights(straight)
    assert curve(tmp_path / "run") == curve(straight)[4:]
