"""What goes wrong with a model's files. Every message is one line that a user can act on. No torch here."""

from __future__ import annotations


class ModelError(Exception):
    """The model's files are unreadable, hostile, or describe something that cannot run."""


class ModelNotFound(ModelError):
    """There is no such model: no file, no folder, no hub repository, or it has no weights that may be loaded."""
