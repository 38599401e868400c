"""Training sequences cut from one long token array, as a function of seed and step alone.

Row i of B starts in the i-th of B equal stretches of the text, at the same share of each. From step to step this
share moves on by the golden ratio (mod 1), the sequence whose gaps stay most even however far it is followed: within
one pass over the text the starts of all steps are well apart, and nothing has to be remembered to go on. Of ten rows
three move back to the start of their document if it is less than a sequence away, so that beginnings are practised.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

SNAP = 0.3
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MASK = (1 << 64) - 1
_HELDOUT_TOKENS = 16384  # of a held-out batch


class Batches:
    """The dataset folder's `train.npy` and `heldout.npy` with their document starts.

    On CUDA the training tokens are kept on the device and gathered there, on a CPU they stay in the mapped file.
    Raises `ValueError` naming a file that is missing or not an array of the right kind.
    """

    def __init__(self, folder: str | Path, seed: int, device: str | torch.device) -> None:
        self.folder, self.seed, self.device = Path(folder), seed, torch.device(device)
        self._train = _array(self.folder / "train.npy", np.uint16)
        self._starts = np.array(_array(self.folder / "train_starts.npy", np.int64))
        self._resident: torch.Tensor | None = None
        if self.device.type == "cuda":
            # int16 of the same bits: PyTorch indexes it everywhere, and ids of 32768 and more come back by a mask.
            self._resident = torch.from_numpy(np.array(self._train).view(np.int16)).to(self.device)

    @property
    def tokens(self) -> int:
        """Tokens of the training text."""
        return len(self._train)

    def get(self, step: int, batch: int, length: int) -> torch.Tensor:
        """int64 [batch, length + 1] on the device: inputs and, moved by one, targets of that step."""
        starts = self.starts(step, batch, length)
        if self._resident is None:
            return _rows(self._train, starts, length).to(self.device)
        at = torch.from_numpy(starts).pin_memory().to(self.device, non_blocking=True)
        at = at[:, None] + torch.arange(length + 1, device=self.device)
        return self._resident[at].to(torch.int64) & 0xFFFF

    def starts(self, step: int, batch: int, length: int) -> np.ndarray:
        """First token of each row, int64 [batch]."""
        places = _places("train.npy", len(self._train), length)
        share = (_mix(self.seed) + step * _GOLDEN & _MASK) >> 11  # 53 bits
        starts = np.array([(((row << 53) + share) * places // batch) >> 53 for row in range(batch)], dtype=np.int64)
        drawn = np.array([_mix(self.seed ^ _mix(step * 0x10001 + row)) / 2**64 for row in range(batch)])
        documents = _document_starts(self._starts, starts)
        return np.where((drawn < SNAP) & (starts - documents < length), documents, starts)

    def heldout(self, length: int, count: int, rows: int | None = None) -> list[torch.Tensor]:
        """`count` fixed sequences, evenly spread over the held-out text, as batches int64 [rows, length + 1].

        One that lies less than its length behind a document's start begins there. `rows` None: what makes about
        16 thousand tokens; the last batch may have fewer.
        """
        tokens = _array(self.folder / "heldout.npy", np.uint16)
        places = _places("heldout.npy", len(tokens), length)
        starts = np.arange(count, dtype=np.int64) * places // count
        documents = _document_starts(np.array(_array(self.folder / "heldout_starts.npy", np.int64)), starts)
        starts = np.where(starts - documents < length, documents, starts)
        rows = rows or max(1, _HELDOUT_TOKENS // length)
        pieces = [starts[i : i + rows] for i in range(0, count, rows)]
        return [_rows(tokens, piece, length).to(self.device) for piece in pieces]


def _places(file: str, tokens: int, length: int) -> int:
    if length < 1 or tokens <= length:
        raise ValueError(f"length: got {length}, allowed is 1 to {tokens - 1} ({file} has {tokens} tokens)")
    return tokens - length


def _rows(tokens: np.ndarray, starts: np.ndarray, length: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64))


def _document_starts(documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Start of the document that holds each position."""
    return documents[np.searchsorted(documents, positions, side="right") - 1]


def _array(path: Path, dtype: type) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"folder: {path} is missing; build the dataset first") from None
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"folder: {path} cannot be read ({error}); build the dataset again") from error
    if array.dtype != dtype or array.ndim != 1 or not len(array):
        raise ValueError(f"{path}: got {array.dtype} {list(array.shape)}, allowed is {np.dtype(dtype)} [N], N > 0")
    return array


def _mix(value: int) -> int:
    """64 well-mixed bits of an integer (the finaliser of SplitMix64)."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
