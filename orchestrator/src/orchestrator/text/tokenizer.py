"""A tokenizer as the engine and the server need it: ids, bytes of each id, and no way to forge control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from orchestrator.text import specials

if TYPE_CHECKING:
    import deepseek_recipe

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Byte-level BPE read from the contents of a tokenizer.json.

    `encode` never yields an added token: a user who types ``<｜User｜>`` gets ordinary tokens. Only
    `encode_with_specials`, meant for text that the program wrote itself, does.
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError if `text` is no tokenizer.json of a byte-level BPE with gapless ids."""
        self.text = text
        try:
            content = json.loads(text)
            self._full = tokenizers.Tokenizer.from_str(text)
            self._plain = tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": []}))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json: cannot be read ({error})") from None
        self._added = {entry["id"]: entry for entry in content.get("added_tokens", [])}
        self._bytes = _token_bytes(self._full.get_vocab(with_added_tokens=True), self._added)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Spellings of special tokens in it are text like any other."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of trusted text: spellings of special tokens become those tokens. Adds no BOS."""
        return self._full.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_control: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD; control tokens are left out unless asked for."""
        pieces = (self._bytes[i] for i in ids if not (skip_control and self.is_control(i)))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id stands for; the spelling of an added token in UTF-8. Raises ValueError if out of range."""
        if not 0 <= token_id < len(self._bytes):
            raise ValueError(f"token_id: got {token_id}, allowed is 0 to {len(self._bytes) - 1}")
        return self._bytes[token_id]

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a control token, which decoded text never shows."""
        return self._added.get(token_id, {}).get("special", False)

    def special_id(self, spelling: str) -> int | None:
        """Id of the added token spelt so, or None."""
        return self._special_ids.get(spelling)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {entry["content"]: token_id for token_id, entry in self._added.items()}

    @cached_property
    def added_ids(self) -> tuple[int, ...]:
        """Ids of all added tokens, ascending."""
        return tuple(sorted(self._added))

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text. Raises ValueError if the vocabulary has no end-of-sentence token."""
        eos = self.special_id(specials.EOS)
        if eos is None:
            raise ValueError(f"tokenizer.json: no token {specials.EOS!r}; it is needed to end a text")
        return (eos,)

    @property
    def bos_id(self) -> int | None:
        """Id of the begin-of-sentence token, or None."""
        return self.special_id(specials.BOS)

    @property
    def image_spelling(self) -> str | None:
        """How this vocabulary spells the image placeholder, or None if it has none."""
        return next((name for name in specials.IMAGE_SPELLINGS if name in self._special_ids), None)

    def spell(self, ids: Sequence[int]) -> list[str]:
        """Each id for human eyes: partial characters as U+FFFD, control tokens shown."""
        return [self.token_bytes(i).decode("utf-8", errors="replace") for i in ids]

    @cached_property
    def recipe(self) -> deepseek_recipe.Tokenizer:
        """The same vocabulary as a deepseek-recipe tokenizer, which encodes conversations and decodes streams."""
        import deepseek_recipe

        return deepseek_recipe.Tokenizer.from_str(self.text)

    @cached_property
    def recipe_specials(self) -> deepseek_recipe.SpecialTokens:
        """Spellings for deepseek-recipe: only the image placeholder differs between vocabularies."""
        import deepseek_recipe

        image = self.image_spelling
        return deepseek_recipe.SpecialTokens(image=image) if image else deepseek_recipe.SpecialTokens()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint folder (or a tokenizer.json itself).

    Raises FileNotFoundError naming what is missing, ValueError if the file is damaged.
    """
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not found; copy the tokenizer.json that belongs to these weights there")
    return Tokenizer(file.read_text(encoding="utf-8"))


def _token_bytes(vocab: dict[str, int], added: dict[int, dict]) -> list[bytes]:
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError(f"tokenizer.json: ids must be 0 to {len(vocab) - 1} without gaps")
    to_byte = _byte_level_alphabet()
    table = [b""] * len(vocab)
    for token, token_id in vocab.items():
        if token_id in added:
            table[token_id] = added[token_id]["content"].encode("utf-8")
        else:
            try:
                table[token_id] = bytes(to_byte[char] for char in token)
            except KeyError:
                raise ValueError(f"tokenizer.json: token {token!r} is not written in the byte-level alphabet") from None
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet: printable Latin-1 bytes are themselves, the rest follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
