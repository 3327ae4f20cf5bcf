"""What a layout asks of a model and its batch, checked before anything is built."""

from transformers import PretrainedConfig

from lacuna.config import Config, refuse
from lacuna.parallel.mesh import Layout
from lacuna.parallel.pipeline import check_pipeline
from lacuna.parallel.tensor import check_tensor_parallel


def check_layout(config: Config, model_config: PretrainedConfig, layout: Layout) -> None:
    """Raises `UserError` for sequences too long for the model, and a layout that it or their length does not allow."""
    training, positions = config.training, getattr(model_config.get_text_config(), "max_position_embeddings", None)
    too_long = (
        f"training.{'context_len' if training.varlen else 'seq_len'}: {training.context_len} is more than the "
        f"{positions} positions of the model: lower it, or raise max_position_embeddings in the model's configuration"
    )
    length, cuts = training.seq_len, layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    uneven = (
        f"training.seq_len: {length} is no multiple of tensor_parallel_degree × 2 × context_parallel_degree = "
        f"{layout.tp} × 2 × {layout.cp}, the pieces of a sequence: the nearest above is {-(-length // cuts) * cuts}"
    )
    prompts = "validation.prompts: sampling needs data parallelism only; use lacuna generate on the run's folder"
    refuse({
        too_long: bool(positions) and training.context_len > positions,
        uneven: length % cuts > 0,
        prompts: layout.sharing > 1 and bool(config.validation.prompts),
    })  # fmt: skip
    if layout.tp > 1:
        check_tensor_parallel(model_config, layout.tp)
    if layout.pp > 1:
        check_pipeline(config, model_config)
