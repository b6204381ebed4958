"""`ignore_tools` with every template of the corpus: prompts are as requested, differences are marked."""

from __future__ import annotations

import pytest

from branchline import Session, timelines_of
from branchline.core.errors import CodecError
from tests.templates.corpus import load_template_codec, template_names
from tests.tree.test_session_ignore_tools import converse

NAMES = template_names()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NAMES, reason="needs the templates: make test-templates"),
]


@pytest.mark.parametrize("name", NAMES)
def test_other_tools_continue_or_fork_and_prompts_are_as_requested(name: str) -> None:
    codec = load_template_codec(name)
    ignoring, plain = Session("s", codec, ignore_tools=True), Session("s", codec)
    plain.codec = ignoring.codec
    try:
        expected = converse(plain)
    except CodecError as error:
        pytest.skip(f"the template refuses the conversation: {error}")
    prompts = [prompt.tolist() for prompt in converse(ignoring)]
    # The third call continues a reply that a plain session has on another branch. Its path may keep an empty
    # reasoning block, which the plain session's does not show.
    assert prompts[:2] == [prompt.tolist() for prompt in expected[:2]]
    for timeline in timelines_of(ignoring.tree):
        for node in timeline.sampled_nodes:
            assert node.output is not None
            prompt = prompts[node.output.call_index]
            recorded = ignoring.tree.path_ids(node)[: node.sampled_start].tolist()
            assert node.output.inexact == (recorded != prompt)
            if node.output.inexact:
                # Only the beginning differs, where templates put the tools.
                first = timeline.sampled_nodes[0].sampled_start
                assert prompt[len(prompt) - len(recorded) + first :] == recorded[first:]
