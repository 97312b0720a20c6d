"""Strings of special tokens in text: found, counted, and encoded as ``data.special_tokens`` asks."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from toolkit.config.special_tokens import SpecialTokens
from toolkit.errors import InputError, Problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AROUND = 30  # characters shown on each side of what was found


class SpecialStrings:
    """The strings of a tokenizer's special tokens. Searching costs about a thousandth of tokenising."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and token.content
        ]
        # The longest first, as tokenizers matches them.
        alternatives = "|".join(
            re.escape(content) for content in sorted(special, key=lambda content: (-len(content), content))
        )
        self._pattern = re.compile(alternatives) if alternatives else None

    def count(self, text: str) -> Counter[str]:
        """String of a special token -> how often the text contains it."""
        return Counter(self._pattern.findall(text)) if self._pattern else Counter()

    def check(self, text: str, *, where: str, key: str) -> None:
        """Raises InputError if the text contains one.

        Args:
            where: the document, as a user can find it.
            key: the setting that refuses such text.
        """
        found = self._pattern.search(text) if self._pattern else None
        if found is None:
            return
        shown = text[max(0, found.start() - AROUND) : found.end() + AROUND]
        rule = f"with {key}=refuse, no text contains the string of one of the tokenizer's special tokens (here: {found.group()})"
        remedy = f"write {key}=parse to make it that token, as in rendered conversations, or {key}=text to treat it as ordinary text"
        raise InputError(Problem(key, f"{where}: {shown!r}", rule, remedy))


def prepare_tokenizer(tokenizer: Tokenizer, mode: SpecialTokens) -> None:
    """From now on the tokenizer encodes whole texts, without padding, and special tokens as ``mode`` asks."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = mode is not SpecialTokens.parse
