"""The key ``data.special_tokens`` of a run, and ``special_tokens`` of launch/prepare.py."""

from __future__ import annotations

from enum import Enum


class SpecialTokens(Enum):
    """What the string of one of the tokenizer's special tokens (``<|user|>``) becomes where a document
    contains it.

    refuse: an error that names the document. text: tokens of ordinary text. parse: the special token itself.
    """

    refuse = "refuse"
    text = "text"
    parse = "parse"
