"""What the Engram hash needs besides a checkpoint's tables: token map, multipliers, bucket sizes, offsets.

None of it is stored; all follows from the configuration and the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers

from kernel_core.check import require
from orchestrator.model.config import ModelConfig

_SENTINEL = "\ue000"
"""A private-use character that keeps a token of one space from being stripped to nothing."""

_NORMAL_FORM = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _SENTINEL),
        normalizers.Strip(),
        normalizers.Replace(_SENTINEL, " "),
    ]
)


@dataclass(frozen=True)
class EngramLayer:
    """Constants of one Engram layer, int64. Columns go by n-gram order (2-grams first), then head."""

    multipliers: torch.Tensor  # [max_ngram_size], one a shift
    primes: torch.Tensor  # [columns], bucket sizes
    offsets: torch.Tensor  # [columns], first table row of each bucket


@dataclass(frozen=True)
class EngramTables:
    """The token map and the constants of every Engram layer."""

    token_map: torch.Tensor  # int64 [vocab_size]
    mapped_pad: int
    layers: dict[int, EngramLayer]

    def layer(self, layer: int) -> EngramLayer:
        """Constants of that backbone layer."""
        return self.layers[layer]

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as int64 arrays: `token_map`, `mapped_pad`, and `multipliers.L`, `primes.L`, `offsets.L`."""
        arrays = {"token_map": self.token_map.numpy(), "mapped_pad": np.array(self.mapped_pad)}
        for number, layer in self.layers.items():
            for part in ("multipliers", "primes", "offsets"):
                arrays[f"{part}.{number}"] = getattr(layer, part).numpy()
        return arrays

    @staticmethod
    def build(config: ModelConfig, tokenizer: Tokenizer | str | Path | None = None) -> EngramTables:
        """Derive everything. `tokenizer` is one of the `tokenizers` library or the path of its tokenizer.json.

        Without tokenizer the map is the identity, which only a model made for it (`engram_compressed_vocab_size`
        equal to `vocab_size`) can use. Raises `ValueError` where map size or bucket sums are not those of `config`.
        """
        check_engram_rows(config)
        token_map = identity_map(config) if tokenizer is None else token_map_of(tokenizer, config.vocab_size)
        if not config.engram_layer_ids:
            return EngramTables(token_map, 0, {})
        size, expected = int(token_map.max()) + 1, config.engram_compressed_vocab_size
        what = "the identity map (no tokenizer.json)" if tokenizer is None else "the map of this tokenizer"
        require(
            size == expected,
            "tokenizer",
            f"{what} of {size} ids",
            f"engram_compressed_vocab_size ({expected}); use the tokenizer.json that belongs to the weights",
        )
        return EngramTables(token_map, int(token_map[config.engram_pad_token_id]), _layers(config))

    @staticmethod
    def from_checkpoint(folder: str | Path, config: ModelConfig) -> EngramTables:
        """As `build`, with the tokenizer.json of a checkpoint folder if it has one."""
        path = Path(folder) / "tokenizer.json"
        return EngramTables.build(config, path if path.is_file() else None)


def bucket_primes(config: ModelConfig) -> torch.Tensor:
    """Bucket sizes int64 [engram layers, columns]: consecutive primes from `engram_vocab_size` on."""
    from mhc_engram.hashing import engram_primes

    orders = config.engram_max_ngram_size - 1
    return engram_primes(len(config.engram_layer_ids), orders, config.engram_n_heads, config.engram_vocab_size)


def check_engram_rows(config: ModelConfig) -> None:
    """Raise `ValueError` unless `engram_num_embeddings` are the sums of the bucket sizes."""
    if config.engram_layer_ids:
        sums = bucket_primes(config).sum(-1).tolist()
        rows = list(config.engram_num_embeddings)
        require(rows == sums, "engram_num_embeddings", rows, f"the sums of the bucket primes, {sums}")


def identity_map(config: ModelConfig) -> torch.Tensor:
    """The map of a model without tokenizer: every id stands for itself."""
    return torch.arange(config.vocab_size)


def token_map_of(tokenizer: Tokenizer | str | Path, vocab_size: int) -> torch.Tensor:
    """Map int64 [vocab_size] from token ids to ids shared by all tokens of the same normal form, in first-seen order.

    The form is that of the token decoded alone. A decode with a replacement character (part of a UTF-8 sequence) counts
    by the token's own spelling, an empty form by the unnormalised text. Ids without a token get an id each.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_file(str(tokenizer))
    known: dict[object, int] = {}
    ids = [known.setdefault(_key(tokenizer, token), len(known)) for token in range(vocab_size)]
    return torch.tensor(ids, dtype=torch.int64)


def compressed_vocab_size(tokenizer: Tokenizer | str | Path, vocab_size: int) -> int:
    """How many ids the map of a tokenizer has: `engram_compressed_vocab_size` of a model made for it."""
    return int(token_map_of(tokenizer, vocab_size).max()) + 1


def _key(tokenizer: Tokenizer, token: int) -> object:
    spelling = tokenizer.id_to_token(token)
    if spelling is None:
        return token
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return spelling
    return _NORMAL_FORM.normalize_str(text) or text


def _layers(config: ModelConfig) -> dict[int, EngramLayer]:
    from mhc_engram.hashing import engram_multipliers, engram_offsets

    primes = bucket_primes(config)
    size, count = config.engram_compressed_vocab_size, config.engram_max_ngram_size
    return {
        layer: EngramLayer(engram_multipliers(layer, size, count), row, engram_offsets(row))
        for layer, row in zip(config.engram_layer_ids, primes, strict=True)
    }
