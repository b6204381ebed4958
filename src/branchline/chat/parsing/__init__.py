"""Outputs read into messages, whole and while they are sampled, for every format the registry names."""

from branchline.chat.parsing.base import Delta, OutputParser, Parsed, Problem, TextParser
from branchline.chat.parsing.detect import Detection, detect
from branchline.chat.parsing.registry import parser_for

__all__ = [
    "Delta",
    "Detection",
    "OutputParser",
    "Parsed",
    "Problem",
    "TextParser",
    "detect",
    "parser_for",
]
