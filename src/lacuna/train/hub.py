"""Uploads of a run's checkpoints and its final model to the Hub, none of which can end it."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

from huggingface_hub import HfApi, get_token

from lacuna.config import RunError, logger
from lacuna.formats.checkpoint import checkpoint_path
from lacuna.parallel.processes import on_first
from lacuna.train.exports import exports_of
from lacuna.train.setup import Run


class Uploads:
    """What a run sends to `checkpoint.hf_repo_base_name`.

    All ranks must call its methods; the first rank sends. Each upload is a commit with a tag
    `step-N`. Models are at the top of the repository, checkpoints in folders of their names. The
    token stays where `huggingface_hub` finds it, and is written nowhere.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = run.config.checkpoint
        self.hub = HfApi()
        self.thread = Thread()
        self.active = on_first(run.process, self._make_repository)

    def _make_repository(self) -> bool:
        """Makes the repository, and returns whether there is a token.

        Anything else that the Hub refuses is logged, because it may not refuse it the next time.
        """
        repository = str(self.settings.hf_repo_base_name)
        folder = self.run.config.job.dump_folder
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
            self.hub.create_repo(repository, exist_ok=True)
        # Errors of the network, the Hub and libraries have no class in common, and none may end a
        # run. Each upload tries this again.
        except Exception as error:
            said = "checkpoint.hf_upload_enabled: %s; the run goes on, and tries again"
            logger.warning(said, self._first_line_of(error))
        return True

    def after_checkpoint(self) -> None:
        """Sends the present step, after its checkpoint was written or is being written.

        The step is left out while the one before is still on its way.
        """
        run = self.run
        step = run.state.step
        settings = self.settings
        if not self.active or settings.hf_upload_when == "end":
            return
        if on_first(run.process, self.thread.is_alive):
            logger.warning("step-%d is not uploaded: the one before is still on its way", step)
            return
        send: Callable[[], None]
        failure: Exception | None = None
        if settings.hf_upload_format == "dcp":
            run.saver.wait()
            send = partial(self._upload_checkpoint, step)
        else:
            folder = os.path.join(run.config.job.dump_folder, f".hub-step-{step}")
            send = partial(self._upload_folder, folder, step, None, once=True)
            failure = self._export_model(folder)
        if failure is not None:  # on the first rank, the only one that writes
            logger.warning("step-%d is not uploaded: %s", step, self._first_line_of(failure))
            shutil.rmtree(folder, ignore_errors=True)
        elif run.process.rank == 0:
            self.thread = Thread(target=send, daemon=True)
            self.thread.start()
        if not settings.hf_upload_background:
            on_first(run.process, self._wait_for_upload)

    def after_end(self, model: str) -> None:
        """Sends the final model, which is in `model`, and the last checkpoint if they are sent."""
        step = self.run.state.step
        last = checkpoint_path(self.run.saver.folder, step)

        def send() -> None:
            self._wait_for_upload()
            if self.settings.hf_upload_format == "dcp" and os.path.isdir(last):
                self._upload_checkpoint(step)
            self._upload_folder(model, step, None)

        if self.active:
            on_first(self.run.process, send)

    def _export_model(self, folder: str) -> Exception | None:
        """Writes the model to `folder`. Returns the first error of the disk, if there was one."""
        failures: list[Exception] = []
        for write in exports_of(self.run, folder):  # all ranks must call each
            try:
                write()
            except (OSError, RunError) as error:
                failures.append(error)
        return failures[0] if failures else None

    def _wait_for_upload(self) -> None:
        """Waits for the upload that is on its way, if any."""
        if self.thread.is_alive():
            self.thread.join()

    def _upload_checkpoint(self, step: int) -> None:
        """Uploads the checkpoint of a step."""
        folder = checkpoint_path(self.run.saver.folder, step)
        self._upload_folder(folder, step, f"{self.settings.folder}/step-{step}")

    def _upload_folder(self, folder: str, step: int, place: str | None, once: bool = False) -> None:
        """Uploads a folder to its place in the repository; deletes it if it is for this `once`."""
        repository = str(self.settings.hf_repo_base_name)
        try:
            self.hub.create_repo(repository, exist_ok=True)
            message = f"step {step:,}"
            self.hub.upload_folder(
                repo_id=repository, folder_path=folder, path_in_repo=place, commit_message=message
            )
            self.hub.create_tag(repository, tag=f"step-{step}", exist_ok=True)
            logger.info("uploaded step-%d to %s", step, repository)
        # Errors of the network, the Hub, the disk and libraries have no class in common, and none
        # may end a run.
        except Exception as error:
            kept = "" if once else f"; it is in {folder}"
            reason = self._first_line_of(error) + kept
            logger.warning("step-%d could not be uploaded to %s: %s", step, repository, reason)
        finally:
            if once:
                shutil.rmtree(folder, ignore_errors=True)

    def _first_line_of(self, error: Exception) -> str:
        """The first line of an error's message, without the token, which may be in it."""
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return said.replace(str(get_token()), "***")
