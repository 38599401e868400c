"""Errors that a user can act upon."""


class UsageError(Exception):
    """Printed without a traceback; the message says what to do next. `code` is the exit status."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code
