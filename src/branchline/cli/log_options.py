"""The options of commands that read a log of calls, `merge` and `tree`, and the format of its lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from branchline.core.choices import CompareLevel
from branchline.core.option_fields import option

LOG_FORMAT_HELP = """\
one line of CALLS.jsonl (wrapped here):
  {"session": "task-7", "agent": "planner",
   "request": {"messages": [{"role": "user", "content": "Say a word."}]},
   "response": {"prompt_token_ids": [11, 12, 13],
                "choices": [{"message": {"role": "assistant", "content": "Luminous"},
                             "finish_reason": "stop", "token_ids": [21, 22],
                             "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}}]}}
  request and response are those of a chat completion, with token ids in the fields that vLLM fills under
  return_token_ids. session, agent, token ids and logprobs are optional; without token ids and logprobs
  nothing can be trained exactly. Other keys of a line are ignored, and named in the account; samples have the
  reward null, and their session to find it by.

  A choice without a finish_reason (null, "" or no such key) was cut off: it is counted (dropped, cancelled)
  and not trained, unless a later call continues it. If the logger leaves finish_reason out, write the
  server's: "stop", "length", "tool_calls".
  usage is optional; its prompt_tokens and completion_tokens must be the numbers of the token ids.

  response may also be a stream: a list of chunks, or the text of server-sent events. A response with several
  choices may be logged as one line per choice, each with its index and the usage of itself or of the whole
  response. Lines with one response id and index are one answer, with all that any of them tells; lines that
  contradict each other are counted and stay apart. CALLS.jsonl may be compressed with gzip.

what is merged:
  By default a call continues an answer if its messages repeat it (roles, texts and tool calls) and its logged
  prompt begins with exactly the ids of the earlier prompt and answer. So every token is in the context that
  was logged for its call, and every sample is exact. Calls of different sessions, agents or models never
  continue each other. Three options allow one thing each, and the tokens behind it count as inexact:
  --repair        other ids for the same text, where the bytes of tokens or a known stop token tell the end
  --ignore-tools  another tool list or other template arguments at the beginning of the prompt
  --inexact       equal text only, whatever the ids are, and ids that were not logged at all
  Calls that are kept apart because one of them is missing are counted, with the option.
"""


@dataclass(frozen=True)
class LogOptions:
    """A log, and which of its calls continue each other."""

    calls: Path = option(positional=True, metavar="CALLS.jsonl")
    """The log: one call per line."""
    tokenizer: str | None = option(None, basic=True, metavar="DIR|NAME")
    """A folder with tokenizer.json, or a Hugging Face name such as Qwen/Qwen3-8B. With it ids are checked,
    drift is repaired by comparing bytes, forks are shown as text, and calls without token ids are encoded:
    prompts and answers as the chat template writes them."""
    compare: CompareLevel = option("text", basic=True)
    """What must be equal for one call to continue another: messages and ids (text), or nothing but ids
    (token)."""
    repair: bool = option(False, basic=True)
    """Continue calls whose prompts have other ids for the same text, and put the sampled ids back; needs
    --tokenizer or --stop-id."""
    ignore_tools: bool = option(False, basic=True)
    """Continue calls with other tools or template arguments, whose prompts differ at the beginning."""
    inexact: bool = option(False, basic=True)
    """Merge by text: continue every call whose messages agree, also where the end of an answer in the later
    prompt is only estimated, and train tokens whose ids or prompts were not logged. With --tokenizer answers
    without ids are encoded with reasoning, tool calls and stop token; an answer of which the chat template
    leaves out or changes a part is counted (not_encoded) and not trained."""
    stop_id: tuple[str, ...] = option((), metavar="ID_OR_TOKEN")
    """An id that ends an answer, besides those of --tokenizer. No other id does."""
    dedupe: bool = False
    """Keep one of several equal answers to equal prompts (with --inexact: of equal text); by default each
    becomes a sample."""
    skip_bad: bool = option(False, basic=True)
    """Skip and count lines that cannot be read; by default they are errors."""
