"""Logging of the commands that run for long."""

from __future__ import annotations

import logging
import time

import click

from bin.options import Command, option


def log_option(command: Command) -> Command:
    """`--log-level`."""
    return option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
        default="info",
        show_default=True,
        help="What is logged to stderr.",
    )(command)


def start_logging(level: str) -> None:
    """Log to stderr, one line an event, times in UTC."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
