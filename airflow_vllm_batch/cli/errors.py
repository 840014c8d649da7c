"""What ends a command before it did anything."""

from __future__ import annotations


class UsageError(ValueError):
    """Arguments that each make sense, but not together, or not here."""
