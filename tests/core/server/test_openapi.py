"""``/openapi.json`` is true: what it documents is accepted, what is accepted it documents."""

from typing import Any

import pytest
from pydantic import BaseModel

from minisgl import request as request_module
from minisgl.server.fields import RequestModel
from minisgl.server.route_docs import ROUTE_DOCS
from support.http_asks import CHAT, HELLO, TEXT, error_of, run
from support.in_process_engine import Served

BASES: dict[str, dict[str, Any]] = {
    CHAT: {**HELLO, "max_tokens": 2},
    TEXT: {"prompt": "Hello", "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
BODIES: list[tuple[str, type[RequestModel]]] = [
    (doc.path, doc.body) for doc in ROUTE_DOCS if doc.body is not None and doc.path in BASES
]

# What a field needs beside it, and values that no schema can make up.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    (CHAT, "stream_options"): {"stream": True},
    (CHAT, "top_logprobs"): {"logprobs": True},
    (CHAT, "min_tokens"): {"max_tokens": None},
    (TEXT, "stream_options"): {"stream": True},
    (TEXT, "min_tokens"): {"max_tokens": None},
    (TEXT, "max_tokens"): {"echo": True},
    (TEXT, "best_of"): {"n": 128},
    ("/tokenize", "messages"): {"prompt": None},
}
EXAMPLES: dict[str, Any] = {
    "messages": HELLO["messages"],
    "model": "org/fake-model",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "stream_options": {"include_usage": True},
    "guided_json": {"type": "object"},
    "json_schema": '{"type": "object"}',
    "logit_bias": {"70": 1.5},
    "add_special_tokens": False,
    "tokens": [5, 6],
    "tools": [],
    "tool_choice": "none",
}


@pytest.fixture(autouse=True)
def everything_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is an echo, so what it cannot do yet does not matter here."""
    monkeypatch.setattr(request_module, "_NOT_YET", {}, raising=False)


def page(**options: Any) -> dict[str, Any]:
    async def scenario(server: Served) -> dict[str, Any]:
        response = await server.http.get("/openapi.json")
        assert response.status_code == 200
        return response.json()

    return run(scenario, **options)


def properties_of(model: type[RequestModel]) -> dict[str, Any]:
    return page()["components"]["schemas"][model.__name__]["properties"]


def alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The branches of a field's schema but ``null``, with what is said beside them."""
    beside = {key: value for key, value in schema.items() if key != "anyOf"}
    branches = schema.get("anyOf", [{}])
    return [{**branch, **beside} for branch in branches if branch.get("type") != "null"]


def example(name: str, schema: dict[str, Any]) -> Any:
    first = alternatives(schema)[0]
    for choices in (schema.get("enum"), first.get("enum")):
        if choices is not None:
            return choices[0]
    made_up: dict[str, Any] = {
        "integer": max(first.get("minimum", 1), 1),
        "number": 1.0,
        "boolean": True,
        "array": [5 if first.get("items", {}).get("type") == "integer" else "abc"],
        "object": {},
    }
    return EXAMPLES.get(name, made_up.get(first.get("type", ""), "abc"))


@pytest.mark.parametrize(("route", "model"), BODIES, ids=[route for route, _ in BODIES])
def test_every_field_that_is_accepted_is_documented_and_nothing_else(route, model) -> None:
    names = {field.alias or name for name, field in model.model_fields.items()}
    properties = properties_of(model)
    assert properties.keys() == names | model.not_offered.keys()
    assert all(schema.get("description") for schema in properties.values())


@pytest.mark.parametrize(("route", "model"), BODIES, ids=[route for route, _ in BODIES])
def test_every_documented_field_is_accepted_by_a_strict_server(route, model) -> None:
    async def scenario(server: Served) -> dict[str, Any]:
        refused = {}
        for name, schema in properties_of_page(await documented(server), model).items():
            value = example(name, schema)
            if name == "request_id":
                value = "mine"
            body = {**BASES[route], **BESIDE.get((route, name), {}), name: value}
            response = await server.http.post(route, json=body)
            if response.status_code != 200:
                refused[name] = response.json()
        return refused

    assert run(scenario, strict_requests=True) == {}


async def documented(server: Served) -> dict[str, Any]:
    return (await server.http.get("/openapi.json")).json()


def properties_of_page(found: dict[str, Any], model: type[RequestModel]) -> dict[str, Any]:
    return found["components"]["schemas"][model.__name__]["properties"]


def limits() -> list[tuple[str, str, Any, Any]]:
    """Every documented limit, with a value at it and one beyond it."""
    steps = {"minimum": -1, "maximum": 1}
    found = []
    for route, model in BODIES:
        schema = model.model_json_schema()["properties"]
        for name, field in schema.items():
            for branch in alternatives(field):
                step = 0.001 if branch.get("type") == "number" else 1
                for key, sign in steps.items():
                    if key in branch:
                        limit = branch[key]
                        found.append((route, name, limit, limit + sign * step))
                if "exclusiveMinimum" in branch:
                    found.append((route, name, 0.001, branch["exclusiveMinimum"]))
                if "maxItems" in branch and branch.get("type") == "array":
                    word = "x" if name in {"stop", "bad_words"} else 5
                    found.append(
                        (
                            route,
                            name,
                            [word] * branch["maxItems"],
                            [word] * (branch["maxItems"] + 1),
                        )
                    )
    return found


@pytest.mark.parametrize(
    ("route", "name", "fine", "beyond"), limits(), ids=[f"{x[1]}-{x[0]}" for x in limits()]
)
def test_a_documented_limit_is_where_the_server_draws_it(route, name, fine, beyond) -> None:
    async def scenario(server: Served) -> None:
        beside = BESIDE.get((route, name), {})
        accepted = await server.http.post(route, json={**BASES[route], **beside, name: fine})
        if accepted.status_code == 400:  # the value is fine, and the context has no such room
            assert "exceed the context" in error_of(accepted)["message"]
        refused = await server.http.post(route, json={**BASES[route], **beside, name: beyond})
        assert refused.status_code == 400
        assert error_of(refused)["param"] == name

    run(scenario)


def test_a_strict_server_says_so_on_its_page() -> None:
    for strict in (False, True):
        schemas = page(strict_requests=strict)["components"]["schemas"]
        assert schemas["ChatRequest"]["additionalProperties"] is not strict


def test_every_route_is_documented_with_its_refusals() -> None:
    paths = page()["paths"]
    documented = {(doc.path, doc.method) for doc in ROUTE_DOCS}
    assert {(path, method) for path, methods in paths.items() for method in methods} == documented
    for methods in paths.values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
            assert "200" in operation["responses"]
            assert "422" not in operation["responses"]  # FastAPI's own, which never happens here


def test_every_reference_leads_somewhere_those_of_a_plugins_route_too() -> None:
    class Reply(BaseModel):
        fine: bool

    async def scenario(server: Served) -> dict[str, Any]:
        @server.app.get("/plugin", response_model=Reply)
        async def plugin() -> Reply:
            return Reply(fine=True)

        return await documented(server)

    found = run(scenario)
    assert "Reply" in found["components"]["schemas"]
    assert "/plugin" in found["paths"]

    def references(value: Any) -> set[str]:
        if isinstance(value, list):
            return {name for inner in value for name in references(inner)}
        if not isinstance(value, dict):
            return set()
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own | {name for inner in value.values() for name in references(inner)}

    names = {name.rpartition("/")[2] for name in references(found)}
    assert names <= found["components"]["schemas"].keys()
    assert "``" not in str(found)
