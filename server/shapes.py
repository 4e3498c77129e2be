"""What routes answer, as JSON schemas for the OpenAPI document. Every field that is listed is always there, unless it
stands under `maybe`; there are no others, though later versions may have some."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from server.ledger import Account

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
ANY: Schema = {}
OPEN: Schema = {"additionalProperties": True}
"""Of a record that holds what the client sent."""


def constant(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def record(fields: dict[str, Schema], maybe: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": fields | (maybe or {}), "required": list(fields)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


USAGE = record(
    {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER},
    {
        "prompt_tokens_details": record({"cached_tokens": INTEGER}),
        "completion_tokens_details": record({"reasoning_tokens": INTEGER}),
    },
)
CHAT_TOKEN = {"token": STRING, "bytes": nullable(array(INTEGER)), "logprob": NUMBER}
CHAT_LOGPROBS = record(
    {"content": array(record({**CHAT_TOKEN, "top_logprobs": array(record(CHAT_TOKEN))})), "refusal": {"type": "null"}}
)
COMPLETION_LOGPROBS = record(
    {
        "tokens": array(STRING),
        "token_logprobs": array(nullable(NUMBER)),
        "top_logprobs": nullable(array(nullable({"type": "object", "additionalProperties": NUMBER}))),
        "text_offset": array(INTEGER),
    }
)
TOOL_CALL = record(
    {"id": STRING, "type": constant("function", "custom")},
    {
        "function": record({"name": STRING, "arguments": STRING}),
        "custom": record({"name": STRING, "input": STRING}),
    },
)
REASON = nullable(constant("stop", "length", "tool_calls", "function_call"))
CHAT_CHOICE = record(
    {
        "index": INTEGER,
        "message": record(
            {"role": constant("assistant"), "content": nullable(STRING), "refusal": {"type": "null"}},
            {
                "reasoning_content": STRING,
                "reasoning": STRING,
                "tool_calls": array(TOOL_CALL),
                "function_call": record({"name": STRING, "arguments": STRING}),
            },
        ),
        "logprobs": nullable(CHAT_LOGPROBS),
        "finish_reason": REASON,
        "stop_reason": nullable(one_of(STRING, INTEGER)),
    },
    {"token_ids": array(INTEGER)},
)
ASKED: dict[str, Schema] = {
    "token_ids": array(INTEGER),
    "prompt_token_ids": array(INTEGER),
    "prompt_text": STRING,
}
"""Of a choice, where the request asks for them."""
COMPLETION_CHOICE = record(
    {
        "index": INTEGER,
        "text": STRING,
        "logprobs": nullable(COMPLETION_LOGPROBS),
        "finish_reason": REASON,
        "stop_reason": nullable(one_of(STRING, INTEGER)),
    },
    {**ASKED, "prompt_logprobs": ANY, "cumulative_logprob": NUMBER},
)
ASIDES: dict[str, Schema] = {
    "service_tier": constant("default"),
    "timings": {"type": "object", "additionalProperties": NUMBER},
}
"""Of both, where the request asks for them."""
HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
OUTPUT_TEXT = record({"type": constant("output_text"), "text": STRING, "annotations": array(ANY)}, {"logprobs": ANY})
ITEM = one_of(
    record(
        {
            "id": STRING,
            "type": constant("message"),
            "role": STRING,
            "status": STRING,
            "content": array(one_of(OUTPUT_TEXT, record({"type": STRING, "text": STRING}))),
        },
        {"phase": STRING},
    ),
    record(
        {"id": STRING, "type": constant("reasoning"), "summary": array(ANY)},
        {"content": array(ANY), "encrypted_content": STRING, "status": STRING},
    ),
    record(
        {"id": STRING, "type": constant("function_call"), "call_id": STRING, "name": STRING, "arguments": STRING},
        {"status": STRING},
    ),
    record(
        {"id": STRING, "type": constant("custom_tool_call"), "call_id": STRING, "name": STRING, "input": STRING},
        {"status": STRING},
    ),
    record(
        {
            "id": STRING,
            "type": constant("function_call_output", "custom_tool_call_output"),
            "call_id": STRING,
            "output": one_of(STRING, array(ANY)),
        },
        {"status": STRING},
    ),
)
RESPONSE = record(
    {
        "id": STRING,
        "object": constant("response"),
        "created_at": INTEGER,
        "completed_at": nullable(INTEGER),
        "status": constant("completed", "incomplete", "in_progress", "failed"),
        "error": nullable(record({"code": STRING, "message": STRING})),
        "incomplete_details": nullable(record({"reason": constant("max_output_tokens")})),
        "instructions": nullable(STRING),
        "max_output_tokens": nullable(INTEGER),
        "metadata": {"type": "object", "additionalProperties": STRING},
        "model": STRING,
        "output": array(ITEM),
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": nullable(STRING),
        "reasoning": {"type": "object"},
        "store": BOOLEAN,
        "temperature": NUMBER,
        "text": record({"format": record({"type": STRING}) | OPEN}, {"verbosity": STRING}),
        "tool_choice": one_of(STRING, {"type": "object"}),
        "tools": array(
            record(
                {"type": STRING, "name": STRING}, dict.fromkeys(("description", "parameters", "strict", "format"), ANY)
            )
        ),
        "top_logprobs": INTEGER,
        "top_p": NUMBER,
        "truncation": constant("disabled"),
        "usage": nullable(
            record(
                {
                    "input_tokens": INTEGER,
                    "input_tokens_details": record({"cached_tokens": INTEGER, "cache_write_tokens": INTEGER}),
                    "output_tokens": INTEGER,
                    "output_tokens_details": record({"reasoning_tokens": INTEGER}),
                    "total_tokens": INTEGER,
                }
            )
        ),
        "user": nullable(STRING),
    },
    {
        "background": BOOLEAN,
        "max_tool_calls": nullable(INTEGER),
        "prompt_cache_key": nullable(STRING),
        "safety_identifier": nullable(STRING),
        "service_tier": constant("default"),
    },
)
BLOCK = one_of(
    record({"type": constant("text"), "text": STRING}),
    record({"type": constant("thinking"), "thinking": STRING, "signature": STRING}),
    record({"type": constant("tool_use"), "id": STRING, "name": STRING, "input": {"type": "object"}}),
)
MODEL = record(
    {
        "id": STRING,
        "object": constant("model"),
        "created": INTEGER,
        "owned_by": STRING,
        "root": STRING,
        "parent": nullable(STRING),
        "max_model_len": nullable(INTEGER),
        "vocab_size": nullable(INTEGER),
    }
)
TOKENS = array(INTEGER)

DELTA_CALL = record(
    {"index": INTEGER},
    {
        "id": STRING,
        "type": constant("function", "custom"),
        "function": record({}, {"name": STRING, "arguments": STRING}),
        "custom": record({}, {"name": STRING, "input": STRING}),
    },
)
DELTA = record(
    {},
    {
        "role": constant("assistant"),
        "content": nullable(STRING),
        "refusal": {"type": "null"},
        "reasoning_content": STRING,
        "reasoning": STRING,
        "tool_calls": array(DELTA_CALL),
        "function_call": record({}, {"name": STRING, "arguments": STRING}),
    },
)
OF_CHOICE = {"stop_reason": nullable(one_of(STRING, INTEGER)), **ASKED}
OF_CHUNK: dict[str, Schema] = {"usage": nullable(USAGE), **ASIDES}
CHUNKS: dict[str, Schema] = {
    "CompletionChunk": record(
        {
            **HEAD,
            "object": constant("text_completion"),
            "choices": array(
                record(
                    {
                        "index": INTEGER,
                        "text": STRING,
                        "logprobs": nullable(COMPLETION_LOGPROBS),
                        "finish_reason": REASON,
                    },
                    {**OF_CHOICE, "cumulative_logprob": NUMBER},
                )
            ),
        },
        OF_CHUNK,
    ),
    "ChatCompletionChunk": record(
        {
            **HEAD,
            "object": constant("chat.completion.chunk"),
            "choices": array(
                record(
                    {"index": INTEGER, "delta": DELTA, "logprobs": nullable(CHAT_LOGPROBS), "finish_reason": REASON},
                    OF_CHOICE,
                )
            ),
        },
        OF_CHUNK,
    ),
    "ResponseStream": record({"type": STRING, "sequence_number": INTEGER}) | OPEN,
    "AnthropicStream": record({"type": STRING}) | OPEN,
}
"""What the data of an event is, where `stream` is true."""


def event(name: str) -> Schema:
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": one_of(ref(name), ref("Error"))}
    about = "One event of the stream; of completions and chats the data of the last one is `[DONE]`."
    return {**record({"data": data}, {"event": STRING}), "description": about}


ACCOUNT: dict[str, Schema] = {field.name: INTEGER for field in fields(Account)}
SHAPES: dict[str, Schema] = {
    "Completion": record(
        {**HEAD, "object": constant("text_completion"), "choices": array(COMPLETION_CHOICE), "usage": USAGE},
        ASIDES,
    ),
    "ChatCompletion": record(
        {**HEAD, "object": constant("chat.completion"), "choices": array(CHAT_CHOICE), "usage": USAGE},
        {"prompt_token_ids": TOKENS, "prompt_logprobs": ANY, "prompt_text": STRING, **ASIDES},
    ),
    "Response": RESPONSE,
    "ResponseInputTokens": record({"object": constant("response.input_tokens"), "input_tokens": INTEGER}),
    "ResponseDeleted": record({"id": STRING, "object": constant("response"), "deleted": BOOLEAN}),
    "ResponseItems": record(
        {
            "object": constant("list"),
            "data": array(ITEM),
            "first_id": STRING,
            "last_id": STRING,
            "has_more": BOOLEAN,
        }
    ),
    "AnthropicMessage": record(
        {
            "id": STRING,
            "type": constant("message"),
            "role": constant("assistant"),
            "model": STRING,
            "content": array(BLOCK),
            "stop_reason": constant("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": nullable(STRING),
            "usage": record(
                {
                    "input_tokens": INTEGER,
                    "output_tokens": INTEGER,
                    "cache_creation_input_tokens": INTEGER,
                    "cache_read_input_tokens": INTEGER,
                }
            ),
        }
    ),
    "AnthropicTokens": record({"input_tokens": INTEGER}),
    "Embeddings": record(
        {
            "object": constant("list"),
            "data": array(
                record(
                    {
                        "object": constant("embedding"),
                        "index": INTEGER,
                        "embedding": one_of(array(NUMBER), {"type": "string", "contentEncoding": "base64"}),
                    }
                )
            ),
            "model": STRING,
            "usage": record({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
        }
    ),
    "Model": MODEL,
    "Models": record({"object": constant("list"), "data": array(MODEL)}),
    "Tokens": one_of(
        record(
            {
                "count": INTEGER,
                "max_model_len": INTEGER,
                "tokens": TOKENS,
                "token_strs": nullable(array(STRING)),
            }
        ),
        record({"tokens": one_of(TOKENS, array(record({"id": INTEGER, "piece": one_of(STRING, TOKENS)})))}),
        array(record({"id": INTEGER, "text": STRING, "start": INTEGER, "stop": INTEGER})),
    ),
    "Text": record({"prompt": STRING, "content": STRING}),
    "Prompt": record({"prompt": STRING}),
    "ChatTokens": record({"object": constant("chat.completion.input_tokens"), "input_tokens": INTEGER}),
    "State": record({"status": constant("loading", "ready", "draining", "asleep", "restarting", "stalled", "dead")}),
    "Version": record({"version": STRING}),
    "Sleeping": record({"is_sleeping": BOOLEAN}),
    **CHUNKS,
    **{f"{name}Event": event(name) for name in CHUNKS},
    "UsageReport": record(
        {
            "object": constant("list"),
            "since": INTEGER,
            "data": array(
                record(
                    {
                        "name": nullable(STRING),
                        **ACCOUNT,
                        "days": array(record({"date": {"type": "string", "format": "date"}, **ACCOUNT})),
                    }
                )
            ),
        }
    ),
    "Error": record(
        {"error": record({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)})}
    ),
    "AnthropicError": record({"type": constant("error"), "error": record({"type": STRING, "message": STRING})}),
}
