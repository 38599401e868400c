"""Make the tokenizers of the small models: byte-level BPE over the bundled corpus definition.

Run ``python -m orchestrator.text.train`` to write them again into the package. The result depends on the corpus
(see `corpus`) and on the `tokenizers` release; both are recorded beside the files.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from orchestrator.text.corpus import corpus_digest, read_corpus
from orchestrator.text.specials import LEADING, SMALL_VOCABULARIES, TRAILING, Special

DATA = Path(__file__).parent / "data"
#: Numbers in groups of at most three digits, then words with one leading space, punctuation runs, line ends, spaces.
_SPLITS = (r"\p{N}{1,3}", r" ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train(vocab_size: int, texts: list[str]) -> str:
    """Contents of a tokenizer.json with exactly `vocab_size` entries.

    Layout: BOS, EOS, PAD; the 256 bytes; merges; the trailing special tokens. Raises ValueError if the vocabulary
    cannot hold the fixed part or the texts do not yield enough merges.
    """
    fixed = len(LEADING) + 256 + len(TRAILING)
    if vocab_size < fixed:
        raise ValueError(f"vocab_size: got {vocab_size}, allowed is {fixed} or more (bytes and special tokens)")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TRAILING),
        special_tokens=[_added(special) for special in LEADING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([_added(special) for special in TRAILING])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocab_size:
        raise ValueError(f"texts: yield {size} entries, but vocab_size is {vocab_size}; give more varied text")
    return tokenizer.to_str(pretty=False)


def _added(special: Special) -> AddedToken:
    return AddedToken(special.text, normalized=False, special=special.control)


def provenance(texts: list[str]) -> dict:
    """What the result depends on, as kept in data/provenance.json."""
    return {
        "corpus_sha256": corpus_digest(texts),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
    }


def main() -> None:
    texts = read_corpus()
    DATA.mkdir(exist_ok=True)
    for name, vocab_size in SMALL_VOCABULARIES.items():
        (DATA / f"{name}.json").write_text(train(vocab_size, texts) + "\n", encoding="utf-8")
    (DATA / "provenance.json").write_text(json.dumps(provenance(texts), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
