"""Encodes what a log has without ids: prompts and answers as the chat template writes them.

An answer that the template does not show whole keeps no ids, so that nothing else is trained in its place:
a part of it that the template leaves out or changes (`whole_reply`), or reasoning or a call that was cut off
and that a template closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from branchline.chat.base import reply_to_text
from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.call import Request
from branchline.core.errors import CodecError, LogError
from branchline.core.token_arrays import Ids
from branchline.timelines.log import LoggedCall, LoggedOutput, LogReader
from branchline.timelines.token_texts import fit_logprobs


def encode_missing_ids(
    calls: Iterable[LoggedCall], reader: LogReader, encoder: LogEncoder
) -> Iterator[LoggedCall]:
    """Yields the calls of a log with encoded ids where they have none; logged ids are kept. Calls that the
    template refuses are errors of the reader."""
    for call in calls:
        try:
            yield encoder.fill(call)
        except CodecError as error:
            reader.errors.append(LogError(str(reader.path), call.line, f"cannot be encoded: {error}"))


@dataclass(frozen=True)
class LogEncoder:
    """Encodes prompts and answers that were logged without ids."""

    tokenizer: TokenizerDir
    other_tokens: list[int] = field(default_factory=list)
    """Lines of answers whose logprobs are left out, because they name other tokens than the encoded ones."""

    @cached_property
    def _codec(self) -> GenericCodec | None:
        return GenericCodec(self.tokenizer) if self.tokenizer.has_template else None

    def fill(self, call: LoggedCall) -> LoggedCall:
        if call.prompt_ids is not None and all(output.ids is not None for output in call.outputs):
            return call
        # Logged ids of an answer are as sampled only if the prompt before them was logged too.
        has_prompt = call.prompt_ids is not None
        outputs = tuple(
            replace(output, ids_were_sampled=has_prompt)
            if output.ids is not None
            else self._encode(output, call.line)
            for output in call.outputs
        )
        prompt_ids = call.prompt_ids if call.prompt_ids is not None else self.encode_prompt(call.request)
        return replace(call, prompt_ids=prompt_ids, outputs=outputs)

    def _encode(self, output: LoggedOutput, line: int) -> LoggedOutput:
        """Returns an answer with the encoded ids, and with its logprobs if they are those of these ids."""
        ids, logprobs = self.encode_output(output), output.logprobs
        if ids is None or logprobs is None:
            return replace(output, ids=ids, logprobs=None, ids_were_sampled=False)
        stop_ids = self.tokenizer.stop_ids if self._codec is None else self._codec.stop_ids
        fitted = fit_logprobs(output.token_texts, logprobs, ids, self.tokenizer.token_bytes, stop_ids)
        if isinstance(fitted, str):
            self.other_tokens.append(line)
        return replace(
            output, ids=ids, logprobs=None if isinstance(fitted, str) else fitted, ids_were_sampled=False
        )

    def encode_prompt(self, request: Request) -> Ids:
        """The ids of the rendered prompt, or of `role: text` lines if there is no template."""
        if self._codec is not None:
            return self._codec.encode_prompt(request.messages, request.tools, request.chat_template_kwargs)
        lines = [f"{message.role}: {reply_to_text(message)}\n" for message in request.messages]
        return self.tokenizer.encode("".join([*lines, "assistant: "]))

    def encode_output(self, output: LoggedOutput) -> Ids | None:
        """The ids of an answer with its stop token, unless it was cut off; None if it is not shown whole."""
        message = output.message
        is_cut = output.is_cut or output.finish_reason == "length"
        if is_cut and (message.tool_calls or not message.content.strip()):
            return None
        if self._codec is not None:
            return self._codec.encode_whole_reply(message, stop=not is_cut)
        if message.reasoning_content.strip() or message.refusal:
            return None
        return self.tokenizer.encode(reply_to_text(message))
