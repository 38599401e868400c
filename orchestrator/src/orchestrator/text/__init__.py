"""Text to tokens and back: the tokenizer of a checkpoint, and how the tokenizers of the small models are made."""

from orchestrator.text.files import load_tokenizer, write_tokenizer
from orchestrator.text.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "write_tokenizer"]
