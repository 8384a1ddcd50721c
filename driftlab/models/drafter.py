"""The EAGLE-3 / EAGLE-3.1 drafter, with every intermediate value declared as a site.

    a_t  = concat of captured states, ascending                   [A*Ht]
    g_t  = fc(N(a_t))                                             [H]
    u    = g_t at depth 1, the fed-back state at depth d >= 2
    x    = concat( RMS_in(embed(token t+d)), RMS_hid(u) )         [2H]
    r    = res + Attn(x)        res = u, or RMS_hid(u) under Residual.normed
    s_d  = r + MLP(RMS_post(r))
    logits_d = lm_head(RMS_final(s_d))                            [Vd]
    feedback = s_d  or  RMS_final(s_d)

The query of (anchor t, depth d) sits at rotary position t + d - 1 and sees the depth-1
keys of anchors 0..t and its own chain's keys of depths 2..d, nothing else. Hence any set
of anchors can be stepped at once, and one function serves training, probing and
drafting. Parameter names are the canonical names of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from einops import rearrange
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from driftlab.config import DrafterConfig, Feedback, FusionNorm, Provenance, Residual
from driftlab.errors import ConfigError, ContractError
from driftlab.models.hooks import Clock, HookPoint

# Attention runs in blocks of rows: at most so many elements of scores, so that memory stays
# linear in the text's length, and at most so many rows, so that keys after a block's last
# anchor are skipped and a block's scores stay in the cache.
SCORE_BUDGET = 2**20
BLOCK_ROWS = 128


@dataclass
class Memory:
    """Keys and values of one batch of texts.

    ``prefix[l]`` holds layer l's depth-1 keys and values of anchors 0..n-1,
    ``chain[l]`` those of depths 2..d for the rows that are being drafted, which are
    ``anchors`` [T] (the same for every text of the batch); ``host`` holds them on the CPU, so
    that blocks can be cut without waiting for a device.
    """

    n_layers: int
    prefix: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)
    chain: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    anchors: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    length: int = 0

    def __post_init__(self) -> None:
        self.prefix = [None] * self.n_layers
        self.chain = [[] for _ in range(self.n_layers)]

    def select(self, anchors: Tensor) -> None:
        """Draft on from these anchors only, ascending; call between depth 1 and depth 2."""
        if any(self.chain):
            raise ContractError("anchors can be selected before depth 2 only")
        host = anchors.cpu()
        if len(host) and int(host[-1]) >= self.length:
            raise ContractError("anchor outside the prefix", got=int(host[-1]))
        self.anchors, self.host = anchors, host

    def shorten(self, rows: int) -> None:
        """Draft on from the first ``rows`` anchors only; at any depth."""
        self.anchors, self.host = self.anchors[:rows], self.host[:rows]
        self.chain = [[(k[:, :, :rows], v[:, :, :rows]) for k, v in c] for c in self.chain]


@dataclass(frozen=True)
class State:
    """One step's result for ``anchors`` [T].

    Each [B, T, H]: before and after the final norm, and what is fed back.
    """

    depth: int
    anchors: Tensor
    pre: Tensor
    post: Tensor
    feedback: Tensor

    def select(self, rows: Tensor) -> State:
        """The same for some rows only."""
        return State(
            self.depth,
            self.anchors[rows],
            self.pre[:, rows],
            self.post[:, rows],
            self.feedback[:, rows],
        )


class Rotary(nn.Module):
    """Rotary embedding of ``config.rope``; HuggingFace computes the frequencies."""

    def __init__(self, config: DrafterConfig, dim: int) -> None:
        super().__init__()
        rope = config.rope
        try:
            self.table = LlamaRotaryEmbedding(
                LlamaConfig(
                    hidden_size=dim * config.num_heads,
                    num_attention_heads=config.num_heads,
                    head_dim=dim,
                    max_position_embeddings=rope.max_position,
                    rope_parameters={
                        **rope.parameters,
                        "rope_type": rope.rope_type,
                        "rope_theta": rope.theta,
                    },
                )
            )
            rates = self.table.inv_freq
            if not bool((rates.isfinite() & (rates >= 0)).all()):
                raise ValueError("a rate of turning below 0 or infinite")
            if 2 * len(rates) > dim:
                raise ValueError(f"a width of {dim} has no halves")
            # A list of one factor would be stretched over all pairs.
            if len(rope.parameters.get("short_factor", rates)) != len(rates):
                raise ValueError(f"short_factor is not one number for each of {len(rates)} pairs")
        except (
            *(KeyError, TypeError, ValueError, ArithmeticError, RuntimeError),
            StrictDataclassError,
        ) as error:
            cause = error.__cause__ or error
            raise ConfigError(
                f"rotary embedding {rope.rope_type!r} cannot be built",
                got=f"{type(cause).__name__}: {cause}, base {rope.theta}, "
                f"parameters {rope.parameters}",
                remedy="Give a rope_type that transformers knows, with all of its parameters, and "
                "heads of an even width.",
            ) from None
        self.interleaved = rope.interleaved
        # Past their limit these two turn every position by the length of the text so far, so that
        # keys of earlier rounds, and chains of earlier anchors, would have to be turned again.
        limits = {
            "dynamic": rope.max_position,
            "longrope": rope.parameters.get("original_max_position_embeddings"),
        }
        self.kind, self.limit = rope.rope_type, limits.get(rope.rope_type)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [B, heads, T, e] at positions [T]; dimensions past the table's stay.

        Raises ContractError for ``dynamic`` and ``longrope`` past the length up to which they
        do not depend on the text.
        """
        if self.limit is not None and positions.numel() and int(positions.max()) >= self.limit:
            raise ContractError(
                f"the {self.kind} rotation of position {int(positions.max())} depends on the "
                f"length of the whole text, and so has no one value past {self.limit} positions",
                remedy=f"Use texts of up to {self.limit} tokens, or override rope.rope_type and "
                "rope.theta with the fixed rotation that the engine's table holds.",
            )
        cos, sin = (t[:, None] for t in self.table(x, positions[None]))  # [1, 1, T, r]
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if self.interleaved:
            turned = rearrange(turned, "... (e two) -> ... (two e)", two=2)
        half = turned.shape[-1] // 2
        swapped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
        return torch.cat([turned * cos + swapped * sin, rest], dim=-1)


class GQAProjections(nn.Module):
    """Grouped-query projections: x [B, T, in] -> q [B, h, T, e], k and v [B, g, T, e]."""

    def __init__(self, config: DrafterConfig, in_features: int) -> None:
        super().__init__()
        e, self.heads, self.kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
        self.q_proj = nn.Linear(in_features, self.heads * e, bias=config.qkv_bias)
        self.k_proj = nn.Linear(in_features, self.kv_heads * e, bias=config.qkv_bias)
        self.v_proj = nn.Linear(in_features, self.kv_heads * e, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * e, config.hidden_size, bias=config.out_bias)
        self.q_norm = LlamaRMSNorm(e, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(e, config.norm_eps) if config.qk_norm else nn.Identity()
        if config.attention_gate:
            self.g_proj = nn.Linear(in_features, self.heads * e, bias=False)
        self.rotary = Rotary(config, e)
        self.scale = e**-0.5

    def readers(self) -> list[nn.Linear]:
        """The matrices that read x, in the order in which `mix` takes their results."""
        gate = [self.g_proj] if hasattr(self, "g_proj") else []
        return [self.q_proj, self.k_proj, self.v_proj, *gate]

    def mix(
        self, read: Sequence[Tensor], positions: Tensor, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `readers` gave -> q of rows ``first`` and on, k and v of all."""
        q = rearrange(read[0][:, first:], "b t (h e) -> b h t e", h=self.heads)
        k = rearrange(read[1], "b t (g e) -> b g t e", g=self.kv_heads)
        v = rearrange(read[2], "b t (g e) -> b g t e", g=self.kv_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.rotary(q, positions[first:]), self.rotary(k, positions), v


class MLAProjections(nn.Module):
    """Low-rank projections of DeepSeek / Kimi drafters; one rotary key is shared by all heads."""

    def __init__(self, config: DrafterConfig, in_features: int) -> None:
        super().__init__()
        mla = config.mla
        if mla is None:
            raise ConfigError("MLAProjections need config.mla")
        self.mla, self.heads, self.kv_heads = mla, config.num_heads, config.num_heads
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(in_features, self.heads * width, bias=False)
        else:
            self.q_a_proj = nn.Linear(in_features, mla.q_lora_rank, bias=config.qkv_bias)
            self.q_a_layernorm = LlamaRMSNorm(mla.q_lora_rank, config.norm_eps)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, self.heads * width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            in_features, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=config.qkv_bias
        )
        self.kv_a_layernorm = LlamaRMSNorm(mla.kv_lora_rank, config.norm_eps)
        self.kv_b_proj = nn.Linear(
            mla.kv_lora_rank, self.heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(
            self.heads * mla.v_head_dim, config.hidden_size, bias=config.out_bias
        )
        if config.attention_gate:
            self.g_proj = nn.Linear(in_features, self.heads * mla.v_head_dim, bias=False)
        self.rotary = Rotary(config, mla.qk_rope_head_dim)
        self.scale = width**-0.5 * mla.softmax_multiplier

    def readers(self) -> list[nn.Linear]:
        """The matrices that read x, in the order in which `mix` takes their results."""
        q = self.q_proj if self.mla.q_lora_rank is None else self.q_a_proj
        gate = [self.g_proj] if hasattr(self, "g_proj") else []
        return [q, self.kv_a_proj_with_mqa, *gate]

    def mix(
        self, read: Sequence[Tensor], positions: Tensor, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `readers` gave -> q of rows ``first`` and on, k and v of all."""
        mla = self.mla
        q = read[0][:, first:]
        if mla.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = rearrange(q, "b t (h e) -> b h t e", h=self.heads)
        q_nope, q_rope = q.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        latent, k_rope = read[1].split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        kv = rearrange(
            self.kv_b_proj(self.kv_a_layernorm(latent)), "b t (h e) -> b h t e", h=self.heads
        )
        k_nope, v = kv.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        k_rope = self.rotary(k_rope[:, None], positions).expand(-1, self.heads, -1, -1)
        q = torch.cat([q_nope, self.rotary(q_rope, positions[first:])], dim=-1)
        return q, torch.cat([k_nope, k_rope], dim=-1), v


Projections = GQAProjections | MLAProjections


@dataclass(frozen=True)
class Block:
    """Rows that attend at once: ``rows`` of the step, over prefix keys 0..``seen`` - 1.

    ``anchors`` [rows] are theirs; keys before ``start`` are seen by all of them. A window of
    ``window`` keys is measured from ``shift`` past the anchor, and the chain's ``gone`` oldest
    keys have left it.
    """

    rows: slice
    seen: int
    start: int
    anchors: Tensor
    window: int | None
    shift: int
    gone: int

    def mask(self, like: Tensor) -> Tensor:
        """[rows, seen - start] of -inf where a key is hidden, else 0, as ``like``'s dtype.

        Made where it is needed and not kept: masks of all blocks would be as large as a pattern.
        """
        part = self.anchors.to(like.device)
        key = torch.arange(self.start, self.seen, device=like.device)
        hidden = key > part[:, None]
        if self.window is not None:
            newest = part + self.shift
            hidden |= newest[:, None] - key >= self.window
        return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))

    def scores(self, q: Tensor, keys: Tensor, chain: Sequence[Tensor]) -> Tensor:
        """Scaled q [B, h, T, e], keys [B, g, S, e], chain's keys [B, g, T, e] each.

        -> [B, h, rows, seen + len(chain)], the chain's scores last.
        """
        q = self.grouped(q, keys)
        scores = torch.matmul(q.flatten(2, 3), keys[:, :, : self.seen].mT)
        scores = scores.unflatten(2, q.shape[2:4])
        scores[..., self.start :] += self.mask(q)
        if chain:
            own = [(q * self.own(k)).sum(dim=-1, keepdim=True) for k in chain]
            own[: self.gone] = [torch.full_like(s, float("-inf")) for s in own[: self.gone]]
            scores = torch.cat([scores, *own], dim=-1)
        return scores.flatten(1, 2)

    def mixed(self, pattern: Tensor, values: Tensor, chain: Sequence[Tensor]) -> Tensor:
        """pattern [B, h, rows, seen + len(chain)] -> sum of values, [B, h, rows, e_v]."""
        weights = pattern.to(values.dtype).unflatten(1, (values.shape[1], -1))
        prefix = weights[..., : self.seen].flatten(2, 3)
        out = torch.matmul(prefix, values[:, :, : self.seen]).unflatten(2, weights.shape[2:4])
        for j, v in enumerate(chain, start=self.seen):
            out = out + weights[..., j, None] * self.own(v)
        return out.flatten(1, 2)

    def grouped(self, q: Tensor, keys: Tensor) -> Tensor:
        """This block's rows of [B, h, T, e] -> [B, g, h / g, rows, e]."""
        return q[:, :, self.rows].unflatten(1, (keys.shape[1], -1))

    def own(self, chain: Tensor) -> Tensor:
        """This block's rows of one depth's chain keys or values -> [B, g, 1, rows, e]."""
        return chain[:, :, None, self.rows]


class _Attend(torch.autograd.Function):
    """`Block.scores`, softmax and `Block.mixed` with a gradient that stores no pattern.

    The backward pass computes each block's pattern again, so that memory stays linear.
    """

    @staticmethod
    def forward(ctx: Any, blocks: list[Block], q: Tensor, *kv: Tensor) -> Tensor:
        n = len(kv) // 2
        (keys, *own_k), (values, *own_v) = kv[:n], kv[n:]
        out = [
            block.mixed(_softmax(block.scores(q, keys, own_k)), values, own_v) for block in blocks
        ]
        mixed = out[0] if len(out) == 1 else torch.cat(out, dim=2)
        ctx.blocks = blocks
        ctx.save_for_backward(mixed, q, *kv)
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, q, *kv = ctx.saved_tensors
        n = len(kv) // 2
        (keys, *own_k), (values, *own_v) = kv[:n], kv[n:]
        d_q = torch.empty_like(q)
        d_keys, d_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
        d_own = [torch.empty_like(x) for x in (*own_k, *own_v)]
        d_own_k, d_own_v = d_own[: n - 1], d_own[n - 1 :]
        # sum_j P_j dP_j of each row, which the gradient of a softmax subtracts
        inner = (grad.float() * mixed).sum(dim=-1, keepdim=True)
        for block in ctx.blocks:
            rows, seen = block.rows, block.seen
            pattern = _softmax(block.scores(q, keys, own_k)).unflatten(1, (keys.shape[1], -1))
            g, own_q = block.grouped(grad, keys), block.grouped(q, keys)
            flat_g, flat_q = g.flatten(2, 3), own_q.flatten(2, 3)
            d_scores = torch.empty_like(pattern)
            d_scores[..., :seen] = torch.matmul(flat_g, values[:, :, :seen].mT).view(
                *pattern.shape[:-1], seen
            )
            for j, v in enumerate(own_v):
                d_scores[..., seen + j] = (g * block.own(v)).sum(dim=-1)
            d_scores.sub_(block.grouped(inner, keys)).mul_(pattern)
            weights, d_s = pattern.to(q.dtype), d_scores.to(q.dtype)
            d_values[:, :, :seen] += torch.matmul(weights[..., :seen].flatten(2, 3).mT, flat_g)
            d_keys[:, :, :seen] += torch.matmul(d_s[..., :seen].flatten(2, 3).mT, flat_q)
            d_block = torch.matmul(d_s[..., :seen].flatten(2, 3), keys[:, :, :seen]).view_as(own_q)
            for j, k in enumerate(own_k):
                column = d_s[..., seen + j, None]
                d_block += column * block.own(k)
                d_own_k[j][:, :, rows] = (column * own_q).sum(dim=2)
                d_own_v[j][:, :, rows] = (weights[..., seen + j, None] * g).sum(dim=2)
            d_q[:, :, rows] = d_block.flatten(1, 2)
        return (
            *(None, d_q, d_keys.to(keys.dtype), *d_own_k),
            *(d_values.to(values.dtype), *d_own_v),
        )


def _softmax(scores: Tensor) -> Tensor:
    """In fp32 whatever the dtype, so that rows sum to 1."""
    return scores.softmax(dim=-1, dtype=torch.float32)


class ChainAttention(nn.Module):
    """Attention of drafted rows over the true prefix and over each row's own chain.

    Holds sites and no weights: the layer owns its projections, under their published names.
    """

    def __init__(self, config: DrafterConfig, index: int, clock: Clock, prefix: str) -> None:
        super().__init__()
        self.window = config.windows[index] if config.windows else None
        self.window_moves = config.window_moves
        self.index, self._clock = index, clock
        self.gated = config.attention_gate
        self.at_q = HookPoint(f"{prefix}attn.q", clock)
        self.at_k = HookPoint(f"{prefix}attn.k", clock)
        self.at_v = HookPoint(f"{prefix}attn.v", clock)
        self.at_scores = HookPoint(f"{prefix}attn.scores", clock)
        self.at_pattern = HookPoint(f"{prefix}attn.pattern", clock)
        self.at_out = HookPoint(f"{prefix}attn.out", clock)

    def forward(
        self,
        own: Projections,
        read: Sequence[Tensor],
        positions: Tensor,
        memory: Memory,
        depth: int,
        first: int,
    ) -> Tensor:
        """read: what ``own.readers()`` gave. -> what is written for rows ``first`` and on."""
        q, k, v = own.mix(read, positions, first)
        k, v = self.at_k(k), self.at_v(v)
        self._clock.skip(first)
        q = self.at_q(q)
        # Blocks of batched products would copy what is not contiguous, each block again.
        k, v = k.to(v.dtype).contiguous(), v.contiguous()
        if depth == 1:
            old = memory.prefix[self.index]
            if old is not None:
                k, v = torch.cat([old[0], k], dim=2), torch.cat([old[1], v], dim=2)
            memory.prefix[self.index] = (k, v)
        else:
            memory.chain[self.index].append((k, v))
        mixed = self._attend((q * own.scale).to(v.dtype), memory, memory.host[first:])
        mixed = rearrange(mixed, "b h t e -> b t (h e)")
        if self.gated:
            mixed = mixed * torch.sigmoid(read[-1][:, first:])
        return self.at_out(own.o_proj(mixed))

    def _attend(self, q: Tensor, memory: Memory, anchors: Tensor) -> Tensor:
        """Scaled q [B, h, T, e] of ``anchors`` [T] (on the CPU) -> [B, h, T, e_v]."""
        prefix = memory.prefix[self.index]
        if prefix is None:
            raise ContractError("depth 2 and deeper need a depth-1 step first")
        keys, values = prefix
        chain_k, chain_v = ([pair[i] for pair in memory.chain[self.index]] for i in (0, 1))
        blocks = self._blocks(q, keys, anchors, len(chain_k))
        if not (self.at_scores.hooked or self.at_pattern.hooked):
            return _Attend.apply(blocks, q, keys, *chain_k, values, *chain_v)
        out = []
        for block in blocks:
            self._clock.rows = block.rows
            scores = self.at_scores(block.scores(q, keys, chain_k))
            # The site holds fp32 in every dtype, so that recorded rows sum to 1.
            out.append(block.mixed(self.at_pattern(_softmax(scores)), values, chain_v))
        self._clock.rows = slice(0, len(anchors))
        return torch.cat(out, dim=2)

    def _blocks(self, q: Tensor, keys: Tensor, anchors: Tensor, chain: int) -> list[Block]:
        batch, heads, rows, _ = q.shape
        most = SCORE_BUDGET // (batch * heads * (keys.shape[2] + chain))
        size = max(1, min(most, BLOCK_ROWS))
        # A window is measured from the anchor as trained, from the drafted position if it moves.
        shift = chain if self.window_moves else 0
        gone = 0 if self.window is None else max(0, shift - self.window)
        blocks = []
        for at in range(0, rows, size):
            part = anchors[at : at + size]
            # No row of this block may look past its last anchor, all may up to its first.
            seen = int(part[-1]) + 1 if rows > size else keys.shape[2]
            start = 0 if self.window is not None else min(int(part[0]) + 1, seen)
            span = slice(at, at + len(part))
            blocks.append(Block(span, seen, start, part, self.window, shift, gone))
        return blocks


class DrafterLayer(nn.Module):
    """One decoder layer. The first takes embedding and fed-back state, later ones the stream."""

    def __init__(self, config: DrafterConfig, index: int, clock: Clock) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        prefix = "" if index == 0 else f"layer.{index}."
        self.config, self.index = config, index
        self.input_layernorm = LlamaRMSNorm(width, eps)
        if index == 0:
            self.hidden_norm = LlamaRMSNorm(width, eps)
            self.at_token = HookPoint("token.normed", clock)
            self.at_feedback = HookPoint("feedback.normed", clock)
        projections = GQAProjections if config.mla is None else MLAProjections
        self.self_attn = projections(config, width * (2 if index == 0 else 1))
        self.attention = ChainAttention(config, index, clock, prefix)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.mlp = LlamaMLP(
            LlamaConfig(
                hidden_size=width,
                num_attention_heads=1,  # the default of 32 would have to divide the width
                intermediate_size=config.intermediate_size,
                hidden_act=config.hidden_act,
                mlp_bias=config.mlp_bias,
            )
        )
        self.at_mid = HookPoint(f"{prefix}resid.mid", clock)
        self.at_mlp = HookPoint(f"{prefix}mlp.out", clock)

    def forward(
        self,
        u: Tensor,
        embedded: Tensor | None,
        positions: Tensor,
        memory: Memory,
        depth: int,
        *,
        first: int = 0,
        half: Half | None = None,
    ) -> Tensor:
        """u [B, T, H] -> [B, T - first, H]; rows before ``first`` give keys and values only.

        ``half`` takes the place of ``embedded``: its part of the projections, computed before.
        """
        if embedded is None and half is None:
            x, residual = self.input_layernorm(u), u
            read: Sequence[Tensor] = [reader(x) for reader in self.self_attn.readers()]
        else:
            inner = self.input_layernorm(u) if self.config.double_hidden_norm else u
            hidden = self.at_feedback(self.hidden_norm(inner))
            residual = u if self.config.residual is Residual.raw else hidden
            if half is None:
                token = self.at_token(self.input_layernorm(embedded))
                x = torch.cat([token, hidden], dim=-1)
                read = [reader(x) for reader in self.self_attn.readers()]
            else:
                read = half.add(hidden)
        written = self.attention(self.self_attn, read, positions, memory, depth, first)
        mid = self.at_mid(residual[:, first:] + written)
        return mid + self.at_mlp(self.mlp(self.post_attention_layernorm(mid)))

    def read(self, embedded: Tensor) -> Half:
        """The embedding's half of the first layer's projections, [B, S, H] -> [B, S, R]."""
        readers = self.self_attn.readers()
        weight = torch.cat([reader.weight for reader in readers])
        biases: list[Tensor] = [
            reader.weight.new_zeros(reader.out_features) if reader.bias is None else reader.bias
            for reader in readers
        ]
        bias = torch.cat(biases) if any(r.bias is not None for r in readers) else None
        token = self.input_layernorm(embedded)
        width = token.shape[-1]
        given = nn.functional.linear(token, weight[:, :width], bias)
        return Half(given, weight[:, width:], [reader.out_features for reader in readers])


@dataclass(frozen=True)
class Half:
    """What the embeddings [B, S] of a text give to the first layer's projections.

    In a forced chain depth d + 1 reads the token after the one that depth d read, so that this
    half of the product is the same at every depth but for a shift. ``given`` [B, S, R] holds the
    results of all readers side by side, ``weight`` [R, H] their half for the hidden state.
    """

    given: Tensor
    weight: Tensor
    sizes: list[int]

    def __getitem__(self, rows: slice) -> Half:
        return Half(self.given[:, rows], self.weight, self.sizes)

    def add(self, hidden: Tensor) -> Sequence[Tensor]:
        """hidden [B, T, H] -> what each reader gives, [B, T, its size]."""
        return nn.functional.linear(hidden, self.weight).add_(self.given).split(self.sizes, dim=-1)


class Drafter(nn.Module):
    """The drafter. ``draft_to_target`` [Vd] gives each draft id's target id.

    ``provenance`` says of every resolved field whether it was read, derived or assumed.
    """

    draft_to_target: Tensor
    target_to_draft: Tensor

    def __init__(
        self,
        config: DrafterConfig,
        draft_to_target: Tensor | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        super().__init__()
        self.config, self.provenance = config, dict(provenance or {})
        width, eps, n = config.hidden_size, config.norm_eps, len(config.boundaries)
        self._clock = clock = Clock()
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if n:
            self.fc = nn.Linear(n * config.target_hidden_size, width, bias=config.fc_bias)
        if config.fusion_norm in (FusionNorm.concat, FusionNorm.concat_per_layer):
            self.input_norm = LlamaRMSNorm(n * config.target_hidden_size, eps)
        if config.fusion_norm in (FusionNorm.per_layer, FusionNorm.concat_per_layer):
            self.fc_norm = nn.ModuleList(
                LlamaRMSNorm(config.target_hidden_size, eps) for _ in range(n)
            )
        self.layers = nn.ModuleList(
            DrafterLayer(config, i, clock) for i in range(config.num_layers)
        )
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self._set_vocabulary(draft_to_target)
        self.at_in = nn.ModuleList(HookPoint(f"fuse.in.{i}", clock) for i in range(n))
        self.at_normed = nn.ModuleList(HookPoint(f"fuse.normed.{i}", clock) for i in range(n))
        self.at_part = nn.ModuleList(HookPoint(f"fuse.part.{i}", clock) for i in range(n))
        self.at_fused = HookPoint("fuse.out", clock)
        self.at_embed = HookPoint("token.embed", clock)
        self.at_feedback = HookPoint("feedback.in", clock)
        self.at_pre = HookPoint("state.pre", clock)
        self.at_post = HookPoint("state.post", clock)
        self.at_logits = HookPoint("logits", clock)

    def _set_vocabulary(self, draft_to_target: Tensor | None) -> None:
        config = self.config
        if draft_to_target is None:
            if config.draft_vocab_size != config.vocab_size:
                raise ContractError(
                    "a reduced draft vocabulary needs its map to target ids",
                    got=f"{config.draft_vocab_size} of {config.vocab_size} ids and no map",
                    remedy="Give draft_to_target (absolute target ids).",
                )
            draft_to_target = torch.arange(config.vocab_size)
        if draft_to_target.shape != (config.draft_vocab_size,):
            raise ContractError(
                "the vocabulary map does not have one entry per draft id",
                got=f"{tuple(draft_to_target.shape)} for {config.draft_vocab_size}",
            )
        ids = draft_to_target.to(torch.long)
        outside = (ids < 0) | (ids >= config.vocab_size)
        if bool(outside.any()):
            raise ContractError(
                f"the vocabulary map leaves the target's {config.vocab_size} ids",
                got=f"draft id {int(outside.nonzero()[0])} -> {int(ids[outside][0])}",
            )
        if len(ids.unique()) != len(ids):
            raise ContractError("the vocabulary map sends two draft ids to one target id")
        back = torch.full((config.vocab_size,), -1, dtype=torch.long)
        back[ids] = torch.arange(len(ids))
        self.register_buffer("draft_to_target", ids)
        self.register_buffer("target_to_draft", back, persistent=False)

    def new_memory(self) -> Memory:
        return Memory(self.config.num_layers)

    def _check_aux(self, aux: Tensor) -> None:
        n, width = len(self.config.boundaries), self.config.target_hidden_size
        want = n * width if n else width
        if aux.shape[-1] != want:
            raise ContractError(
                f"fc expects {want} = {max(n, 1)} x {width} input features",
                got=f"captured states of width {aux.shape[-1]}",
                remedy="Capture the boundaries that the drafter names, from its own target.",
            )

    def fuse(self, aux: Tensor, *, first: int = 0) -> Tensor:
        """Captured states [B, T, A*Ht] of anchors ``first`` and on -> fused input g [B, T, H].

        States of another dtype (stored ones are often bfloat16) are cast to the drafter's.
        """
        self._check_aux(aux)
        aux = aux.to(self.norm.weight.dtype)
        self._clock.depth = 1
        self._clock.rows = slice(0, aux.shape[1])
        self._clock.anchors = torch.arange(first, first + aux.shape[1])
        config = self.config
        if not config.boundaries:
            return self.at_fused(aux)
        width = config.target_hidden_size
        chunks = [p(c) for p, c in zip(self.at_in, aux.split(width, dim=-1), strict=True)]
        if hasattr(self, "input_norm"):
            chunks = list(self.input_norm(torch.cat(chunks, dim=-1)).split(width, dim=-1))
        if hasattr(self, "fc_norm"):
            chunks = [norm(c) for norm, c in zip(self.fc_norm, chunks, strict=True)]
        chunks = [p(c) for p, c in zip(self.at_normed, chunks, strict=True)]
        fused = self.fc(torch.cat(chunks, dim=-1))
        parts = list(self._parts(chunks)) if any(p.hooked for p in self.at_part) else []
        replaced = any(new is not old for old, new in parts)
        if parts and (replaced or torch.is_grad_enabled()):
            total = sum((new for _, new in parts[1:]), start=parts[0][1])
            if config.fc_bias:
                total = total + self.fc.bias
            # A sum rounds otherwise than one product. Parts that are only looked at must not
            # change a bit, so the sum then lends its gradient alone.
            fused = total if replaced else fused.detach() + (total - total.detach())
        return self.at_fused(fused)

    def _parts(self, chunks: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        weights = self.fc.weight.split(self.config.target_hidden_size, dim=1)
        for point, chunk, weight in zip(self.at_part, chunks, weights, strict=True):
            part = nn.functional.linear(chunk, weight)
            yield part, point(part)

    def read(self, tokens: Tensor) -> Half | None:
        """The part of every depth that only reads ``tokens`` [B, S]; see `step`.

        None where a hook wants to see the embedding of each depth.
        """
        layer = cast(DrafterLayer, self.layers[0])
        if self.at_embed.hooked or layer.at_token.hooked:
            return None
        return layer.read(self.embed_tokens(tokens))

    def step(
        self,
        tokens: Tensor,
        u: Tensor,
        memory: Memory,
        *,
        depth: int,
        first: int = 0,
        half: Half | None = None,
    ) -> State:
        """One depth for T rows of B texts.

        Depth 1 appends its rows to the prefix (anchors ``memory.length`` and on) and
        drops the chains; depth d >= 2 continues the chains of ``memory.anchors``.

        Parameters
        ----------
        tokens: [B, T] target ids, token t + depth of each anchor t.
        u: [B, T, H] fused input at depth 1, else the fed-back state of depth - 1.
        first: at depth 1, rows before it give the last layer's keys and values and nothing
            else; the state, and the chains, are of the others.
        half: what `read` gave for these rows, if it is known; ``tokens`` are then not read.
        """
        if depth == 1:
            old = memory.length
            memory.length += tokens.shape[1]
            memory.chain = [[] for _ in range(self.config.num_layers)]
            memory.host = torch.arange(old, memory.length)
            memory.anchors = memory.host.to(tokens.device)
        if depth != len(memory.chain[0]) + (1 if depth == 1 else 2):
            raise ContractError(
                "depths run in order", got=f"depth {depth} after {len(memory.chain[0]) + 1}"
            )
        if tokens.shape[1] != len(memory.anchors):
            raise ContractError(
                f"depth {depth} has {tokens.shape[1]} rows for {len(memory.anchors)} anchors"
            )
        self._clock.depth = depth
        self._clock.rows = slice(0, tokens.shape[1])
        self._clock.anchors = memory.anchors
        shift = self.config.draft_position_offset if depth > 1 else 0
        positions = memory.anchors + depth - 1 + shift
        embedded = self.at_embed(self.embed_tokens(tokens)) if half is None else None
        hidden = self.layers[0](
            self.at_feedback(u),
            *(embedded, positions, memory, depth),
            first=first if len(self.layers) == 1 else 0,
            half=half,
        )
        for layer in self.layers[1:]:
            skip = first if layer.index == len(self.layers) - 1 else 0
            hidden = layer(hidden, None, positions, memory, depth, first=skip)
        if first:
            memory.anchors, memory.host = memory.anchors[first:], memory.host[first:]
        pre = self.at_pre(hidden)
        post = self.at_post(self.norm(pre))
        feedback = post if self.config.feedback is Feedback.post_norm else pre
        return State(depth, memory.anchors, pre, post, feedback)

    def logits(self, state: State) -> Tensor:
        """Scores over the draft vocabulary, [B, T, Vd]."""
        self._clock.depth, self._clock.anchors = state.depth, state.anchors
        self._clock.rows = slice(0, len(state.anchors))
        scores = self.lm_head(self.head_input(state))
        return self.at_logits(scores * self.config.logit_scale)

    def head_input(self, state: State) -> Tensor:
        """What the head reads, [B, T, H]."""
        return state.pre if self.config.logits_from_raw else state.post

    def to_target(self, draft: Tensor) -> Tensor:
        """Draft ids -> target ids."""
        return self.draft_to_target[draft]
