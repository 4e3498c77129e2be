"""What goes wrong with a model's files. Every message is one line that a user can act on. No torch here."""

from __future__ import annotations

MAX_MESSAGE = 2000
"""Characters; a path may have many, a quoted name in a hostile file any number."""


class ModelError(Exception):
    """The model's files are unreadable, hostile, or describe something that cannot run."""

    def __init__(self, message: str) -> None:
        """`message` may quote a file's names: what a terminal or a log would obey is escaped."""
        if not message.isprintable():
            message = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in message)
        super().__init__(message[:MAX_MESSAGE])


class ModelNotFound(ModelError):
    """There is no such model: no file, no folder, no hub repository, or it has no weights that may be loaded."""
