"""Structured logs: one line an event on stderr, readable on a terminal, JSON elsewhere or where the settings say so.

Lines about a request carry its `request_id` (of the HTTP request), its id `job`, or both; the two stand together in the line
`request` of the API and in each `attempt` of a worker.

What libraries say through `logging` comes out the same way. Tracebacks come without the frames' local variables:
prompts, texts and passwords stand in those.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
import structlog.tracebacks

Format = Literal["auto", "json", "text"]


def configure(level: str, form: Format = "auto", *, process: str) -> None:
    """Sets up the logs of a process; `process` (api, worker, batches) stands in every line. `auto`: text on a terminal."""

    def name_process(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["process"] = process  # not a context variable: new threads begin with none
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        name_process,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final = _final(terminal=form == "text" or (form == "auto" and sys.stderr.isatty()))
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


def _final(*, terminal: bool) -> list[structlog.typing.Processor]:
    if terminal:
        return [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(ensure_ascii=False),
    ]
