"""The OpenAPI document: valid, complete, and true of what the gateway answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from starlette.routing import Route

from branchline.engines.replicas import Replicas
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.engines.vllm import VllmEngine
from branchline.gateway import export_options, model_api
from branchline.gateway.config import GatewayConfig
from branchline.gateway.openapi import build_document
from branchline.runtime.router import Router
from tests.engines.fake_servers import FakeVllm
from tests.gateway.harness import Agent, agent, run

DOCUMENT: dict[str, Any] = msgspec.json.decode(build_document(GatewayConfig()))
MODEL_PREFIXES = ("/v1", "/agents/{agent}/v1", "/sessions/{id}/v1", "/sessions/{id}/agents/{agent}/v1")


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method != "parameters"
    }


def is_model_path(path: str) -> bool:
    return "/v1/" in path


def test_the_document_is_valid_openapi() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"] == "3.1.0"
    ids = [operation["operationId"] for operation in operations(DOCUMENT).values()]
    assert len(ids) == len(set(ids))
    assert all(operation["summary"].endswith(".") for operation in operations(DOCUMENT).values())


def test_every_route_of_the_control_api_is_in_the_document_and_the_other_way_round() -> None:
    async def test() -> None:
        async with agent() as a:
            routes = {
                (method, route.path)
                for route in a.gateway.app.control_api.asgi.routes
                if isinstance(route, Route)
                for method in (route.methods or set()) - {"HEAD"}
            }
            assert {entry for entry in operations(DOCUMENT) if not is_model_path(entry[1])} == routes

    run(test)


def test_every_route_of_the_model_api_is_in_the_document_and_the_other_way_round() -> None:
    posts = {("POST", endpoint) for endpoint in (*model_api.PROTOCOLS, *model_api.COUNT_PROTOCOLS)}
    gets = {("GET", endpoint) for endpoint in ("models", "models/{model}", "session", "responses/{response}")}
    expected = {(method, f"{prefix}/{name}") for prefix in MODEL_PREFIXES for method, name in posts | gets}
    assert {entry for entry in operations(DOCUMENT) if is_model_path(entry[1])} == expected

    async def test() -> None:
        async with agent("x", "x") as a:
            await call(a, "POST", "/v1/responses", {"input": "p"}, a.session.api_key)
            for method, path in sorted(expected):
                response = await call(a, method, path, {}, a.session.api_key)
                assert "no such path" not in response.text
                assert response.status_code not in (404, 405), (method, path)

    run(test)


def test_path_parameters_are_declared_and_no_others() -> None:
    for (method, path), operation in operations(DOCUMENT).items():
        parameters = [*DOCUMENT["paths"][path].get("parameters", []), *operation.get("parameters", [])]
        names = {parameter["name"] for parameter in parameters if parameter["in"] == "path"}
        assert names == set(re.findall(r"{(\w+)}", path)), (method, path)


def test_the_parameters_of_samples_are_those_that_the_gateway_reads() -> None:
    for name, more in (("samples", {"format"}), ("report", set())):
        parameters = operations(DOCUMENT)["GET", f"/sessions/{{id}}/{name}"]["parameters"]
        assert {parameter["name"] for parameter in parameters} == set(export_options._FIELDS) | more
    policy = DOCUMENT["components"]["schemas"]["FinalizeRequest"]["properties"]["policy"]
    assert set(policy["properties"]) == set(export_options._FIELDS)


def test_the_document_needs_no_key_and_names_no_secret() -> None:
    async def test() -> None:
        config = GatewayConfig(admin_key="ak-" + "a" * 30, public_url="https://gateway.example/x")
        async with agent(config=config) as a:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(a.gateway.app)) as http:
                response = await http.get("http://gateway/openapi.json")
            assert response.status_code == 200
            assert response.headers["content-type"] == "application/json"
            assert config.admin_key not in response.text
            document = response.json()
            assert document["servers"] == [{"url": "https://gateway.example/x"}]
            assert document["paths"] == DOCUMENT["paths"]

    run(test)


# -- examples ----------------------------------------------------------------------------------------


def strict(document: dict[str, Any]) -> dict[str, Any]:
    """The document with schemas that allow only the properties they list, so that an answer with a field that
    the document does not have is found."""
    document = copy.deepcopy(document)

    def close(schema: Any) -> None:
        if isinstance(schema, dict):
            if "properties" in schema:
                schema.setdefault("additionalProperties", False)
            for value in schema.values():
                close(value)
        elif isinstance(schema, list):
            for value in schema:
                close(value)

    close(document["components"]["schemas"])
    return document


class Checker:
    """Compares responses with the document and notes the operations that it has seen."""

    def __init__(self) -> None:
        self.document = strict(DOCUMENT)
        resource = DRAFT202012.create_resource(self.document)
        self.registry: Registry[Any] = Registry().with_resource("openapi.json", resource)
        self.seen: set[tuple[str, str]] = set()

    def check(self, method: str, path: str, response: httpx.Response) -> None:
        operation = operations(self.document)[method, path]
        status = str(response.status_code)
        found = operation["responses"].get(status) or operation["responses"].get("default")
        assert found is not None, (method, path, status, response.text)
        if "$ref" in found:
            found = self.document["components"]["responses"][found["$ref"].rpartition("/")[2]]
        if response.status_code < 400:
            assert status in operation["responses"], (method, path, status, response.text)
            self.seen.add((method, path))
        if not response.content:
            assert "content" not in found
            return
        kind = response.headers["content-type"].partition(";")[0]
        schema = found["content"][kind].get("schema", {})
        if kind == "application/json":
            for error in self.errors(schema, response.json()):
                raise AssertionError(f"{method} {path} {status}: {error.json_path}: {error.message}")

    def errors(self, schema: Any, value: Any) -> Iterator[Any]:
        rooted = {"$ref": "openapi.json" + schema["$ref"]} if "$ref" in schema else absolute(schema)
        return Draft202012Validator(rooted, registry=self.registry).iter_errors(value)


def absolute(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            name: "openapi.json" + value if name == "$ref" else absolute(value)
            for name, value in schema.items()
        }
    return [absolute(value) for value in schema] if isinstance(schema, list) else schema


async def call(
    a: Agent, method: str, path: str, body: Any = None, key: str = "", **query: Any
) -> httpx.Response:
    responses = [one.id for one in a.session.managed.session.tree.calls if one.id.startswith("resp_")]
    names = {"id": a.session.id, "agent": "critic", "model": "m", "response": next(iter(responses), "none")}
    url = a.gateway.url + re.sub(r"{(\w+)}", lambda match: names[match[1]], path)
    headers = {"authorization": f"Bearer {key or a.gateway.admin_key}"}
    return await a.http.request(method, url, json=body, headers=headers, params=query)


MODEL_BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "completions": {"prompt": "p"},
    "responses": {"input": "p"},
    "messages": {"messages": [{"role": "user", "content": "p"}], "max_tokens": 9},
}


def test_the_answer_of_every_operation_fits_its_schema() -> None:
    async def test() -> None:
        checker = Checker()
        engine = ScriptedEngine(rule=replies(*["x"] * 80))

        async def expect(
            a: Agent, method: str, path: str, body: Any = None, status: int = 200, **query: Any
        ) -> Any:
            response = await call(a, method, path, body, query.pop("key", ""), **query)
            assert response.status_code == status, response.text
            checker.check(method, path, response)
            return response

        async with agent(engine=engine) as a:
            key = a.session.api_key
            for prefix in MODEL_PREFIXES:
                for endpoint in (*model_api.PROTOCOLS, *model_api.COUNT_PROTOCOLS):
                    family = endpoint.removesuffix("/count_tokens").removesuffix("/input_tokens")
                    body = {"model": "m", **MODEL_BODIES[family]}
                    await expect(a, "POST", f"{prefix}/{endpoint}", body, key=key)
                    if endpoint in model_api.PROTOCOLS:
                        await expect(a, "POST", f"{prefix}/{endpoint}", {**body, "stream": True}, key=key)
                for endpoint in ("models", "models/{model}", "session", "responses/{response}"):
                    await expect(a, "GET", f"{prefix}/{endpoint}", key=key)
            session = "/sessions/{id}"
            await expect(a, "POST", f"{session}/reward", {"score": 1.0, "turn": 1, "extras": {"note": "x"}})
            await expect(a, "POST", f"{session}/reward", [{"score": True}, {"score": 0.5}])
            options = {
                "group": "g",
                "limits": {"calls": 3},
                "sampling": {"temperature": 1.0},
                "compaction": {"trigger_tokens": 9},
            }
            await expect(a, "POST", "/sessions", options, 201)
            await expect(a, "GET", "/sessions", state="open")
            for name in ("", "/tree", "/timelines", "/report", "/snapshot"):
                await expect(a, "GET", session + name)
            await expect(a, "GET", f"{session}/samples", shares="first", drop=["retry", "edit"])
            for format in ("json", "jsonl", "tree"):
                await expect(a, "GET", f"{session}/samples", format=format)
            await expect(a, "GET", f"{session}/wait", timeout_s="0")
            await expect(a, "POST", f"{session}/complete", {"reason": "done"}, key=key)
            await expect(a, "POST", f"{session}/complete", {"reason": "done"})
            for returned in ("samples", "trajectory", "session"):
                await expect(a, "POST", f"{session}/finalize", {"return": returned, "policy": {"seed": 1}})
            for path in ("/", "/healthz", "/metrics", "/engines", "/openapi.json"):
                await expect(a, "GET", path)
            await expect(a, "GET", "/readyz")
            await expect(a, "POST", "/policy/pause")
            await expect(a, "GET", "/readyz", status=503)
            await expect(a, "POST", "/policy/resume", {"version": 1})
            await expect(a, "DELETE", session, status=204)
        async with agent("x") as a:
            await expect(a, "POST", "/sessions/{id}/abort", {"reason": "broken"})
            await expect(a, "POST", "/sessions/{id}/reward", 1.0, 409)
            await expect(a, "POST", "/sessions", {"grup": 1}, 400)
            await expect(a, "GET", "/engines", key="wrong", status=403)
            await expect(a, "POST", "/v1/messages", {}, key="wrong", status=403)
            await expect(a, "POST", "/v1/chat/completions", {}, key=a.session.api_key, status=409)
        async with FakeVllm() as one, FakeVllm() as two:
            for server in (one, two):
                server.json_by_path = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
            router = Router(Replicas([VllmEngine(one.url)]), create_replica=VllmEngine)
            async with agent(gateway_engine=router) as a:
                await expect(a, "POST", "/engines", {"url": two.url, "version": 0}, 201)
                await expect(a, "GET", "/engines")
                name = router.describe_replicas()[0]["name"]
                await expect(a, "DELETE", "/engines", {"name": name})
        assert checker.seen == set(operations(DOCUMENT))

    run(test)


def test_an_answer_with_another_field_or_type_does_not_fit() -> None:
    checker = Checker()
    good = {"paused": False, "version": 3}
    schema = operations(checker.document)["POST", "/policy/pause"]["responses"]["200"]["content"]
    schema = schema["application/json"]["schema"]
    assert not list(checker.errors(schema, good))
    for bad in ({**good, "more": 1}, {"paused": False}, {**good, "version": "3"}):
        assert list(checker.errors(schema, bad))


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        ("/sessions", {"group": "g", "history": "verbatim"}, True),
        ("/sessions", {"grup": "g"}, False),
        ("/sessions", {"limits": {"calls": 0}}, False),
        ("/sessions/{id}/reward", 1, True),
        ("/sessions/{id}/reward", True, True),
        ("/sessions/{id}/reward", [{"score": 1, "extras": {}}, {"score": 2.5, "id": 3}], True),
        ("/sessions/{id}/reward", [1], False),
        ("/sessions/{id}/reward", [], False),
        ("/sessions/{id}/reward", {"score": 1, "note": "x"}, False),
        ("/sessions/{id}/reward", {"score": 1, "extras": "x"}, False),
        ("/sessions/{id}/reward", {"score": 1, "tool": ""}, False),
        ("/sessions/{id}/reward", "1", False),
        ("/sessions/{id}/finalize", {"return": "everything"}, False),
        ("/policy/resume", {"version": -1}, False),
        ("/policy/resume", {"version": 4}, True),
        ("/engines", {"version": 4}, False),
    ],
)
def test_the_gateway_accepts_the_bodies_that_the_document_accepts(
    path: str, body: Any, is_valid: bool
) -> None:
    checker = Checker()
    schema = operations(checker.document)["POST", path]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert (not list(checker.errors(schema, body))) == is_valid

    async def test() -> None:
        async with agent("x") as a:
            response = await call(a, "POST", path, body)
            assert (response.status_code < 400) == is_valid, response.text

    run(test)
