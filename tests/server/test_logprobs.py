from __future__ import annotations

import math

import orjson

from model.params import Logprob
from model.tokenizer import Tokenizer
from server.logprobs import (
    FLOOR,
    Alternative,
    TokenEntry,
    alternative,
    chat_logprobs,
    completion_logprobs,
    finite,
    prompt_logprobs,
    token_entry,
)


def entry(token: int, text: str, logprob: float | None, *top: tuple[int, str, float], offset: int = 0) -> TokenEntry:
    others = tuple(Alternative(id_, name, name.encode(), value) for id_, name, value in top)
    return TokenEntry(token, text, text.encode(), logprob, None if logprob is None else others, offset)


def test_values_are_what_json_has() -> None:
    assert finite(-math.inf) == finite(math.nan) == finite(-1e9) == FLOOR
    assert finite(1e-7) == 0.0
    assert finite(-1.5) == -1.5


def test_completions_shape_of_an_echoed_prompt_and_a_token() -> None:
    shape = completion_logprobs(
        [entry(1, "Hi", None), entry(2, " you", -0.5, (3, " there", -0.2), (2, " you", -0.5), offset=2)]
    )
    assert shape.tokens == ["Hi", " you"]
    assert shape.token_logprobs == [None, -0.5]
    assert shape.top_logprobs == [None, {" there": -0.2, " you": -0.5}]
    assert shape.text_offset == [0, 2]


def test_the_token_itself_is_among_its_alternatives() -> None:
    shape = completion_logprobs([entry(9, "rare", -7.0, (3, "a", -0.2))])
    assert shape.top_logprobs == [{"a": -0.2, "rare": -7.0}]


def test_of_two_tokens_with_one_string_the_likelier_stays() -> None:
    top = ((3, "a", -0.2), (4, "a", -3.0), (5, "b", -4.0))
    assert completion_logprobs([entry(5, "b", -4.0, *top)]).top_logprobs == [{"a": -0.2, "b": -4.0}]
    assert completion_logprobs([entry(4, "a", -3.0, *top)]).top_logprobs == [{"a": -0.2, "b": -4.0}]
    by_id = completion_logprobs([entry(4, "a", -3.0, *top)], as_token_ids=True)
    assert by_id.tokens == ["token_id:4"]
    assert by_id.top_logprobs == [{"token_id:3": -0.2, "token_id:4": -3.0, "token_id:5": -4.0}]


def test_chat_shape() -> None:
    content = chat_logprobs([entry(1, "é", -0.5, (1, "é", -0.5), (2, "e", -1.0))])
    assert orjson.loads(orjson.dumps(content)) == [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "e", "logprob": -1.0, "bytes": [101]},
            ],
        }
    ]
    assert chat_logprobs([entry(7, "x", -0.5)], as_token_ids=True)[0].token == "token_id:7"


def test_bytes_that_are_no_text_are_written_out(smol: Tokenizer) -> None:
    ids = smol.encode("😀", add_special_tokens=False)
    names = [alternative(smol, token, -1.0) for token in ids]
    assert b"".join(name.data for name in names) == "😀".encode()
    assert names[0].text == "bytes:" + "".join(f"\\x{byte:02x}" for byte in names[0].data)
    assert alternative(smol, smol.encode(" the", add_special_tokens=False)[0], -1.0).text == " the"


def test_an_entry_reads_the_sampler_s_record(smol: Tokenizer) -> None:
    the, a = (smol.encode(text, add_special_tokens=False)[0] for text in (" the", " a"))
    value = Logprob(-2.0, 2, [a], [-math.inf])
    read = token_entry(smol, the, " the", 5, value)
    assert (read.logprob, read.data, read.offset) == (-2.0, b" the", 5)
    assert read.top == (Alternative(a, " a", b" a", FLOOR),)
    hidden = token_entry(smol, 2, "", 5, value, shown=False)
    assert (hidden.text, hidden.data) == ("", b"")


def test_prompt_logprobs_by_id(smol: Tokenizer) -> None:
    the, a = (smol.encode(text, add_special_tokens=False)[0] for text in (" the", " a"))
    shape = prompt_logprobs(smol, [a, the], [Logprob(-2.0, 2, [a, the], [-0.1, -2.0])])
    assert orjson.loads(orjson.dumps(shape)) == [
        None,
        {
            str(a): {"logprob": -0.1, "rank": 1, "decoded_token": " a"},
            str(the): {"logprob": -2.0, "rank": 2, "decoded_token": " the"},
        },
    ]
