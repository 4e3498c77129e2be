"""The error object, for the OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject
