"""Text to ids and back, with nothing added and nothing tidied up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

# Between two special tokens a template writes the same few words again and again ("user", a newline).
_SHORT = 24
# Some vocabularies hold thousands of unused ones, and then looking for them is the slower way.
_MAX_ADDED = 512
_PROBES = ("a {0}b", "\n{0}\n", "{0}user\n{0} {0}", "x{0}")


class TextCodec:
    """Over a transformers tokenizer; where it is a fast one, over the Rust tokenizer inside.

    The wrapper looks at every id and option in Python, which takes several times as long as the work itself. And text
    between two added tokens is encoded by itself, so what is short is encoded once. Where an added token takes part of
    the text around it (`lstrip`, say), the tokenizer gets the whole text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rust = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._short = lru_cache(maxsize=1024)(lambda text: tuple(self._encode(text)))
        self._added = {str(token.content): number for number, token in tokenizer.added_tokens_decoder.items()}
        # Longest first, so that of two tokens with a common beginning the whole one is found, as the tokenizer does.
        ordered = sorted(self._added, key=lambda token: (-len(token), token))
        self._split = re.compile(f"({'|'.join(map(re.escape, ordered))})") if 0 < len(ordered) <= _MAX_ADDED else None
        if not self._splits_alike():
            self._split = None

    def encode(self, text: str) -> list[int]:
        if self._split is None:
            return self._encode(text)
        ids: list[int] = []
        for part in self._split.split(text):
            if part in self._added:
                ids.append(self._added[part])
            elif len(part) <= _SHORT:
                ids += self._short(part)
            else:
                ids += self._encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if self._rust is not None:
            return self._rust.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> list[int]:
        # The wrapper switches truncation and padding on and off inside; the last caller may have left them on.
        if self._rust is not None and self._rust.truncation is None and self._rust.padding is None:
            return self._rust.encode(text, add_special_tokens=False).ids
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _splits_alike(self) -> bool:
        texts = (probe.format(token) for token in self._added for probe in _PROBES)
        return self._split is not None and all(self.encode(text) == self._encode(text) for text in texts)
