"""What a tool is: a name, a schema, and a life beside one trajectory.

There is one tool per name and one instance of it per trajectory: `create` makes it, `execute` works on it as
often as the model asks, `calc_reward` judges it at the end, `release` puts it away. A `Workshop` calls each
at the right time; whoever writes a tool only writes these four, and may leave out all but `execute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from branchline.core.message import Media


@dataclass(frozen=True)
class ToolResult:
    """What the model is shown, and what the trainer gets."""

    content: str = ""
    media: tuple[Media, ...] = ()
    """Images, video and sound; they follow the text."""
    reward: float | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    is_error: bool = False
    """The tool says that it failed; its text says how, and the model is shown it as it is."""


class Tool(Protocol):
    """One tool. `execute` may be called again before an earlier call on the same instance has ended."""

    @property
    def name(self) -> str: ...
    @property
    def schema(self) -> Mapping[str, Any]:
        """`{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`"""

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        """An instance for one trajectory; the arguments are those of its sample.

        If it is cancelled it puts away what it had begun: only what it returns is released.
        """

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        """One call. The arguments fit the schema. What it raises is told to the model."""

    async def calc_reward(self, instance: Any) -> float | None:
        """The instance's reward at the trajectory's end, beyond those of its calls; None for none."""

    async def release(self, instance: Any) -> None:
        """The end of an instance, whatever became of its trajectory. Called once."""


class BaseTool:
    """Everything but `execute`: an instance is its sample's arguments, has no reward and needs no release.

    class Echo(BaseTool):
        name = "echo"
        schema = function_schema("echo", "Says it again.", {"type": "object"})

        async def execute(self, instance, arguments):
            return ToolResult(str(arguments))
    """

    name: str
    schema: Mapping[str, Any]

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        return arguments

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance: Any) -> float | None:
        return None

    async def release(self, instance: Any) -> None:
        return None


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema in the form that chat templates and APIs share."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}
