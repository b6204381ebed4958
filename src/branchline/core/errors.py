"""Every error Branchline raises on purpose, as one tree; a type names the boundary it happened at.

    BranchlineError
    ├── InputError              what a caller or a file handed us is not what we expect
    │   ├── MessageError        a message or request that cannot be read
    │   └── LogError            a line of a call log; carries the file and the line number
    ├── CodecError              messages could not be turned into ids, or ids into messages
    │   └── TemplateError       the chat template refused a conversation, in its own words
    ├── SessionError            a session that is not there, is closed, or that a key does not open
    ├── TreeError               a commit that does not fit the tree it is meant for
    ├── EngineError             an engine failed; the call can be tried again
    │   ├── EngineBusyError     it takes nothing more for now, and may say for how long
    │   └── EngineInputError    what it was asked cannot be done: not supported, out of range
    │       └── ContextLengthError  a prompt beyond what the model can hold
    ├── ToolError               a tool could not be set up, or the server it lives on is not there
    ├── JournalError            the journal could not be opened, written or read
    ├── MissingExtraError       a package of an optional extra is not installed (also an ImportError)
    └── ExportError             samples that must not be trained on without being asked for
        └── MissingLogprobsError

Messages carry the key, the value and the expectation. Status codes are the gateway's business.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

# What was got is shown, however long or deep it is.
_short_repr = reprlib.Repr()
_short_repr.maxstring = _short_repr.maxother = 120


class BranchlineError(Exception):
    """The root of the tree: catch this to catch everything raised on purpose."""


class InputError(BranchlineError):
    """What a caller or a file handed us is not what we expect."""


class MessageError(InputError):
    """A message or request that cannot be read.

    >>> str(MessageError("messages[2].role", "wizard", "one of system, user"))
    "messages[2].role: got 'wizard', expected one of system, user"
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: got {_short_repr.repr(value)}, expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class LogError(InputError):
    """A line of a call log that cannot be used: file, line number, and what was expected."""

    def __init__(self, file: str, line: int, problem: str) -> None:
        super().__init__(f"{file}:{line}: {problem}")
        self.file = file
        self.line = line
        self.problem = problem


class CodecError(BranchlineError):
    """Messages could not be turned into ids, or ids into messages."""


class TemplateError(CodecError):
    """The chat template refused a conversation; the message is its own."""


SessionErrorKind = Literal[
    "unknown", "closed", "out_of_calls", "out_of_tokens", "forbidden", "no_key", "exists", "conflict", "busy"
]


class SessionError(BranchlineError):
    """A session that is not there, is closed or spent, or that a key does not open; `kind` says which."""

    def __init__(self, kind: SessionErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TreeError(BranchlineError):
    """A commit that does not fit the tree it is meant for; the tree is unchanged."""


class EngineError(BranchlineError):
    """An engine failed; the call changed nothing and can be tried again."""


class EngineBusyError(EngineError):
    """An engine that takes nothing more for now; `retry_after` is for how long, as it says it itself."""

    def __init__(self, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineInputError(EngineError):
    """What an engine was asked for cannot be done by it."""


class ToolError(BranchlineError):
    """A tool that cannot be used; what goes wrong inside a call is told to the model instead.

    >>> str(ToolError("search", "create", "no index"))
    "tool 'search': create: no index"
    """

    def __init__(self, tool: str, action: str, problem: str) -> None:
        super().__init__(f"tool {tool!r}: {action}: {problem}")
        self.tool = tool
        self.action = action
        self.problem = problem


class ContextLengthError(EngineInputError):
    """A prompt beyond what the model can hold; agents compact their history when they are told so.

    >>> str(ContextLengthError.for_prompt(17, 10))
    "prompt is too long: 17 tokens > 10 maximum. This model's maximum context length is 10 tokens."
    """

    @classmethod
    def for_prompt(cls, prompt_tokens: int, max_tokens: int) -> ContextLengthError:
        """In the words that agents look for: Claude Code in the first sentence, all others in the second."""
        words = f"prompt is too long: {prompt_tokens} tokens > {max_tokens} maximum."
        return cls(f"{words} This model's maximum context length is {max_tokens} tokens.")


class JournalError(BranchlineError):
    """The journal could not be opened, written or read."""


class MissingExtraError(BranchlineError, ImportError):
    """A package of an optional extra is not installed; `name` is its import name."""


@contextmanager
def requires_extra(extra: str) -> Iterator[None]:
    """Raises MissingExtraError, with the pip command, if an import in the block finds no such package.

    >>> with requires_extra("serve"):
    ...     import httptoolz
    Traceback (most recent call last):
    branchline.core.errors.MissingExtraError: httptoolz is not installed: pip install 'branchline[serve]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("branchline"):
            raise
        package = error.name.partition(".")[0]
        message = f"{package} is not installed: pip install 'branchline[{extra}]'"
        raise MissingExtraError(message, name=package) from error


class ExportError(BranchlineError):
    """Samples that must not be trained on without being asked for."""


class MissingLogprobsError(ExportError):
    """Sampled tokens without logprobs, and nobody said that is fine."""
