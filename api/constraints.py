"""What clients demand of texts: checked before anything is queued, and the finished texts against it.

Both happen in processes that can be killed (`constraint_process.py`, `children.py`). Knows constraints and cards, nothing of
frames and of HTTP.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import structlog

from api.children import AllBusy, Children, Ended
from api.schemas.output_format import Demand
from shared.cards import ModelCard
from shared.errors import EngineOverloaded, InternalError, UnsupportedParameter
from shared.structured import Constraint

log = structlog.get_logger(__name__)

#: Longest check of a constraint, or of a text against one, s.
LIMIT = 1.0
#: Constraints of which it is kept what the check found.
KEPT = 1024

_CHILD = Path(__file__).with_name("constraint_process.py")


class Constraints:
    """One a process. Works with threads and with greenlets."""

    def __init__(self) -> None:
        self._children = Children(_CHILD, limit=LIMIT)
        self._found: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._said = False

    def admit(self, demand: Demand, card: ModelCard) -> Constraint:
        """The constraint as it goes into the job of this model.

        Raises InvalidRequest for one that is none or that no text can meet, UnsupportedParameter for a strict one with a
        keyword that is not enforced, EngineOverloaded."""
        constraint = demand.constraint
        try:
            found = self._check(constraint)
        except Ended:
            raise demand.refusal("is too complex: a check of it takes too long") from None
        if "reason" in found:
            raise demand.refusal(found["reason"], found["path"])
        missing = found["missing"]
        if missing is not None and demand.strict:
            where = demand.where(found["path"])
            raise UnsupportedParameter(
                f"{where}: {missing} is not enforced here while a text is written, which strict asks for. Without strict, "
                "the finished text is checked.",
                param=where,
            )
        return msgspec.structs.replace(constraint, whole=missing is not None or not card.constraints)

    def holds(self, constraint: Constraint, text: str) -> bool:
        """Whether a finished text is what it was to be; no, if that takes too long to find out. Raises EngineOverloaded."""
        try:
            return bool(self._ask(constraint, text=text)["right"])
        except Ended:
            return False

    def close(self) -> None:
        self._children.close()

    def _check(self, constraint: Constraint) -> dict[str, Any]:
        """What the check found, now or before. Raises Ended."""
        key = hashlib.sha256(f"{constraint.kind} {constraint.source}".encode()).digest()
        with self._lock:
            found = self._found.get(key)
        if found is None:
            found = self._ask(constraint)
            with self._lock:
                self._found[key] = found
                if len(self._found) > KEPT:
                    self._found.popitem(last=False)
        return found

    def _ask(self, constraint: Constraint, **more: str) -> dict[str, Any]:
        try:
            answer = self._children.ask({"kind": constraint.kind, "source": constraint.source, **more})
        except AllBusy:
            raise EngineOverloaded("Too many texts are being checked against what they must be.") from None
        except OSError as error:
            log.error("constraint_process_failed", error=str(error))
            raise InternalError from None
        if not answer["validates"] and not self._said:
            self._said = True
            log.warning("no_jsonschema", message="jsonschema is not installed: texts are only checked to be JSON.")
        return answer
