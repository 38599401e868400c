"""Text to tokens and back: the tokenizer of a checkpoint, and how the tokenizers of the small models are made."""

from orchestrator.text.files import bundled_tokenizer, write_tokenizer
from orchestrator.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Tokenizer", "bundled_tokenizer", "load_tokenizer", "write_tokenizer"]
