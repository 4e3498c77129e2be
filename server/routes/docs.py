"""GET /docs: the OpenAPI document as a page that a person can read. No scripts, and nothing from elsewhere."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

from server.openapi import document

router = APIRouter()
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }
summary { cursor: pointer; padding: .3em 0 } code { font-size: 13px } table { border-collapse: collapse; width: 100% }
td, th { border-top: 1px solid #ddd; padding: .25em .6em; text-align: left; vertical-align: top }
.method { display: inline-block; width: 4.5em; font-weight: bold; text-transform: uppercase; color: #06c }
"""
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


@router.get("/docs", include_in_schema=False)
async def docs(http: Request) -> Response:
    """Every route, with the fields of its bodies and what it answers."""
    return Response(page(document(http.app)), media_type="text/html", headers=HEADERS)


def page(whole: dict[str, Any]) -> str:
    """The document as HTML."""
    schemas = whole["components"]["schemas"]
    title = f"{whole['info']['title']} {whole['info']['version']}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>The same for programs: <a href=openapi.json>openapi.json</a></p>",
    ]
    for path, methods in whole["paths"].items():
        parts += [_operation(method, path, described) for method, described in methods.items()]
    parts.append("<h2>Bodies and answers</h2>")
    parts += [_schema(name, schema) for name, schema in sorted(schemas.items())]
    return "".join(parts)


def _operation(method: str, path: str, described: dict[str, Any]) -> str:
    rows = []
    body = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        rows.append(("body", _kind(body)))
    rows += [(parameter["name"], _kind(parameter["schema"])) for parameter in described.get("parameters", ())]
    for status, answer in described["responses"].items():
        kinds = " or ".join(_kind(content["schema"]) for content in answer.get("content", {}).values())
        rows.append((status, f"{_prose(answer['description'])} {kinds}"))
    text = _prose(described.get("description", ""))
    return (
        f"<details><summary><span class=method>{method}</span><code>{escape(path)}</code> {text}</summary>"
        f"{_table(rows)}</details>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    rows = []
    required = schema.get("required", ())
    for field, shape in schema.get("properties", {}).items():
        default = f", default <code>{escape(repr(shape['default']))}</code>" if shape.get("default") is not None else ""
        need = ", required" if field in required else ""
        rows.append((field, f"{_kind(shape)}{need}{default} {_prose(shape.get('description', ''))}"))
    if not rows:
        rows.append(("", _kind(schema)))
    about = _prose(schema.get("description", ""))
    return f"<details id={escape(name)}><summary><code>{escape(name)}</code> {about}</summary>{_table(rows)}</details>"


def _table(rows: list[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td><code>{escape(a)}</code><td>{b}" for a, b in rows) + "</table>"


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for join in ("anyOf", "oneOf", "allOf"):
        if join in schema:
            return " or ".join(map(_kind, schema[join]))
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return escape(" ".join([str(schema.get("type", "anything")), *bounds]))
