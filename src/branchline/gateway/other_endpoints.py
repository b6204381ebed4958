"""Endpoints that clients of OpenAI and Anthropic ask for and that are not here: what to use instead.

They are answered with 404, which no client repeats, and the code `not_supported`.
"""

from __future__ import annotations

import re

from branchline.gateway.protocols.base import ErrorInfo

_OWN_SERVICE = "this gateway serves and records language models; use the service that you have for this"
_WHOLE_INPUT = (
    "the session of your key has the conversation; send the whole input, or previous_response_id. In"
    " openai-agents use SQLiteSession, or to_input_list(), in place of OpenAIConversationsSession"
)
_BATCHES = "send each request as a call; many may be in progress at the same time"
_EVERY_METHOD = ""
_INSTEAD: tuple[tuple[str, str, str], ...] = (
    ("responses/compact", _EVERY_METHOD, "open the session with `compaction`, which shortens its"
     " conversations, or ask the model for a summary and send that. In openai-agents leave out"
     " OpenAIResponsesCompactionSession"),
    ("responses/[^/]+/cancel", _EVERY_METHOD, "close the connection of a call to cancel it; responses are"
     " not made in the background"),
    ("responses/[^/]+/input_items", _EVERY_METHOD, "the control key reads what was sent: GET"
     " /sessions/{id}/timelines"),
    ("responses/[^/]+", "DELETE", "the record of a session keeps every response"),
    ("conversations(/.*)?", _EVERY_METHOD, _WHOLE_INPUT),
    ("(threads|assistants)(/.*)?", _EVERY_METHOD, _WHOLE_INPUT),
    ("(messages/)?batches(/.*)?", _EVERY_METHOD, _BATCHES),
    ("chat/completions/[^/]+(/messages)?", "GET", "the control key reads the calls of a session: GET"
     " /sessions/{id}/timelines"),
    ("complete", _EVERY_METHOD, "use POST /v1/messages"),
    ("realtime(/.*)?", _EVERY_METHOD, "use POST /v1/responses or /v1/chat/completions, with stream: true"),
    ("models/[^/]+", "DELETE", "engines are added and removed with the admin key: /engines"),
    ("(embeddings|moderations|rerank|score|files|uploads|images|audio|videos|vector_stores|fine_tuning"
     "|containers|evals|skills|organizations)(/.*)?", _EVERY_METHOD, _OWN_SERVICE),
)  # fmt: skip
"""Patterns of endpoints, their method or every one, and what to do instead."""


def explain_endpoint(endpoint: str, method: str) -> ErrorInfo | None:
    """The answer for an endpoint that is known but not here; None for any other."""
    if endpoint.startswith("v1/"):
        problem = f"/v1/{endpoint}: this client adds /v1 itself; its base URL is the one without /v1"
        return ErrorInfo(404, problem, code="not_supported")
    for pattern, only_method, instead in _INSTEAD:
        if only_method in ("", method) and re.fullmatch(pattern, endpoint):
            return ErrorInfo(
                404, f"{method} /v1/{endpoint} is not supported: {instead}", code="not_supported"
            )
    return None


def explain_path(path: str) -> str:
    """The end of the sentence that a path does not exist, for paths that clients ask for by mistake."""
    if path in ("/health", "/ping", "/ready", "/live"):
        return "; GET /healthz says that the process is alive, GET /readyz that it takes calls"
    if path in ("/docs", "/redoc", "/version"):
        return "; GET / says what this is, GET /openapi.json describes it"
    if path.endswith(("/completions", "/responses", "/messages", "/models")):
        return "; the base URL of OpenAI's clients ends with /v1"
    return ""


WEBSOCKET_ERROR = ErrorInfo(
    426,
    "WebSockets are not supported: send the same request as HTTP POST, with stream: true for events",
    code="websocket_not_supported",
    headers={"upgrade": "HTTP/1.1", "connection": "upgrade"},
)
"""For the opening handshake of a WebSocket; clients that have both then use HTTP."""
