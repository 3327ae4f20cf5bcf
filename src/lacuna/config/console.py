"""Where commands print, and where the log of a run goes."""

import logging
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from lacuna.config.errors import logger
from lacuna.config.machine import MetricsConfig

ENDLESS = 100_000


def open_console(settings: MetricsConfig, visible: bool = True, **options: Any) -> Console:
    """Where a command prints. A file or a pipe gets whole lines, however long."""
    plain = settings.disable_color_printing
    console = Console(no_color=plain, highlight=False, quiet=not visible, **options)
    if not console.is_terminal:
        console.width = ENDLESS
    return console


def set_up_logging(settings: MetricsConfig, visible: bool) -> Console:
    """Sends log messages to standard error: all of them, or unless `visible`, errors alone."""
    console = open_console(settings, visible, stderr=True)
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, log_time_format="%H:%M:%S", markup=False
        )
    else:
        handler = logging.StreamHandler()
        form = logging.Formatter("%(asctime)s %(levelname)-8s %(message)s", "%H:%M:%S")
        handler.setFormatter(form)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel("INFO" if visible else "ERROR")
    return console
