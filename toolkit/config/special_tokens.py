"""The key ``data.special_tokens`` of a run and ``special_tokens`` of launch/prepare.py."""

from __future__ import annotations

from enum import Enum


class SpecialTokens(Enum):
    """How to tokenise the string of a special token (``<|user|>``) in a document.

    refuse: raise an error that names the document. text: tokenise it as ordinary text. parse: the special
    token.
    """

    refuse = "refuse"
    text = "text"
    parse = "parse"
