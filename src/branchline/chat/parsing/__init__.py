"""Outputs read into messages, whole and while they are sampled, for every format the registry names."""

from branchline.chat.parsing.base import MessageDelta, OutputParser, ParsedOutput, ParseProblem, TextParser
from branchline.chat.parsing.detect import OutputFormat, detect_output_format
from branchline.chat.parsing.registry import create_text_parser

__all__ = [
    "MessageDelta",
    "OutputFormat",
    "OutputParser",
    "ParseProblem",
    "ParsedOutput",
    "TextParser",
    "create_text_parser",
    "detect_output_format",
]
