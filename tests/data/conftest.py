"""What the tests of the data room share: a tokenizer, and caches of their own."""

from collections.abc import Iterator

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from texts import tokenizer_of_bytes


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer_of_bytes()


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("caches")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        datasets.disable_progress_bars()
        yield
        datasets.enable_progress_bars()
