"""Structured logs: one line an event on stderr, readable on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(level: str, *, process: str) -> None:
    """Sets up structlog for a process; `process` (api, worker, up) stands in every line."""
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.dict_tracebacks,
            *(() if terminal else (structlog.processors.JSONRenderer(ensure_ascii=False),)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
