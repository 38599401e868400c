"""The DSpark draft stages, trained on a frozen backbone (docs/model.md, Draft stages).

Random positions of each sequence serve as anchors. For each the stages read the context rows before it and one
bidirectional block of `dspark_block_size` inputs, and predict the tokens after it, with the true tokens before each
prediction (teacher forcing). Of every position the loss takes cross-entropy, the distance between the draft's and the
target's distribution, and how well the confidence head foresees that a draft is accepted:

    L = 0.1 CE + 0.9 |p_d - p_t|_1 + 1.0 BCE(c, 1 - |p_d - p_t|_1 / 2),   weighted by exp(-k / 4) over positions k

1 - |p_d - p_t|_1 / 2 is the exact probability that rejection sampling at temperature 1 accepts the draft.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from orchestrator.train import block
from orchestrator.train.fused import fused
from orchestrator.train.lookup import lookup
from orchestrator.train.model import TrainModel
from orchestrator.train.noise import noise
from orchestrator.train.parameters import entries, lr_scale, matrix_view, register, registered, start_value
from orchestrator.train.phases import Phase
from orchestrator.train.quantise import prepare
from orchestrator.train.streams import Streams

ANCHORS = 256
"""Anchors in a sequence of a step, fewer in short ones."""
CE_WEIGHT, DISTANCE_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
POSITION_DECAY = 4.0


@fused
def _attend(scores: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor, scale: float) -> torch.Tensor:
    """Probabilities of raw scores [N, k, H, keys] with `seen` bool [N, keys]; the sink joins the denominator only."""
    s = (scores.float() * scale).masked_fill(~seen[:, None, None], float("-inf"))
    total = torch.logaddexp(torch.logsumexp(s, -1), sink)
    return torch.exp(s - total[..., None]).to(scores.dtype)


@fused
def _losses(
    logits: torch.Tensor, target: torch.Tensor, labels: torch.Tensor, confidence: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy, L1 distance, confidence loss and acceptance probability, each float32 [N, k]."""
    log_draft = torch.log_softmax(logits.float(), -1)
    ce = -log_draft.gather(-1, labels[..., None])[..., 0]
    distance = (log_draft.exp() - torch.softmax(target.float(), -1)).abs().sum(-1)
    accepted = (1 - 0.5 * distance.detach()).clamp(0, 1)
    return ce, distance, F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none"), accepted


class TrainDrafter(nn.Module):
    """Trains the tensors `mtp.*`; embedding, head and everything below belong to the frozen `backbone`."""

    backbone: TrainModel
    load: torch.Tensor

    def __init__(self, backbone: TrainModel, seed: int = 0) -> None:
        super().__init__()
        self.config, self.seed = backbone.config, seed
        object.__setattr__(self, "backbone", backbone.requires_grad_(False).eval())  # not a child: not ours to train
        self.entries = {e.name: e for e in entries(self.config, drafter=True)}
        generator = torch.Generator().manual_seed(seed + 1)
        register(self, {name: start_value(e, self.config, generator) for name, e in self.entries.items()})
        shape = (self.config.num_nextn_predict_layers, self.config.dspark_n_routed_experts)
        self.register_buffer("load", torch.zeros(shape), persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every stored value by its checkpoint name, routed experts stacked."""
        return registered(self)

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Tensors that Muon updates, as (count, rows, columns)."""
        views = {name: matrix_view(entry, self.config) for name, entry in self.entries.items()}
        return {name: view for name, view in views.items() if view is not None}

    def lr_scales(self) -> dict[str, float]:
        """Learning-rate factors of AdamW."""
        return {name: lr_scale(name) for name in self.entries}

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        """Balance the stages' experts as the backbone's are."""
        speed = 1e-2 * (1 - progress) + 1e-4
        for stage in range(self.config.num_nextn_predict_layers):
            load = self.load[stage]
            bias = self._get(f"mtp.{stage}.ffn.gate.bias")
            bias.add_(torch.sign(load.mean() - load), alpha=speed)
        self.load.zero_()

    def loss(self, tokens: torch.Tensor, phase: Phase, step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """tokens int64 [B, S + 1] -> the loss above and, per position, the mean acceptance probability."""
        block_size, dtype = self.config.dspark_block_size, self.backbone.dtype
        tokens = tokens[:, :-1]
        batch, length = tokens.shape
        with torch.no_grad():
            lower = self.backbone.replays(tokens) if phase.replay else None
            out = self.backbone(tokens, phase, lower, taps=True)
        anchors = self._anchors(tokens)
        first = torch.arange(batch, device=tokens.device)[:, None] * length
        flat = (first + anchors).flatten()[:, None] + torch.arange(block_size + 1, device=tokens.device)  # [N, k + 1]
        text = tokens.flatten()[flat]
        with torch.no_grad():
            head = self.backbone.get("head.weight").to(dtype)
            target = F.linear(out.hidden.flatten(0, 1)[flat[:, :-1]], head)
        logits, confidence = self(out.taps, anchors, text[:, 0], text[:, :-1], phase)
        ce, distance, bce, accepted = _losses(logits, target, text[:, 1:], confidence)
        weight = torch.exp(-torch.arange(block_size, device=tokens.device) / POSITION_DECAY)
        weight = weight / weight.sum()
        parts = {name: (value.mean(0) * weight).sum() for name, value in (("ce", ce), ("l1", distance), ("bce", bce))}
        total = CE_WEIGHT * parts["ce"] + DISTANCE_WEIGHT * parts["l1"] + CONFIDENCE_WEIGHT * parts["bce"]
        metrics = {name: value.detach() for name, value in parts.items()}
        metrics |= {f"accept{k}": accepted[:, k].mean() for k in range(block_size)}
        # Tokens a step yields when drafts are accepted so: 1 + sum over k of the product of the first k rates.
        metrics["length"] = 1 + accepted.cumprod(-1).sum(-1).mean()
        return total, metrics

    def forward(
        self, taps: torch.Tensor, anchors: torch.Tensor, anchor_ids: torch.Tensor, before: torch.Tensor, phase: Phase
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft logits [N, k, V] and confidence logits float32 [N, k].

        taps [B, S, taps * d]; anchors int64 [B, A], positions; anchor_ids int64 [N] with N = B * A; before int64
        [N, k], the token before each prediction.
        """
        config, dtype = self.config, self.backbone.dtype
        stages, size, window = config.num_nextn_predict_layers, config.dspark_block_size, config.sliding_window
        weights = prepare(self.entries, self.tensors(), dtype, quantised=phase.quantised)
        eps, device = config.rms_norm_eps, taps.device
        plain, embed = self.backbone.plain, self.backbone.get("embed.weight").to(dtype)
        batch, length = taps.shape[:2]

        main = block.normed(F.linear(taps, weights["mtp.0.main_proj"]), weights["mtp.0.main_norm.weight"], eps)
        inputs = torch.full((anchor_ids.numel(), size), config.dspark_noise_token_id, device=device)
        inputs[:, 0] = anchor_ids
        place = anchors.flatten()
        rope = block.angles(plain, (place[:, None] + torch.arange(size, device=device)).flatten())
        context = place[:, None] - window + torch.arange(window, device=device)  # [N, W], the positions before
        seen = torch.cat((context >= 0, torch.ones(len(place), size, dtype=torch.bool, device=device)), 1)
        sequence = torch.arange(batch, device=device).repeat_interleave(anchors.shape[1])
        gather = sequence[:, None] * length + context.clamp(min=0)
        streams = Streams(lookup(embed, inputs.flatten()), config.hc_mult, eps, config.hc_eps, config.hc_sinkhorn_iters)
        rows = block.repeated(block.angles(plain, torch.arange(length, device=device)), batch)
        main = main.flatten(0, 1)
        for stage in range(stages):
            w = block.sub(weights, f"mtp.{stage}.")
            norm = w["attn.kv_norm.weight"]
            ctx = block.cache_row(F.linear(main, w["attn.wkv"]), norm, rows, eps, "window", quantised=phase.quantised)
            x = streams.enter(block.hyper(w, "attn"), w["attn_norm.weight"], dtype)
            _, q = block.query(w, x, rope, config)
            own = block.cache_row(F.linear(x, w["attn.wkv"]), norm, rope, eps, "window", quantised=phase.quantised)
            keys = torch.cat((lookup(ctx, gather), own.unflatten(0, (-1, size))), 1)
            q = q.unflatten(0, (-1, size))
            scores = torch.bmm(q.flatten(1, 2), keys.mT).view(*q.shape[:3], -1)
            p = _attend(scores, seen, w["attn.attn_sink"], config.head_dim**-0.5)
            heads = torch.bmm(p.flatten(1, 2), keys).view(-1, *q.shape[2:])
            streams.leave(block.output(w, heads, rope, config))
            x = streams.enter(block.hyper(w, "ffn"), w["ffn_norm.weight"], dtype)
            y, chosen, _ = block.experts(w, x, config, config.dspark_num_experts_per_tok)
            if torch.is_grad_enabled():
                self.load[stage] += chosen.detach().sum(0)
            streams.leave(y)

        last = f"mtp.{stages - 1}"
        x = streams.collapse().unflatten(0, (-1, size))
        hidden = block.normed(x, weights[f"{last}.norm.weight"], eps).to(dtype)
        markov = lookup(weights[f"{last}.markov_head.embed.weight"], before)
        logits = F.linear(hidden, self.backbone.get("head.weight").to(dtype))
        logits = logits + F.linear(markov, weights[f"{last}.markov_head.head.weight"])
        features = torch.cat((x, markov.float()), -1)
        return logits, F.linear(features, self._get(f"{last}.confidence_head.proj.weight"))[..., 0]

    def _get(self, name: str) -> torch.Tensor:
        return getattr(self, name.replace(".", "/"))

    def _anchors(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, A], positions with at least one token before and a whole block after them."""
        length = tokens.shape[1]
        room = length - self.config.dspark_block_size - 1
        return 1 + noise(tokens, salt=3)[:, :room].topk(min(ANCHORS, length // 4), -1).indices.sort(-1).values
