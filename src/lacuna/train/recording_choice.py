"""Whether a run's steps are recorded as CUDA graphs: where that is asked for, or gains time."""

import torch

from lacuna.config import UserError, logger
from lacuna.config.sections import TrainingConfig
from lacuna.model.architecture import decoder_layers, is_from_fla
from lacuna.model.build import BuiltModel
from lacuna.model.loss import Loss
from lacuna.parallel.fsdp import is_alone
from lacuna.train.recorded import RecordedSteps, is_told_of_documents

# The time that the host takes for a layer, forward and back, and the share of a GPU's peak that
# kernels have: a GPU that would be done sooner has to wait. With 6 layers of 384 a host took 4 ms
# for each, and the kernels of all of them 7 (docs/log.md); other hosts are faster.
_HOST_SECONDS = 0.002
_KERNELS = 0.4


def recorded_steps(
    wanted: bool | None,
    training: TrainingConfig,
    built: BuiltModel,
    loss: Loss,
    peak: float | None,
    masks: bool,
    counts: bool,
) -> RecordedSteps | None:
    """What a run makes its steps by if these are recorded, or None if they are not.

    They are where that is `wanted`; where it is None, they are if the host would be slower. `peak`
    is the FLOP/s of the device, if they are known. The run `masks` documents, and `counts` what
    routers choose, or not. Raises `UserError` where recorded steps are wanted and cannot be had. On
    a CPU there are none.
    """
    reason = _reason_not_to_record(training, built, masks, counts)
    if wanted and reason:
        raise UserError(f"compile.cuda_graphs: {reason}; leave it out.")
    # What is not compiled may have kernels that are tuned, or choose, by what they are given.
    is_compiled = built.head.compiled and not is_from_fla(built.model.config)
    is_due = wanted or (is_compiled and _host_is_slower(training, built, peak))
    if reason or built.device.type != "cuda" or not is_due:
        return None
    logger.info("steps are recorded as CUDA graphs (compile.cuda_graphs)")
    return RecordedSteps(built, loss)


def _reason_not_to_record(
    training: TrainingConfig, built: BuiltModel, masks: bool, counts: bool
) -> str | None:
    """Why a run's passes cannot be recorded; None where they can be."""
    if not is_alone(training, built.mesh.layout):
        return "it is for one process that has the whole model on its device"
    if built.head.router is not None or counts:
        return "what routers choose is counted by the host"
    if any(parameter.device != built.device for parameter in built.model.parameters()):
        return "it cannot be had with weights in CPU memory"
    if not masks and not is_told_of_documents(built):
        return "transformers leaves out the mask of whole rows, but not while they are recorded"
    return None


def _host_is_slower(training: TrainingConfig, built: BuiltModel, peak: float | None) -> bool:
    """Whether a GPU is done with a micro-batch before the host has asked for all of it."""
    rows = torch.full((training.batch_size,), training.seq_len)
    work = built.flops(training.batch_size * training.seq_len, rows)
    layers = len(decoder_layers(built.model))
    return peak is not None and work / (_KERNELS * peak) < _HOST_SECONDS * layers
