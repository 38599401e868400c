"""The draft stages: from the target's taps to a block of proposed tokens (docs/model.md, Draft stages)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

import dspark_kernels
import mla_fp4
import swa_replay
from kernel_core.check import require
from orchestrator.model.attention import Attention
from orchestrator.model.batch import Rows
from orchestrator.model.cache import CachePools
from orchestrator.model.dense import DenseMode, dense
from orchestrator.model.moe import Moe
from orchestrator.model.streams import Streams
from orchestrator.model.taps import Taps
from orchestrator.model.transformer import Transformer
from orchestrator.model.weights import Linear

DRAFT_DRAW = 1
"""Number of the uniform draw that samples a draft; 0 is that of target tokens."""
GREEDY_BELOW = 1e-5
_CONFIDENCE_LIMIT = 60.0

Chooser = Callable[[int, torch.Tensor], torch.Tensor]
"""From the draft's number k and its logits float32 [B, V] to tokens int64 [B]."""


@dataclass(frozen=True)
class Block:
    """What the stages made of a block, before any token of it is chosen.

    `anchors`, `positions` int64 [B]; `hidden` float32 [B, block, hidden], the mixed streams after the last stage;
    `logits` float32 [B, block, V] without the bias of the token before.
    """

    anchors: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens: entry k stands one place after entry k - 1, the first one after the anchor.

    Attributes:
        tokens: int64 [B, δ].
        log_q: float32 [B, δ, V], log-probabilities of the distributions that the tokens were drawn from.
        confidence_logits: float32 [B, δ], as the weights give them.
        confidence: float32 [B, δ], chance that a token is accepted, given that those before it were.
    """

    tokens: torch.Tensor
    log_q: torch.Tensor
    confidence_logits: torch.Tensor
    confidence: torch.Tensor


class Proposed(NamedTuple):
    """Drafts with all that verifying them takes.

    `records` are dspark_kernels' (tokens int64 [B, δ] and each draft's distribution in short), `logits` float32
    [B, block, V] with the bias of the token before, `confidence` float32 [B, δ] as in `Drafts`.
    """

    records: dspark_kernels.Proposals
    logits: torch.Tensor
    confidence: torch.Tensor


class Drafter:
    """Stages bound to kernels. Holds no request state: context rows are in `CachePools(..., draft_stages=...)`."""

    def __init__(self, transformer: Transformer, *, mode: DenseMode = "fixed") -> None:
        """Raises ValueError for a model without draft stages, or with too few confidence temperatures."""
        config, weights = transformer.config, transformer.weights.drafter
        if weights is None:
            raise ValueError("transformer: got a model without draft stages, allowed is one with at least one")
        self.config, self.stages, self.norm = config, weights.stages, weights.norm
        self.embed, self.head, self.rope = transformer.weights.embed, transformer.head, transformer.rope_window_only
        first = config.num_hidden_layers
        self.layers = range(first, first + len(weights.stages))
        self.attention = [Attention(config, i, w, mode) for i, w in zip(self.layers, weights.stages, strict=True)]
        chosen = config.dspark_num_experts_per_tok
        self.moe = [Moe(config, i, w, mode, chosen) for i, w in zip(self.layers, weights.stages, strict=True)]
        self.main_proj, self.main_norm = dense(weights.main_proj, mode), weights.main_norm
        self.markov_embed, self.markov_head = weights.markov_embed, dense(weights.markov_head, mode)
        self.confidence = dense(Linear(weights.confidence.view(1, -1)), mode)
        length, given = config.draft_length, config.dspark_confidence_temperatures
        require(length > 0, "draft_length", length, "1 or more")
        if given:
            allowed = f"none, or one for each of {length} drafts"
            require(len(given) >= length, "dspark_confidence_temperatures", f"{len(given)}", allowed)
        device = self.embed.device
        self.temperatures = torch.tensor(given[:length] or (1.0,) * length, dtype=torch.float32, device=device)
        self.confidence_weight = weights.confidence.view(-1).contiguous()

    @property
    def expert_parallel(self) -> bool:
        """Whether experts are on several ranks; then all of them draft, or join, in the same order."""
        return any(moe.parallel is not None for moe in self.moe)

    def join(self) -> None:
        """Take part without a request in the stages' collectives, if experts are on several ranks."""
        for moe in self.moe:
            if moe.parallel is not None:
                moe.parallel.join()

    def context(self, taps: Taps, cache: CachePools) -> None:
        """Write the stages' context rows of every row that a forward pass computed in the decoder.

        Rows of drafts that are rejected later may stay: they lie above the last accepted position, and are written
        again when that position is computed again.
        """
        rows = taps.rows
        if rows is None or rows.count == 0:
            return
        self._check_cache(cache)
        main = self.main_proj(taps.values)
        main = mla_fp4.norm_rope(main, self.main_norm, self.config.rms_norm_eps, None, out=main)
        rope = self.rope.rows(rows.positions, taps.highest)
        for layer, attention in zip(self.layers, self.attention, strict=True):
            window = attention.window_rows(main, rope, cache.quantised)
            swa_replay.store_window(window, cache.rings[layer], taps.slots, rows.cu_seqlens, rows.start_pos, rows.lower)

    def block(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: CachePools,
        highest: int | None = None,
    ) -> Block:
        """Run the stages on one block a request: the anchor, then noise. Writes nothing.

        Args:
            anchors: int64 [B], the newest token of each request, which the target has not processed yet.
            positions: int64 [B], where it stands; the context rows of the positions before it are written.
            slots: int32 [B], ring slots.
            highest: no position is above it; None looks, which waits for a GPU.

        The window before a block always lies at or above the start of a decoder tail, so no lower bound is needed.
        """
        self._check_cache(cache)
        config, size = self.config, self.config.dspark_block_size
        inputs = torch.full_like(anchors.unsqueeze(1).expand(-1, size), config.dspark_noise_token_id)
        inputs[:, 0] = anchors
        rows = _block_rows(positions, size)
        if highest is None:
            highest = int(positions.max())
        rope = self.rope.rows(rows.positions, highest + size - 1)
        streams = Streams(config, self.embed[inputs.view(-1)].float())
        for layer, stage, attention, moe in zip(self.layers, self.stages, self.attention, self.moe, strict=True):
            x = streams.enter(stage.hc_attn, stage.attn_norm)
            _, q = attention.query(x, rope)
            window = attention.window_rows(x, rope, cache.quantised)
            heads = swa_replay.window_attention(
                q, window, cache.rings[layer], slots, rows.cu_seqlens, rows.start_pos, rows.lower,
                config.sliding_window, attention.sink, rope, attention.scale, block=True,
            )  # fmt: skip
            streams.leave(attention.output(heads))
            x = streams.enter(stage.hc_ffn, stage.ffn_norm)
            streams.leave(moe(x, None, rows, None))
        hidden = streams.collapse(None)
        logits = self.head(mla_fp4.norm_rope(hidden, self.norm, config.rms_norm_eps, None))
        shape = (len(anchors), size, -1)
        return Block(anchors, positions, hidden.view(shape), logits.view(shape))

    def choose(self, block: Block, chooser: Chooser, temperature: torch.Tensor | None = None) -> Drafts:
        """Choose the drafts from left to right, each with the bias of the one before it.

        `temperature` float32 [B] shapes `log_q` (below 1e-5 a one-point distribution); None means 1. A draft length
        below the block's keeps a prefix of it.
        """
        previous, tokens, log_q, logit = block.anchors, [], [], []
        for k in range(self.config.draft_length):
            bias = self.markov_embed[previous].float()
            logits = block.logits[:, k] + self.markov_head(bias)
            logit.append(self.confidence(torch.cat([block.hidden[:, k], bias], dim=1)).squeeze(1))
            log_q.append(log_distribution(logits, temperature))
            previous = chooser(k, logits)
            tokens.append(previous)
        confidence_logits = torch.stack(logit, dim=1)
        scaled = (confidence_logits / self.temperatures).clamp(-_CONFIDENCE_LIMIT, _CONFIDENCE_LIMIT)
        return Drafts(torch.stack(tokens, 1), torch.stack(log_q, 1), confidence_logits, scaled.sigmoid())

    def draft(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: CachePools,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> Drafts:
        """`block`, then drafts drawn at `temperature` float32 [B] (below 1e-5 the most likely ones).

        A draw depends on its logits, `seeds` int64 [B] and the position of the new token.
        """
        every = torch.ones(len(anchors), device=anchors.device)

        def chooser(k: int, logits: torch.Tensor) -> torch.Tensor:
            at = positions + 1 + k
            return dspark_kernels.sample(logits, temperature, every, None, seeds, at, case=DRAFT_DRAW)[0]

        return self.choose(self.block(anchors, positions, slots, cache), chooser, temperature)

    def propose(
        self,
        block: Block,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        top_k: torch.Tensor | None,
        seeds: torch.Tensor,
        *,
        coupled: torch.Tensor | None = None,
        length: int | None = None,
    ) -> Proposed:
        """Draw the drafts of a block from left to right with the kernels that `dspark_kernels.verify` belongs to.

        Parameters of a request as in `dspark_kernels.sample`, one row each; `coupled` bool [B] marks requests whose
        drafts use the target's own draw. `length` takes the first drafts only. The block's logits are changed:
        verification reads them again.
        """
        length = length or self.config.draft_length
        records = dspark_kernels.new_proposals(len(block.anchors), length, block.anchors.device)
        previous, markov = block.anchors, []
        for k in range(length):
            markov.append(self.markov_embed[previous.clamp(min=0)].float())
            bias = self.markov_head(markov[-1])
            previous = dspark_kernels.draft_step(
                block.logits, k, bias, temperature, top_p, top_k, seeds, block.positions, records, coupled=coupled
            )
        _, confidence, _ = dspark_kernels.confidence_head(
            block.hidden[:, :length], torch.stack(markov, 1), self.confidence_weight, self.temperatures[:length]
        )
        return Proposed(records, block.logits, confidence)

    def _check_cache(self, cache: CachePools) -> None:
        least = self.layers.stop
        require(cache.rings.shape[0] >= least, "cache", f"{cache.rings.shape[0]} rings", f"{least} (draft_stages)")


def log_distribution(logits: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities float32 [B, V] of logits at `temperature` float32 [B] (None: 1).

    Below 1e-5 all mass stands on the most likely token, the lowest id among equals.
    """
    if temperature is None:
        return logits.log_softmax(-1)
    greedy = temperature < GREEDY_BELOW
    spread = (logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)).log_softmax(-1)
    best = logits == logits.amax(-1, keepdim=True)
    point = torch.where(best & (best.cumsum(-1) == 1), 0.0, -torch.inf)
    return torch.where(greedy.unsqueeze(1), point, spread)


def _block_rows(positions: torch.Tensor, size: int) -> Rows:
    count = len(positions)
    device = positions.device
    offsets = torch.arange(size, device=device)
    return Rows(
        cu_seqlens=torch.arange(0, (count + 1) * size, size, dtype=torch.int32, device=device),
        start_pos=positions,
        lower=torch.zeros_like(positions),
        positions=(positions.unsqueeze(1) + offsets).view(-1),
        visible={},
        owner=torch.arange(count, device=device).unsqueeze(1).expand(-1, size).reshape(-1),
        longest=size,
    )
