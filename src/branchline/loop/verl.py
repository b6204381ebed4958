"""verl's configuration and classes for the agent loop: multi-turn options, tools and interactions.

    config = read_verl_config({"tool_config_path": "tools.yaml", "max_assistant_turns": 5})
    context = AgentContext(model, config.tools, config.interactions, config.limits)

The files have verl's form. A class in them is a Branchline class, built from its `config`, or one with
verl's methods, which an adapter calls: `VerlTool` and `VerlInteraction`. A field that has no meaning here is
refused by name. Rows of verl's datasets are read by `Task.read`.
"""

from __future__ import annotations

import importlib
import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from branchline.core.errors import InputError
from branchline.core.message import Media, Message
from branchline.core.reader import write_message
from branchline.loop.interaction import BaseInteraction, InteractionResponse
from branchline.loop.registry import InteractionRegistry, ToolRegistry
from branchline.loop.task import KeptPart, LoopLimits
from branchline.loop.tools.base import BaseTool, ToolResult, media_from_bytes

_KEPT_BY_SIDE: dict[str, KeptPart] = {"left": "head", "right": "tail", "middle": "both"}
"""verl names the side from which a text is read: `left` keeps its head."""
_WITHOUT_EFFECT: dict[str, tuple[type, ...]] = {
    "_target_": (str,),
    # The codec detects the format of tool calls in the chat template.
    "format": (str,),
    # Sampled ids are never encoded again, and prompts are exact.
    "use_inference_chat_template": (bool,),
    "tokenization_sanity_check_mode": (str, bool),
    # A rollout's `n`.
    "num_repeat_rollouts": (),
}
"""Options that say nothing here: the types of their values, besides null."""
_MULTI_TURN = ("actor_rollout_ref", "rollout", "multi_turn")


@dataclass(frozen=True)
class VerlConfig:
    """What verl's `multi_turn` options mean here."""

    limits: LoopLimits
    tools: ToolRegistry
    interactions: InteractionRegistry


def read_verl_config(multi_turn: Mapping[str, Any]) -> VerlConfig:
    """The `actor_rollout_ref.rollout.multi_turn` options of verl. Raises InputError for an unknown one.

    verl measures tool responses in characters, and 0 turns means no limit.

    >>> read_verl_config({"tool_response_truncate_side": "left"}).limits.tool_response_keep
    'head'
    """
    options = dict(multi_turn)
    if options.pop("enable", True) is not True:
        raise InputError("multi_turn.enable: got False, expected True, or the agent `single_turn_agent`")
    limits: dict[str, Any] = {"tool_response_unit": "characters"}
    for name in ("max_user_turns", "max_assistant_turns"):
        limits[name] = options.pop(name, None) or None
    if (parallel := options.pop("max_parallel_calls", None)) is not None:
        limits["max_parallel_calls"] = parallel
    limits["tool_response_length"] = options.pop("max_tool_response_length", None)
    side = options.pop("tool_response_truncate_side", "middle")
    if side not in _KEPT_BY_SIDE:
        expected = ", ".join(_KEPT_BY_SIDE)
        raise InputError(f"multi_turn.tool_response_truncate_side: got {side!r}, expected one of {expected}")
    limits["tool_response_keep"] = _KEPT_BY_SIDE[side]
    tools, interactions = options.pop("tool_config_path", None), options.pop("interaction_config_path", None)
    for name, value in options.items():
        types = _WITHOUT_EFFECT.get(name)
        if types is None:
            raise InputError(f"multi_turn.{name}: got {value!r}, expected no such option")
        if value is not None and not isinstance(value, types):
            expected = " or ".join(["null", *(kind.__name__ for kind in types)])
            raise InputError(f"multi_turn.{name}: got {value!r}, expected {expected}")
    return VerlConfig(
        LoopLimits(**limits),
        load_verl_tools(tools) if tools else ToolRegistry(),
        load_verl_interactions(interactions) if interactions else InteractionRegistry(),
    )


def read_verl_file(path: str | Path) -> VerlConfig:
    """The tools and the multi-turn options of a YAML file of verl's: a `tools` list, `multi_turn` options
    with or without the names that they are nested in, or both. Files that it names are relative to the
    working directory, as in verl, else to its own folder.
    """
    path = Path(path)
    content = _read_yaml(path)
    try:
        if not isinstance(content, Mapping):
            raise InputError(f"got {content!r}, expected an object with `tools` or options of `multi_turn`")
        options = dict(content)
        for name in _MULTI_TURN:
            nested = options.get(name)
            if isinstance(nested, Mapping):
                options = {**nested, **({"tools": options["tools"]} if "tools" in options else {})}
        tools = options.pop("tools", None)
        if tools is not None and options.get("tool_config_path"):
            raise InputError("tools: got it and tool_config_path, expected one of them")
        for name in ("tool_config_path", "interaction_config_path"):
            if (named := options.get(name)) and not Path(named).exists():
                options[name] = str(path.parent / named)
        config = read_verl_config(options)
        return config if tools is None else replace(config, tools=load_verl_tools({"tools": tools}))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def load_verl_tools(source: str | Path | Mapping[str, Any]) -> ToolRegistry:
    """The tools of a file with verl's `tools` list, or of its content."""
    registry = ToolRegistry()
    for where, item in _items(source, "tools", ("class_name", "config", "tool_schema")):
        config = dict(item.get("config") or {})
        kind = config.get("type", "native")
        if kind != "native":
            raise InputError(f"{where}.config.type: got {kind!r}, expected native; for MCP use McpTools")
        cls, schema = _load_class(where, item), item.get("tool_schema")
        if hasattr(cls, "restore"):
            config.pop("type", None)
            tool = cls(**config)
            if schema is not None and msgspec.to_builtins(tool.schema) != schema:
                raise InputError(f"{where}.tool_schema: got another one than the class has, expected none")
            registry.add(tool)
        else:
            registry.add(VerlTool(cls(config=config, tool_schema=_schema_object(schema))))
    return registry


def load_verl_interactions(source: str | Path | Mapping[str, Any]) -> InteractionRegistry:
    """The interactions of a file with verl's `interaction` list, or of its content.

    As in verl, an interaction without a name has that of its class in lower case without `Interaction`.
    """
    registry = InteractionRegistry()
    for where, item in _items(source, "interaction", ("name", "class_name", "config")):
        cls, config = _load_class(where, item), dict(item.get("config") or {})
        name = item.get("name") or cls.__name__.removesuffix("Interaction").lower()
        if hasattr(cls, "restore"):
            interaction = cls(**config)
            interaction.name = name
            registry.add(interaction)
        else:
            registry.add(VerlInteraction(cls(config={**config, "name": name}), name))
    return registry


# -- classes with verl's methods ---------------------------------------------------------------------


class VerlTool(BaseTool):
    """The adapter of a tool with verl's methods. verl creates an instance for each call; here there is one
    for each trajectory, so that `calc_reward` covers all calls."""

    def __init__(self, tool: Any) -> None:
        self.name = tool.name
        self.schema = _schema_mapping(tool.tool_schema)
        self._tool = tool

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        created = await self._tool.create(trajectory, create_kwargs=arguments)
        return created[0] if isinstance(created, tuple) else created

    async def execute(self, instance: Any, arguments: Mapping[str, Any], **kwargs: Any) -> ToolResult:
        response, reward, metrics = await self._tool.execute(instance, dict(arguments), **kwargs)
        if isinstance(response, str):
            return ToolResult(response, reward=reward, extras=metrics or {})
        if getattr(response, "video", None):
            raise TypeError("video: got one, expected text or images, as in verl")
        images = [_to_media(image) for image in getattr(response, "image", None) or () if image is not None]
        return ToolResult(response.text or "", tuple(images), reward, metrics or {})

    async def calc_reward(self, instance: Any, **kwargs: Any) -> float | None:
        """None for a class that does not override verl's default, which is 0.0."""
        if not _overrides(self._tool, "calc_reward", "verl.tools.base_tool"):
            return None
        reward: float | None = await self._tool.calc_reward(instance, **kwargs)
        return reward

    async def release(self, instance: Any, **kwargs: Any) -> None:
        await self._tool.release(instance, **kwargs)


class VerlInteraction(BaseInteraction):
    """An interaction with verl's methods; its state is the instance id and the task's arguments."""

    def __init__(self, interaction: Any, name: str) -> None:
        self.name = name
        self._interaction = interaction

    async def start(self, trajectory: str, **arguments: Any) -> tuple[Any, str | None]:
        arguments = {"name": self.name, **arguments}
        instance_id = await self._interaction.start_interaction(trajectory, **arguments)
        return (instance_id or trajectory, arguments), None

    async def respond(self, state: Any, messages: Sequence[Message]) -> InteractionResponse:
        instance_id, arguments = state
        shown = [write_message(message) for message in messages]
        response = await self._interaction.generate_response(instance_id, shown, **arguments)
        terminate, content, score, extras = response
        return InteractionResponse(bool(terminate), content or "", score, extras or {})

    async def score(self, state: Any) -> float | None:
        """None for a class that does not override verl's default, which is 0.0."""
        if not _overrides(self._interaction, "calculate_score", "verl.interactions.base"):
            return None
        score: float | None = await _call_with_id(self._interaction.calculate_score, state[0])
        return score

    async def finalize(self, state: Any) -> None:
        await _call_with_id(self._interaction.finalize_interaction, state[0])


async def _call_with_id(method: Any, instance_id: Any) -> Any:
    """verl's base class takes no instance id here, and its own subclasses do."""
    takes_id = bool(inspect.signature(method).parameters)
    return await (method(instance_id) if takes_id else method())


def _overrides(item: object, method: str, base_module: str) -> bool:
    owner = next((cls for cls in type(item).__mro__ if method in vars(cls)), None)
    return owner is not None and owner.__module__ != base_module


def _to_media(image: Any) -> Media:
    """An image as bytes, or a PIL image."""
    if isinstance(image, bytes):
        return media_from_bytes(image)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return media_from_bytes(buffer.getvalue(), "image/png")


# -- files -------------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> object:
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"{path}: got a file that cannot be read ({problem}), expected YAML") from error


def _items(
    source: str | Path | Mapping[str, Any], field: str, known: Sequence[str]
) -> list[tuple[str, Mapping[str, Any]]]:
    """The entries of a list, each with its place for error messages."""
    content: Any = source
    if not isinstance(source, Mapping):
        content = _read_yaml(Path(source))
    if not isinstance(content, Mapping) or list(content) != [field] or not isinstance(content[field], list):
        raise InputError(f"{field}: got {content!r}, expected an object with the list {field!r} only")
    for index, item in enumerate(content[field]):
        if not isinstance(item, Mapping):
            raise InputError(f"{field}[{index}]: got {item!r}, expected an object")
        for name in item:
            if name not in known:
                raise InputError(f"{field}[{index}]: got {name!r}, expected any of {', '.join(known)}")
    return [(f"{field}[{index}]", item) for index, item in enumerate(content[field])]


def _load_class(where: str, item: Mapping[str, Any]) -> Any:
    path = item.get("class_name")
    module, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{where}.class_name: got {path!r}, expected an importable class: {error}"
        ) from error


def _schema_object(schema: Any) -> Any:
    """A schema with attributes, as verl's classes read it: verl's own class where verl is installed."""
    if schema is None:
        return None
    try:
        schemas = importlib.import_module("verl.tools.schemas")
    except ImportError:
        return _Namespace(schema)
    return schemas.OpenAIFunctionToolSchema.model_validate(schema)


class _Namespace(SimpleNamespace):
    """A mapping as attributes, with the method of verl's schemas that returns the mapping."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(**{k: _Namespace(v) if isinstance(v, Mapping) else v for k, v in content.items()})
        self._content = dict(content)

    def model_dump(self, **_options: Any) -> dict[str, Any]:
        return self._content


def _schema_mapping(schema: Any) -> Mapping[str, Any]:
    if isinstance(schema, Mapping):
        return schema
    mapping: Mapping[str, Any] = schema.model_dump(exclude_unset=True, exclude_none=True)
    return mapping
