"""``tools`` and ``tool_choice`` of a request: checked, as a grammar, and read again.

Where a call is required, the model's text is constrained: to a list of ``{"name", "parameters"}``
for ``required``, to the arguments alone for a named function (vLLM's convention). Models without a
tool parser can do that, too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from minisgl.errors import RequestError
from minisgl.parsing.interface import ParserContext, TextParser
from minisgl.parsing.pulled import PulledParser, Steps
from minisgl.request import GrammarSpec

MAX_TOOLS: Final = 1024
MAX_NAME: Final = 256

NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function without a schema: OpenAI documents that it takes none."""

Tool = Mapping[str, Any]
Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request wants of tools, checked.

    Attributes:
        tools: those that the answer may call, each ``{"type": "function", "function": {...}}``.
        places: where each of them stands in the request's list.
        forbidden: names of the request's other functions.
        mode: whether it may, must, or must call the one that is left.
        parallel: whether it may call several.
    """

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True
    places: tuple[int, ...] = ()
    forbidden: frozenset[str] = frozenset()

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """What the chat template shows to the model."""
        return [dict(tool) for tool in self.tools]

    def grammar_field(self) -> str | None:
        """Return the field that an error of ``grammar`` is about, if there is a grammar.

        Where several tools make the grammar, its definitions are named after the field of each.
        """
        if self.mode not in ("required", "named"):
            return None
        return _parameters(self.places[0]) if len(self.places) == 1 else "tools"

    def grammar(self) -> GrammarSpec | None:
        """Return what the text must look like, if a call is required."""
        if self.mode == "named":
            schema = self.tools[0]["function"].get("parameters") or NO_PARAMETERS
            return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))
        if self.mode != "required":
            return None
        definitions: dict[str, Any] = {}
        calls = [
            _call_schema(tool, _parameters(place), definitions)
            for tool, place in zip(self.tools, self.places, strict=True)
        ]
        schema = {
            "type": "array",
            "minItems": 1,
            "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
            "$defs": definitions,
        }
        if not self.parallel:
            schema["maxItems"] = 1
        return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))

    def constrained_parser(self, context: ParserContext) -> TextParser:
        """Return the parser of text that ``grammar`` has constrained."""
        if self.mode == "named":
            return _NamedCall(context, str(self.tools[0]["function"]["name"]))
        assert self.mode == "required"
        return _RequiredCalls(context)


def plan_tools(tools: Any, tool_choice: Any = None, *, parallel: bool | None = None) -> ToolPlan:
    """Return what ``tools`` and ``tool_choice`` of a request mean.

    ``tool_choice`` is ``none``, ``auto`` (the default with tools), ``required``,
    ``{"type": "function", "function": {"name": ...}}``, or ``{"type": "allowed_tools", ...}``.
    With ``none`` the model does not get to know the tools.

    Raises:
        RequestError: either is malformed, or the choice names no tool that is there.
    """
    checked = check_tools(tools)
    places, forbidden = tuple(range(len(checked))), frozenset[str]()
    parallel = parallel is not False
    if tool_choice is None:
        tool_choice = "auto" if checked else "none"
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        places, tool_choice = _allowed(checked, tool_choice)
        names = {str(tool["function"]["name"]) for tool in checked}
        checked = tuple(checked[place] for place in places)
        forbidden = frozenset(names.difference(tool["function"]["name"] for tool in checked))
    if isinstance(tool_choice, Mapping):
        place = _place_of(checked, _chosen_name(tool_choice), "tool_choice")
        return ToolPlan((checked[place],), "named", parallel, (place,))
    match tool_choice:
        case "none":
            return ToolPlan(parallel=parallel)
        case "auto":
            mode: Mode = "auto" if checked else "none"
            return ToolPlan(checked, mode, parallel, places, forbidden)
        case "required":
            if not checked:
                raise _error("tool_choice", "is 'required', but the request has no tools")
            return ToolPlan(checked, "required", parallel, places)
    raise _error(
        "tool_choice",
        "must be 'none', 'auto', 'required' or an object that names a function, "
        f"got {tool_choice!r}",
    )


def tool_constraint(
    tools: Any, tool_choice: Any = None, parallel: bool | None = None
) -> GrammarSpec | None:
    """Return the grammar that a choice of tools demands, if any; errors as for ``plan_tools``."""
    return plan_tools(tools, tool_choice, parallel=parallel).grammar()


def check_tools(tools: Any, called: str = "tools") -> tuple[Tool, ...]:
    """Return a request's tools, each known to be a function with a name.

    Args:
        tools: whatever was sent.
        called: the field that holds them.

    Raises:
        RequestError: they are malformed; ``param`` names the place.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str) or len(tools) > MAX_TOOLS:
        raise _error(called, f"must be a list of at most {MAX_TOOLS} tools, got {tools!r}")
    for index, tool in enumerate(tools):
        where = f"{called}[{index}]"
        if not isinstance(tool, Mapping):
            raise _error(where, f"must be an object, got {tool!r}")
        if tool.get("type", "function") != "function":
            raise _error(f"{where}.type", f"must be 'function', got {tool['type']!r}")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _error(f"{where}.function", f"must be an object, got {function!r}")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise _error(
                f"{where}.function.name",
                f"must be a string of 1 to {MAX_NAME} characters, got {name!r}",
            )
        for field, kind, what in (
            ("description", str, "a string"),
            ("parameters", Mapping, "a JSON schema"),
            ("strict", bool, "true or false"),
        ):
            value = function.get(field)
            if value is not None and not isinstance(value, kind):
                raise _error(f"{where}.function.{field}", f"must be {what}, got {value!r}")
    return tuple({**tool, "type": "function"} for tool in tools)


def _allowed(tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    """Return the places of the tools that ``allowed_tools`` leaves, and its mode."""
    where = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise _error(where, f"must be an object, got {allowed!r}")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise _error(f"{where}.mode", f"must be 'auto' or 'required', got {mode!r}")
    named = check_tools(allowed.get("tools", []), f"{where}.tools")
    if not named:
        raise _error(f"{where}.tools", "must name at least one tool")
    kept = {
        _place_of(tools, tool["function"]["name"], f"{where}.tools[{number}]")
        for number, tool in enumerate(named)
    }
    return tuple(sorted(kept)), mode


def _chosen_name(choice: Mapping[str, Any]) -> str:
    if choice.get("type", "function") != "function":
        raise _error("tool_choice.type", f"must be 'function', got {choice['type']!r}")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _error("tool_choice.function.name", f"must be a string, got {name!r}")
    return name


def _place_of(tools: Sequence[Tool], name: str, where: str) -> int:
    for place, tool in enumerate(tools):
        if tool["function"]["name"] == name:
            return place
    known = ", ".join(repr(tool["function"]["name"]) for tool in tools) or "none"
    raise _error(where, f"names the function {name!r}; the request's tools have: {known}")


def _parameters(place: int) -> str:
    """Return the name of the field that holds the schema of a tool."""
    return f"tools[{place}].function.parameters"


def _call_schema(tool: Tool, key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, and put that of its parameters among the definitions."""
    function = tool["function"]
    parameters = function.get("parameters") or NO_PARAMETERS
    definitions[key] = _moved(parameters, f"#/$defs/{key}")
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [function["name"]]},
            "parameters": {"$ref": f"#/$defs/{key}"},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references to its own root point to where it is now."""
    if isinstance(schema, Mapping):
        return {
            key: f"{root}{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema


class _RequiredCalls(PulledParser):
    """A JSON list of ``{"name", "parameters"}``; whatever else comes is content."""

    drops_half_calls = True

    def _read(self) -> Steps[None]:
        if bracket := (yield from self._skip("[")):
            yield from self._call_list(bracket, self._names.__contains__)
        yield from self._content_until()


class _NamedCall(PulledParser):
    """The arguments of a function that is known beforehand."""

    def __init__(self, context: ParserContext, name: str) -> None:
        self._name = name
        super().__init__(context)

    def _read(self) -> Steps[None]:
        yield from self._argument_object("", self._name)
        yield from self._content_until()


def _error(where: str, what: str) -> RequestError:
    """Return the refusal of a field; long values are cut."""
    text = what if len(what) <= 400 else f"{what[:400]}..."
    return RequestError(f"{where} {text}", param=where)
