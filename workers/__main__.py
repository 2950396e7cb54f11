"""`python -m workers`: one model, one engine, one worker."""

from __future__ import annotations

import argparse
import os
import socket
import sys

import msgspec
import structlog

from shared import logs
from shared.cards import ModelCard
from shared.errors import SluiceError
from shared.parent import die_with_parent
from shared.settings import WrongSettings, given
from shared.store_rules import StoreRefused, check_store
from workers.engine_loop import EngineLoop
from workers.engines import make, served_id
from workers.lane_worker import LaneWorker
from workers.progress import ToldProgress, load_progress
from workers.tokenizer_proof import prove

log = structlog.get_logger(__name__)


def with_aliases(card: ModelCard, aliases: list[str]) -> ModelCard:
    """The card with those of the aliases (NAME=MODEL_ID) that name it. Raises ValueError for one that is none."""
    names: list[str] = []
    for alias in aliases:
        name, equals, target = alias.partition("=")
        if not (name and equals and target):
            raise ValueError(f"--alias {alias!r}: write it as NAME=MODEL_ID.")
        if target == card.id:
            names.append(name)
    return msgspec.structs.replace(card, aliases=tuple(names))


def main(argv: list[str] | None = None) -> int:
    """Runs a worker until it is told to stop. Exit status 2: it could not start, and said what to do."""
    parser = argparse.ArgumentParser(prog="python -m workers", description="Runs jobs of one model.")
    parser.add_argument("--engine", default="llamacpp", choices=("llamacpp", "exllamav2", "scripted"))
    parser.add_argument("--model", metavar="PATH[=ID]", help="model file or folder, and the id to serve it under")
    parser.add_argument(
        "--alias", metavar="A=ID", action="append", default=[], help="another name for the model; repeatable"
    )
    parser.add_argument("--name", help="name of this worker; must be new at each start")
    options = parser.parse_args(argv)
    die_with_parent()
    try:
        settings = given()
    except WrongSettings as error:
        print(error, file=sys.stderr)
        return 2
    logs.configure(settings.log_level, settings.log_format, process="worker")
    if not settings.redis_url:
        print("REDIS_URL is not set: start everything with `sluice up`, or set it to the store's URL.", file=sys.stderr)
        return 2
    try:
        for warning in check_store(settings.redis_url):
            log.warning("store", message=warning)
    except StoreRefused as error:
        print(error, file=sys.stderr)
        return 2
    name = options.name or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
    try:
        model = served_id(options.engine, options.model)
        with load_progress() as shown, ToldProgress(settings.redis_url, name, model) as told:

            def progress(done: float, what: str) -> None:
                shown(done, what)
                told.report(done)

            loop = EngineLoop(make(options.engine, options.model, settings), progress)
            loop.start()
            card = with_aliases(loop.wait_loaded(), options.alias)
            proven = prove(loop.engine, card)
    except (SluiceError, OSError, ValueError) as error:
        print(f"The {options.engine} engine could not start: {error}", file=sys.stderr)
        return 2
    return LaneWorker(loop, proven.card, settings, settings.redis_url, name=name, tokenizer=proven.tokenizer).work()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is written and closed; taking torch apart would take seconds more
