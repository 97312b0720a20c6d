"""Strings of special tokens in text: search, count, and encoding as ``data.special_tokens`` requests."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from toolkit.config.special_tokens import SpecialTokens
from toolkit.errors import InputError, Problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_CHARACTERS = 30  # characters of context shown on each side of a match


class SpecialTokenFinder:
    """Finds the strings of a tokenizer's special tokens. A search costs about a thousandth of tokenising."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and token.content
        ]
        # The longest first, as the package tokenizers matches them.
        alternatives = "|".join(
            re.escape(content) for content in sorted(special, key=lambda content: (-len(content), content))
        )
        self._pattern = re.compile(alternatives) if alternatives else None

    def count(self, text: str) -> Counter[str]:
        """Count the occurrences of each special token's string."""
        return Counter(self._pattern.findall(text)) if self._pattern else Counter()

    def check(self, text: str, *, location: str, key: str) -> None:
        """Raise InputError if the text contains a special token's string.

        Args:
            location: names the document in the error.
            key: the setting that refuses such text.
        """
        found = self._pattern.search(text) if self._pattern else None
        if found is None:
            return
        context = text[max(0, found.start() - CONTEXT_CHARACTERS) : found.end() + CONTEXT_CHARACTERS]
        rule = (
            f"with {key}=refuse, no text contains the string of one of the tokenizer's special tokens "
            f"(here: {found.group()})"
        )
        remedy = (
            f"write {key}=parse to encode it as that token, as in rendered conversations, "
            f"or {key}=text to treat it as ordinary text"
        )
        raise InputError(Problem(key, f"{location}: {context!r}", rule, remedy))


def configure_tokenizer(tokenizer: Tokenizer, mode: SpecialTokens) -> None:
    """Configure the tokenizer for whole texts without padding, and special tokens as in ``mode``."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = mode is not SpecialTokens.parse
