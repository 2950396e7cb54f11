"""Why the engine cannot start. Knows nothing of the package."""

from __future__ import annotations


class LoadError(OSError):
    """The package, the machine or the model cannot be used; the message says what to do."""
