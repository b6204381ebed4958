"""The tokenizer and the chat template of the demo's model.

Byte-level, so that it encodes any text; its merges are those of the task's own texts, so that an episode has
few tokens. Tool calls have the form of Hermes and Qwen templates.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from branchline.chat.generic.codec import GenericCodec
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, as_ids
from branchline.train.demo.archive import (
    CLERK_SYSTEM,
    DELETED,
    REPORT_PREFIX,
    SYSTEM,
    WINDOW_TOKENS,
    ArchiveTask,
)

_VOCAB_SIZE = 512
_RESPELLING_RATE = 0.05
"""The probability that a merge of the tokenizer is skipped in a demonstration."""
_START, _END = "<|im_start|>", "<|im_end|>"
_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' }}{%- for tool in tools %}\
{{- tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')\\n' }}\
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def build_tokenizer(folder: Path) -> None:
    """Writes the tokenizer's files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(_START, special=True), AddedToken(_END, special=True)],
        show_progress=False,
    )
    rng = Random(0)
    texts = [text for _ in range(300) for text in _texts(ArchiveTask.draw(rng))]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKERS])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "pad_token": _END,
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": WINDOW_TOKENS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _texts(task: ArchiveTask) -> list[str]:
    """Returns the texts of an episode."""
    item, key = task.item, task.keys[task.item]
    return [
        f"system\n{SYSTEM}\nuser\n{task.question}\nassistant\ntools\n",
        task.catalog,
        f"{item} {key}",
        str(task.records[key]),
        task.answer,
        f"no record ok {DELETED}",
        f'\n{{"name": "forget", "arguments": {{"note": "{item} {key}"}}}}\n',
        f'\n{{"name": "delegate", "arguments": {{"task": "find {key}"}}}}\n',
        f'\n{{"name": "lookup", "arguments": {{"key": "{key}"}}}}\n',
        '\n{"name": "catalog", "arguments": {}}\n',
        "catalog()\nforget(note)\ndelegate(task)\nlookup(key)\n",
        f"{CLERK_SYSTEM}\nfind {key}",
        f"tool\n{REPORT_PREFIX}owner: ",
    ]


class RespellingCodec(GenericCodec):
    """Encodes some replies with other ids than the tokenizer's own for the same text (BPE dropout).

    Models sample such ids too. A gateway that encodes text again changes them.
    """

    _dropout_tokenizer: Tokenizer | None = None

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        if self._dropout_tokenizer is None:
            self._dropout_tokenizer = Tokenizer.from_file(str(self.tokenizer.path / "tokenizer.json"))
            self._dropout_tokenizer.model.dropout = _RESPELLING_RATE
        reply = self.render_reply(message)
        assert reply is not None, f"the template does not show {message}"
        text, terminator = reply
        ids = self._dropout_tokenizer.encode(text, add_special_tokens=False).ids
        return as_ids([*ids, terminator] if stop else ids)
