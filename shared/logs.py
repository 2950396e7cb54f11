"""Structured logs: one line an event on stderr, readable on a terminal, JSON elsewhere.

What libraries say through `logging` comes out the same way. Tracebacks come without the frames' local variables:
prompts, texts and passwords stand in those.
"""

from __future__ import annotations

import logging
import sys

import structlog
import structlog.tracebacks


def configure(level: str, *, process: str) -> None:
    """Sets up the logs of a process; `process` (api, worker, up) stands in every line."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final = _final(terminal=sys.stderr.isatty())
    number = logging.getLevelNamesMapping()[level]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)
    structlog.contextvars.bind_contextvars(process=process)


def _final(*, terminal: bool) -> list[structlog.typing.Processor]:
    if terminal:
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(ensure_ascii=False),
    ]
