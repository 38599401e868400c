"""Why an image was not taken."""

from __future__ import annotations


class ImageRefused(ValueError):
    """An image that breaks a rule. `status` is the HTTP status that says so: 400, or 413 for too many bytes."""

    def __init__(self, where: str, what: str, status: int = 400) -> None:
        super().__init__(f"{where}: {what}" if where else what)
        self.status = status


def megabytes(count: int) -> str:
    """A number of bytes for human eyes."""
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count} bytes"
