"""Text to ids and back, with nothing added and nothing tidied up."""

from __future__ import annotations

import codecs
import copy
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
    the text around it (`lstrip`, say), the tokenizer gets the whole text. A byte-level tokenizer's ids are decoded by a
    table of their bytes.

    The Rust tokenizer is a copy: a hook's call that pads or truncates writes to the shared one, which fails in either
    thread ("Already borrowed") while the other one encodes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {str(token.content): number for number, token in tokenizer.added_tokens_decoder.items()}
        self._rust = _own_copy(tokenizer.backend_tokenizer, len(self._added)) if tokenizer.is_fast else None
        self._short = lru_cache(maxsize=1024)(lambda text: tuple(self._encode(text)))
        # Longest first, so that of two tokens with a common beginning the whole one is found, as the tokenizer does.
        ordered = sorted(self._added, key=lambda token: (-len(token), token))
        self._split = re.compile(f"({'|'.join(map(re.escape, ordered))})") if 0 < len(ordered) <= _MAX_ADDED else None
        probes = (probe.format(token) for token in self._added for probe in _PROBES)
        if self._split is not None and any(self.encode(text) != self._encode(text) for text in probes):
            self._split = None
        self._bytes = _byte_table(self._rust, list(self._added.values())) if self._rust is not None else None

    def encode(self, text: str) -> list[int]:
        return self.encode_with_marks(text)[0]

    def encode_with_marks(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and (character, index of the next id) behind each added token; the latter none where text around one is
        not encoded by itself."""
        if self._split is None:
            return self._encode(text), []
        ids: list[int] = []
        marks: list[tuple[int, int]] = []
        character = 0
        for part in self._split.split(text):
            character += len(part)
            if part in self._added:
                ids.append(self._added[part])
                marks.append((character, len(ids)))
            elif len(part) <= _SHORT:
                ids += self._short(part)
            else:
                ids += self._encode(part)
        return ids, marks

    def split_at_added(self, text: str) -> tuple[str, list[int], str] | None:
        """Text before the first added token, ids from there through the last one, text behind it.

        None when there is no such token, or when text around one is not encoded by itself.
        """
        found = list(self._split.finditer(text)) if self._split is not None else []
        if not found:
            return None
        start, end = found[0].start(), found[-1].end()
        return text[:start], self.encode(text[start:end]), text[end:]

    def decode(self, ids: Sequence[int]) -> str:
        if self._bytes is not None:
            return self.bytes_of(ids).decode("utf-8", "replace")
        if self._rust is not None:
            return self._rust.decode(ids, skip_special_tokens=False)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each id, for reading. Of a byte-level tokenizer joined as `decode` has it: a character of several
        tokens is the last one's."""
        if self._bytes is None:
            return [self.decode([number]) for number in ids]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._bytes[number]) for number in ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """What `decode` makes text of. For byte-level tokenizers."""
        assert self._bytes is not None
        return b"".join(map(self._bytes.__getitem__, ids))

    def tokens_that_end(self, texts: Sequence[str]) -> frozenset[int] | None:
        """Ids in which one of these texts can end, whatever stands before; None where the tokenizer is not byte-level.

        An id holds a whole text, or begins with a text's last bytes.
        """
        if self._rust is None or self._bytes is None:
            return None
        wanted = [text.encode() for text in texts]
        beginnings = tuple({text[start:] for text in wanted for start in range(1, len(text))})
        return frozenset(
            number
            for number in range(self._rust.get_vocab_size(with_added_tokens=True))
            if (held := self._bytes[number]).startswith(beginnings) or any(text in held for text in wanted)
        )

    def _encode(self, text: str) -> list[int]:
        if self._rust is not None:
            return self._rust.encode(text, add_special_tokens=False).ids
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=2)
def _own_copy(rust: Any, num_added: int) -> Any:
    """A copy without truncation and padding. Being only read, it is shared by all codecs of one tokenizer (making it
    takes half a second for 150,000 tokens). `num_added` tells a tokenizer to which tokens were added since."""
    own = copy.deepcopy(rust)
    own.no_truncation()
    own.no_padding()
    return own


class _ByteTable(dict[int, bytes]):
    """Bytes of each id of a byte-level tokenizer, filled in as ids are seen."""

    def __init__(self, rust: Any) -> None:
        super().__init__()
        self._rust = rust
        # GPT-2's alphabet (https://github.com/openai/gpt-2, encoder.py): printable Latin-1 bytes stand for themselves,
        # the others for the characters from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def __missing__(self, number: int) -> bytes:
        token = self._rust.id_to_token(number) or ""
        try:
            value = bytes(self._byte[character] for character in token)
        except KeyError:
            value = token.encode()
        self[number] = value
        return value


def _byte_table(rust: Any, added: Sequence[int]) -> _ByteTable | None:
    """The table, when it decodes as the tokenizer itself does."""
    if type(rust.decoder).__name__ != "ByteLevel":
        return None
    table = _ByteTable(rust)
    probes = [*range(min(1024, rust.get_vocab_size(with_added_tokens=False))), *added]
    decoded = b"".join(map(table.__getitem__, probes)).decode("utf-8", "replace")
    return table if decoded == rust.decode(probes, skip_special_tokens=False) else None
