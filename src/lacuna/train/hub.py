"""Uploads of a run's checkpoints and its final model to the Hub, none of which can end it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from huggingface_hub import HfApi, get_token

from lacuna.config import RunError, logger
from lacuna.formats.checkpoint import checkpoint_path
from lacuna.parallel.processes import on_first
from lacuna.train.setup import Run


class Uploads:
    """What a run sends to `checkpoint.hf_repo_base_name`.

    All ranks must call its methods; the first one sends. Each upload is a commit, which a tag
    `step-N` names. Models are at the top, checkpoints in the folder of their name. The token stays
    where `huggingface_hub` finds it, and is written nowhere.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.settings = run, run.config.checkpoint
        self.hub, self.thread = HfApi(), Thread()
        self.active = on_first(run.process, self._prepare)

    def _prepare(self) -> bool:
        """Whether there is a token. Says what else the Hub refuses, which it may not next time."""
        repository, folder = self.settings.hf_repo_base_name, str(self.run.config.job.dump_folder)
        for left in Path(folder).glob(".hub-step-*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if get_token() is None:
            later = f"hf upload {repository} {os.path.join(folder, 'hf')} ."
            logger.warning(
                "checkpoint.hf_upload_enabled: there is no token of the Hugging Face Hub "
                "(HF_TOKEN, or hf auth login), so nothing is uploaded; once there is: %s",
                later,
            )
            return False
        try:
            self.hub.create_repo(str(repository), exist_ok=True)
        except (
            Exception
        ) as error:  # of the network, the Hub or a library: said, and tried again with each upload
            logger.warning(
                "checkpoint.hf_upload_enabled: %s; the run goes on, and tries again",
                self._reason(error),
            )
        return True

    def after_checkpoint(self) -> None:
        """Sends the present step, whose checkpoint was asked for.

        It is left out while the one before is still on its way.
        """
        run, step, settings = self.run, self.run.state.step, self.settings
        if not self.active or settings.hf_upload_when == "end":
            return
        if on_first(run.process, self.thread.is_alive):
            logger.warning("step-%d is not uploaded: the one before is still on its way", step)
            return
        failures: list[Exception] = []
        arguments: tuple[str, int, str | None, bool]
        if settings.hf_upload_format == "dcp":
            run.saver.wait()
            arguments = (
                checkpoint_path(run.saver.folder, step),
                step,
                f"{settings.folder}/step-{step}",
                False,
            )
        else:
            folder = os.path.join(str(run.config.job.dump_folder), f".hub-step-{step}")
            arguments = (folder, step, None, True)
            failures = [
                error
                for write in run.exports(folder)
                if (error := self._failure(write)) is not None
            ]
        if failures:  # on the first rank, the only one that writes
            logger.warning("step-%d is not uploaded: %s", step, self._reason(failures[0]))
            shutil.rmtree(folder, ignore_errors=True)
        elif run.process.rank == 0:
            self.thread = Thread(target=self._send, args=arguments, daemon=True)
            self.thread.start()
        if not settings.hf_upload_background:
            on_first(run.process, self._wait)

    def after_end(self, model: str) -> None:
        """Sends the final model, which is in `model`, and the last checkpoint if these are sent."""
        step, settings = self.run.state.step, self.settings
        last = checkpoint_path(self.run.saver.folder, step)

        def send() -> None:
            self._wait()
            if settings.hf_upload_format == "dcp" and os.path.isdir(last):
                self._send(last, step, f"{settings.folder}/step-{step}", False)
            self._send(model, step, None, False)

        if self.active:
            on_first(self.run.process, send)

    @staticmethod
    def _failure(write: Callable[[], None]) -> Exception | None:
        """What the disk says to the export that `write` makes, if it refuses."""
        try:
            write()
        except (OSError, RunError) as error:
            return error
        return None

    def _wait(self) -> None:
        if self.thread.is_alive():
            self.thread.join()

    def _send(self, folder: str, step: int, place: str | None, once: bool) -> None:
        """Uploads a folder to its place in the repository, and deletes it if wanted `once`."""
        repository = str(self.settings.hf_repo_base_name)
        try:
            self.hub.create_repo(repository, exist_ok=True)
            message = f"step {step:,}"
            self.hub.upload_folder(
                repo_id=repository, folder_path=folder, path_in_repo=place, commit_message=message
            )
            self.hub.create_tag(repository, tag=f"step-{step}", exist_ok=True)
            logger.info("uploaded step-%d to %s", step, repository)
        except (
            Exception
        ) as error:  # of the network, the Hub, the disk or a library: none of them may end a run
            kept = "" if once else f"; it is in {folder}"
            logger.warning(
                "step-%d could not be uploaded to %s: %s%s",
                step,
                repository,
                self._reason(error),
                kept,
            )
        finally:
            if once:
                shutil.rmtree(folder, ignore_errors=True)

    def _reason(self, error: Exception) -> str:
        """What an error says in its first line, without the token, whatever else is in it."""
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return said.replace(str(get_token()), "***")
