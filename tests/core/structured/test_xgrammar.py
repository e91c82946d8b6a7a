"""XGrammar behind our interface: every text matches, bad grammars are said, hostile ones end."""

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import date, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minisgl.bootstrap.grammars import tokenizer_at
from minisgl.errors import RequestError
from minisgl.request import GrammarKind, GrammarSpec
from minisgl.structured import CompiledGrammar, GrammarContext, mask_words
from minisgl.structured.xgrammar_backend import XGrammarBackend
from support.examples import scaled
from support.grammar_texts import allowed_tokens, random_tokens
from support.patience import PATIENCE
from support.server_process import wait_for
from support.tiny_models import EOS_TOKEN_IDS, VOCAB_SIZE, write_tiny_tokenizer

MODEL_VOCAB = VOCAB_SIZE + 9
"""Models pad their vocabulary; a mask over 272 tokens ends in the middle of a word."""
SOON_S = 2.0
"""Seconds that a hostile grammar may take."""
EOS = frozenset(EOS_TOKEN_IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(path)
    return path


def make(folder: Path, timeout_s: float = PATIENCE) -> XGrammarBackend:
    context = GrammarContext(
        tokenizer=partial(tokenizer_at, folder),
        vocab_size=MODEL_VOCAB,
        eos_token_ids=EOS_TOKEN_IDS,
        compile_timeout_s=timeout_s,
    )
    return XGrammarBackend(context, max_whitespace=2)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[XGrammarBackend]:
    backend = make(folder)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[XGrammarBackend]:
    """Gives up soon."""
    backend = make(folder, SOON_S)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return tokenizer_at(folder)


def texts(
    backend: XGrammarBackend,
    tokenizer: PreTrainedTokenizerBase,
    spec: GrammarSpec,
    *,
    num: int = 20,
    most: int = 150,
) -> list[str]:
    """Random texts of a grammar; those that get too long are left out."""
    grammar = backend.compile(spec)
    closing = frozenset(tokenizer.encode('"}],:'))
    found = [
        random_tokens(grammar, MODEL_VOCAB, EOS, Random(seed), most=most, closing=closing)
        for seed in range(num)
    ]
    return [
        tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        for tokens in found
        if tokens is not None
    ]


def test_any_json_object(backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase) -> None:
    found = texts(backend, tokenizer, GrammarSpec("json_object"))
    assert len(found) > 10
    assert all(isinstance(json.loads(text), dict) for text in found)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-\d{4}", "(?:yes|no)!*", "[a-cé]+", "hello|bye", "", r"^\s?\S$", "[^a]{2}", r"\W\D.",
        r"(?:^|,)[\\\"\n]*(?:x|$)",
    ],
)  # fmt: skip
def test_a_regular_expression_matches_the_whole_text(
    backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase, pattern: str
) -> None:
    found = texts(backend, tokenizer, GrammarSpec("regex", pattern))
    assert found
    assert all(re.search(f"^(?:{pattern})$", text) for text in found)


CHOICES = ["yes", 'say "no"\\', "tab\tline\n", "é 🎉", "a-b[c]", "\\u0041 \\x41", "yes sir"]


def test_choices_of_any_characters(
    backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = texts(backend, tokenizer, GrammarSpec("choice", json.dumps(CHOICES)), num=80)
    assert set(found) == set(CHOICES)


def test_a_grammar(backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase) -> None:
    grammar = 'root ::= "(" root ")" | [0-9]+'
    for text in texts(backend, tokenizer, GrammarSpec("grammar", grammar)):
        depth = text.count("(")
        assert re.fullmatch(rf"\({{{depth}}}\d+\){{{depth}}}", text)


LEAVES: st.SearchStrategy[dict[str, Any]] = st.sampled_from([
    {"type": "integer"}, {"type": "integer", "minimum": -3, "maximum": 120}, {"type": "boolean"},
    {"type": "number"}, {"type": "number", "minimum": 0, "exclusiveMaximum": 2.5},
    {"type": "null"}, {"type": "string"}, {"type": "string", "maxLength": 3}, {"const": {"a": [1]}},
    {"type": "string", "minLength": 2, "maxLength": 4}, {"enum": ['a"\\', 1, None, "é\n"]},
    {"type": "string", "pattern": r"^[^a]{1,3}$"}, {"type": "string", "format": "date"},
    {"type": "string", "pattern": r"^(?:\W|[^\s\d\"][é-🎉]?)$"},
    {"type": "string", "pattern": r".\S\D"},
    {"type": "object", "patternProperties": {r"^\w$": {"type": "null"}}},
    {"type": ["string", "null"], "pattern": r"^\d\s?$"}, {"type": "string", "format": "uuid"},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50}, {"$ref": "#/$defs/leaf"},
])  # fmt: skip


def inner(schemas: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "c d", 'q"', "é"])
    properties = st.dictionaries(names, schemas, max_size=3)
    objects = st.builds(
        lambda properties, required, more: {
            "type": "object", "properties": properties, "required": required, **more,
        },
        properties,
        st.lists(names, unique=True, max_size=2),
        st.sampled_from([{}, *({"additionalProperties": one} for one in (True, {"type": "null"}))]),
    )  # fmt: skip
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 3},
        schemas,
        st.integers(0, 2),
    )
    tuples = st.builds(
        lambda items: {
            "type": "array",
            "prefixItems": items,
            "items": False,
            "minItems": len(items),
        },
        st.lists(schemas, min_size=1, max_size=2),
    )
    unions = st.builds(
        lambda key, one, other: {key: [one, other]}, st.sampled_from(["anyOf"]), schemas, schemas
    )
    return objects | arrays | tuples | unions | schemas.map(lambda one: {"allOf": [one]})


def is_time(text: str) -> bool:
    """Whether it is RFC 3339's full-time, as far as ``datetime`` knows."""
    moment = datetime.fromisoformat(f"2000-01-01T{text}")
    return moment.tzinfo is not None and text[2] == text[5] == ":"


def is_hostname(text: str) -> bool:
    return len(text) < 254 and all(
        0 < len(one) < 64 and one[0] != "-" != one[-1] and re.fullmatch("[a-z0-9-]+", one)
        for one in text.split(".")
    )


FORMATS: dict[str, Callable[[str], object]] = {
    "date": lambda text: len(text) == 10 and date.fromisoformat(text),
    "time": is_time,
    "date-time": lambda text: text[10] == "T" and datetime.fromisoformat(text).tzinfo,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "hostname": is_hostname,
    "uuid": uuid.UUID,
    "email": lambda text: re.fullmatch(r"(?:[^\s@]+|\".*\")@[^\s@]+", text),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_text_of_a_format_is_of_it(
    backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """Catches: a 31st of February, octets with zeros in front, leap seconds."""
    spec = GrammarSpec("json_schema", json.dumps({"type": "string", "format": name}))
    found = {json.loads(text) for text in texts(backend, tokenizer, spec, num=300)}
    assert len(found) > 50
    for text in found:
        assert FORMATS[name](text), text


SURROGATES_AND_LONG_FORMS = (
    b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x80\x80\x80",
    b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80",
)  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", ".*"),
        GrammarSpec("regex", "[^a]*"),
        GrammarSpec("grammar", "root ::= [^a]*"),
        GrammarSpec("grammar", r"root ::= [\u0080-\U0010ffff]*"),
        GrammarSpec("json_schema", '{"type": "string"}'),
        GrammarSpec("json_schema", '{"type": "string", "maxLength": 9}'),
        GrammarSpec("json_schema", '{"type": "string", "pattern": "^[^a]*$"}'),
        GrammarSpec("json_object"),
    ],
    ids=lambda spec: f"{spec.kind} {spec.value}",
)
def test_no_text_holds_bytes_that_are_no_characters(
    backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase, spec: GrammarSpec
) -> None:
    """Halves of surrogate pairs and long forms; those around them still come."""
    begin = {"json_schema": '"', "json_object": '{"'}.get(spec.kind, "")
    prefix = tokenizer.encode(begin, add_special_tokens=False)
    grammar = backend.compile(spec)
    for invalid in SURROGATES_AND_LONG_FORMS:
        assert not follows(grammar, prefix, byte_tokens(tokenizer, invalid)), invalid
    for valid in ("\ud7ff", "\ue000", "\u0800", "\uffff", "\U00010000", "\U0010ffff"):
        assert follows(grammar, prefix, byte_tokens(tokenizer, valid.encode())), valid


def byte_tokens(tokenizer: PreTrainedTokenizerBase, text: bytes) -> list[int]:
    """One token a byte."""
    alphabet = bytes_to_unicode()
    return [tokenizer.convert_tokens_to_ids(alphabet[byte]) for byte in text]


def follows(grammar: CompiledGrammar, prefix: list[int], tokens: list[int]) -> bool:
    """Whether the masks let ``tokens`` come after ``prefix``."""
    matcher, mask = grammar.matcher(), np.zeros(mask_words(MODEL_VOCAB), np.int32)
    for place, token in enumerate([*prefix, *tokens]):
        matcher.fill_mask(mask)
        if token not in allowed_tokens(mask, MODEL_VOCAB):
            assert place >= len(prefix)
            return False
        assert matcher.accept(token)
    return True


@given(st.recursive(LEAVES, inner, max_leaves=5), st.integers(0, 10**6))
@settings(max_examples=scaled(100))  # an example forks a process
def test_every_text_of_a_schema_validates(
    backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase, schema: dict[str, Any], seed: int
) -> None:
    """Catches: whatever XGrammar passes over of a schema, control characters in strings."""
    schema = {**schema, "$defs": {"leaf": {"type": "integer"}}}
    grammar = backend.compile(GrammarSpec("json_schema", json.dumps(schema)))
    closing = frozenset(tokenizer.encode('"}],:'))
    tokens = random_tokens(grammar, MODEL_VOCAB, EOS, Random(seed), most=200, closing=closing)
    if tokens is not None:
        text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        checker = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def test_special_tokens_and_padding_may_never_come(
    backend: XGrammarBackend, tokenizer: PreTrainedTokenizerBase
) -> None:
    """They are no text: a client that leaves them out of it would see half of the JSON."""
    matcher = backend.compile(GrammarSpec("regex", ".*")).matcher()
    mask = np.zeros(mask_words(MODEL_VOCAB), dtype=np.int32)
    matcher.fill_mask(mask)
    may = set(allowed_tokens(mask, MODEL_VOCAB))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - EOS
    assert special
    assert not may & special
    assert may >= EOS
    assert max(may) < VOCAB_SIZE


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", "{", "it is no JSON"),
        ("json_schema", '{"$ref": "http://localhost:1/x.json"}', "nothing is fetched"),
        ("json_schema", '{"$ref": "#/$defs/missing"}', "missing"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}', "minimum"),
        ("json_schema", "false", "cannot accept any value"),
        ("regex", "(a", "not closed"),
        ("regex", "(?=a)", "look-ahead"),
        ("grammar", "root ::= nothing", '"nothing" is not defined'),
        ("grammar", "", ""),
        ("choice", "[]", "at least one"),
        ("choice", '["a", ""]', "none of them empty"),
        ("choice", '{"a": 1}', "must be a JSON list of strings"),
    ],
)
def test_a_grammar_at_fault_is_a_400_that_says_how(
    backend: XGrammarBackend, kind: GrammarKind, value: str, message: str
) -> None:
    with pytest.raises(RequestError) as refused:
        backend.compile(GrammarSpec(kind, value))
    assert message in refused.value.message
    assert f"grammar ({kind}) is not accepted" in refused.value.message
    assert (refused.value.status, refused.value.param) == (400, "grammar")
    assert ".cc" not in refused.value.message


def nested(levels: int) -> str:
    return '{"type":"object","properties":{"a":' * levels + "true" + "}}" * levels


STRING = {"type": "string"}
HOSTILE: dict[str, GrammarSpec] = {
    "nested schema": GrammarSpec("json_schema", nested(100_00)),
    "megabyte of properties": GrammarSpec(
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": STRING for i in range(30_000)}}),
    ),
    "megabyte of brackets": GrammarSpec("json_schema", "[" * 2**20),
    "repetitions of repetitions": GrammarSpec("regex", "(((a{1,999}){1,999}){1,999}){1,999}"),
    "catastrophic": GrammarSpec("regex", "((((a+)+)+)+)+$"),
    "brackets of a regex": GrammarSpec("regex", "(" * 100_000 + "a" + ")" * 100_000),
    "rule that is itself": GrammarSpec("grammar", "root ::= root"),
    "ambiguous": GrammarSpec("grammar", 'root ::= root root root | "a" | ""'),
    "brackets of a grammar": GrammarSpec(
        "grammar", "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000
    ),
    "rules in a circle": GrammarSpec("grammar", "root ::= a\na ::= b\nb ::= root"),
    "schema in a circle": GrammarSpec("json_schema", '{"$ref": "#"}'),
    "exponential schema": GrammarSpec(
        "json_schema",
        json.dumps({
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 9}
                for i in range(30)
            } | {"d30": {"type": "integer"}},
        }),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_in_time_and_harm_nobody(hasty: XGrammarBackend, name: str) -> None:
    """Compiled or refused: what counts is that it ends, and that the next one is compiled.

    Some of them would take hours, or all memory.
    """
    refused = None
    try:
        matcher = hasty.compile(HOSTILE[name]).matcher()
        matcher.fill_mask(np.zeros(mask_words(MODEL_VOCAB), dtype=np.int32))
    except RequestError as error:
        refused = error
    assert refused is None or refused.status == 400

    def next_one_compiles() -> bool:
        # On a busy machine it may be late itself.
        with contextlib.suppress(RequestError):
            return hasty.compile(GrammarSpec("regex", "a")).num_bytes > 0
        return False

    wait_for(next_one_compiles, "the next grammar")


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= s\ns ::= s s | s s s | s s s s | "a" | "b" | ""',
        'root ::= root root root | "a" | ""',
    ],
)
def test_grammars_that_get_slower_with_every_token_are_refused(
    backend: XGrammarBackend, grammar: str
) -> None:
    """The scheduler would have to wait for them."""
    with pytest.raises(RequestError, match="make it less ambiguous"):
        backend.compile(GrammarSpec("grammar", grammar))


def test_a_helper_that_is_killed_is_started_again_and_ends_with_its_backend(folder: Path) -> None:
    backend = make(folder)
    first = backend._helper
    os.kill(first._process.pid, signal.SIGKILL)
    wait_for(lambda: not first.alive, "the end of the helper")
    assert backend.compile(GrammarSpec("regex", "a")).num_bytes > 0
    process = backend._helper._process
    del backend
    assert process.wait(PATIENCE) == -signal.SIGKILL


def test_a_backend_that_is_closed_has_no_helper_and_compiles_no_more(folder: Path) -> None:
    backend = make(folder)
    backend.close()
    assert backend._helper._process.returncode is not None
    with pytest.raises(RuntimeError, match="closed"):
        backend.compile(GrammarSpec("regex", "a"))
    backend.close()


ORPHAN = """
import os, signal, sys
from functools import partial
from pathlib import Path

from minisgl.bootstrap.grammars import tokenizer_at
from minisgl.structured import GrammarContext
from minisgl.structured.xgrammar_backend import XGrammarBackend

context = GrammarContext(
    tokenizer=partial(tokenizer_at, Path(sys.argv[1])), vocab_size=272, eos_token_ids=(2, 0),
    compile_timeout_s=5.0,
)
print(XGrammarBackend(context, None)._helper._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_helper_ends_with_a_process_that_is_killed(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", ORPHAN, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    helper = Path(f"/proc/{done.stdout.strip()}")
    wait_for(lambda: not helper.exists(), "the end of the helper")


def test_a_helper_that_cannot_start_says_why(folder: Path) -> None:
    context = GrammarContext(
        tokenizer=partial(tokenizer_at, folder / "nowhere"), vocab_size=9, eos_token_ids=(1,),
        compile_timeout_s=1.0,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="nowhere"):
        XGrammarBackend(context, None)
