"""Classes with verl's methods, as users of verl write them."""

from __future__ import annotations

from typing import Any

from branchline.loop.tools.base import BaseTool, ToolResult, function_schema


class ToolResponse:
    """verl's response, which is a pydantic model there."""

    def __init__(self, text: str | None = None, image: list[Any] | None = None) -> None:
        self.text, self.image, self.video = text, image, None


class AnswerTool:
    """Scores an answer."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.instances: dict[str, dict[str, Any]] = {}
        self.log: list[Any] = []

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        self.instances[instance_id or "1"] = {"ground_truth": truth, "reward": 0.0}
        return instance_id or "1", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        instance = self.instances[instance_id]
        instance["reward"] = float(parameters["answer"] == instance["ground_truth"])
        self.log.append(kwargs)
        return ToolResponse(text=f"reward={instance['reward']}"), -0.05, {"tries": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.log.append(kwargs)
        return self.instances[instance_id]["reward"] + float(kwargs.get("bonus", 0))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(kwargs)
        del self.instances[instance_id]


class ExaminerInteraction:
    """Asks again until the answer is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.name = config["name"]
        self.instances: dict[str, Any] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str = "", **kwargs: Any
    ) -> str:
        assert kwargs["name"] == self.name
        self.instances[instance_id or "1"] = ground_truth
        return instance_id or "1"

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        is_right = self.instances[instance_id] in messages[-1]["content"]
        return is_right, "Right." if is_right else "Try again.", float(is_right), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return 0.75

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self.instances[instance_id]


class OwnTool(BaseTool):
    """A tool with our methods in a file of verl's form."""

    name = "own"
    schema = function_schema("own", "Ours.", {"type": "object"})

    def __init__(self, greeting: str = "") -> None:
        self.greeting = greeting

    async def execute(self, instance: Any, arguments: Any) -> ToolResult:
        return ToolResult(self.greeting)
