"""Bytes that a process prints to bounded lines for a log. Pure."""

from __future__ import annotations

LONGEST = 4096
"""Bytes of a line that are kept."""


class LineSplitter:
    """Splits at line feeds. Of a line that redraws itself with carriage returns only the last state is kept."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._dropped = 0
        self._redraws = False

    def feed(self, chunk: bytes) -> list[str]:
        """Take bytes; returns the lines that they complete."""
        *complete, rest = chunk.split(b"\n")
        lines = []
        for part in complete:
            self._keep(part)
            lines.extend(self.finish())
        self._keep(rest)
        return lines

    def finish(self) -> list[str]:
        """Return what was kept as a line; none where it is blank."""
        text = self._kept.decode(errors="replace").strip("\r").rstrip()
        if self._dropped:
            text += f" … ({self._dropped:,} bytes more)"
        self._begin_anew()
        return [text] if text else []

    def _keep(self, part: bytes) -> None:
        if not part:
            return
        # A carriage return takes effect with the byte after it: before a line feed it belongs to the line's end.
        start = part.rstrip(b"\r").rfind(b"\r") + 1
        if start or self._redraws:
            self._begin_anew()
        shown = part[start:]
        room = max(0, LONGEST - len(self._kept))
        self._kept += shown[:room]
        self._dropped += len(shown[room:])
        self._redraws = part.endswith(b"\r")

    def _begin_anew(self) -> None:
        self._kept.clear()
        self._dropped = 0
        self._redraws = False
