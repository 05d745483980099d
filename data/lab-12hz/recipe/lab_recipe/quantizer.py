"""The training side of the decoder's residual quantizer: gradients, codebook updates, initialisation.

Codebooks are not trained by gradients. They are running averages of the vectors that chose them, which is what the
published names ``embedding_sum`` and ``cluster_usage`` are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vgraph_lab.qwen3_tts.encoder import nearest_codes
from vgraph_lab.qwen3_tts.quantizer import Codebook, ResidualVectorQuantizer, SplitResidualVectorQuantizer

from .config import RecipeConfig

__all__ = ["Quantized", "initialise_codebooks", "pass_unquantized", "quantize"]


@dataclass(frozen=True)
class Quantized:
    """What came out of the quantizer.

    Attributes:
        features: input of the decoder [B, codebook_dim, T]; gradients pass straight through to the latents.
        codes: int64 [B, num_quantizers, T].
        commitment: how far the latents are from their codes, relative to their variance (scalar).
        error: share of the variance that is left after the last level, per split (first, rest).
    """

    features: Tensor
    codes: Tensor
    commitment: Tensor
    error: tuple[Tensor, ...]


def pass_unquantized(quantizer: SplitResidualVectorQuantizer, latents: Tensor) -> Tensor:
    """Latents [B, codebook_dim, T] → decoder input as if every code vector were exact."""
    return sum((split.output_proj(split.input_proj(latents)) for split in _splits(quantizer)), start=torch.zeros_like(latents))


def quantize(
    quantizer: SplitResidualVectorQuantizer, latents: Tensor, config: RecipeConfig, *, update: bool, restart_dead: bool = False
) -> Quantized:
    """Quantise latents [B, codebook_dim, T].

    Args:
        quantizer: the decoder's.
        latents: of the encoder.
        config: decay, dropout and restart threshold.
        update: training: move the codebooks, and drop the last levels of some crops.
        restart_dead: with ``update``, also put codes that nothing chooses onto vectors of this batch.
    """
    batch, _, frames = latents.shape
    features, commitment = torch.zeros_like(latents), latents.new_zeros(())
    codes, errors = [], []
    for split in _splits(quantizer):
        vectors = split.input_proj(latents).transpose(1, 2).flatten(0, 1)  # [B * T, D]
        books, variance = split.codebooks, vectors.detach().var(dim=0).sum()
        kept = _kept_levels(batch, len(books), config.quantizer_dropout if update else 0.0, latents.device)
        kept = kept.repeat_interleave(frames)[:, None]
        residual, chosen = vectors.detach(), torch.zeros_like(vectors)
        for level, book in enumerate(books):
            table = book.vectors()
            index = nearest_codes(residual, table)
            if update:
                _move(book, residual, index, config, restart_dead)
            chosen = chosen + table[index] * (level < kept)
            residual = residual - table[index]
            # |residual|², but written with `vectors`, which carries a gradient; what the levels add up to does not
            commitment = commitment + (vectors - (vectors.detach() - residual)).square().sum(dim=1).mean() / variance / len(books)
            codes.append(index.view(batch, frames))
        errors.append(residual.square().sum(dim=1).mean() / variance)
        straight_through = vectors + (chosen - vectors).detach()
        features = features + split.output_proj(straight_through.view(batch, frames, -1).transpose(1, 2))
    return Quantized(features, torch.stack(codes, dim=1), commitment, tuple(errors))


def _splits(quantizer: SplitResidualVectorQuantizer) -> Iterator[ResidualVectorQuantizer]:
    yield quantizer.rvq_first
    yield quantizer.rvq_rest


def _kept_levels(batch: int, levels: int, dropout: float, device: torch.device) -> Tensor:
    """How many levels each crop keeps [B]: all, or with probability ``dropout`` any smaller number from 1."""
    everything = torch.full((batch,), levels, device=device)
    if dropout == 0 or levels == 1:
        return everything
    return torch.where(torch.rand(batch, device=device) < dropout, torch.randint(1, levels, (batch,), device=device), everything)


@torch.no_grad()
def _move(book: Codebook, vectors: Tensor, index: Tensor, config: RecipeConfig, restart_dead: bool) -> None:
    """Average the vectors that chose each code into it."""
    usage, total = _gather(vectors, index, book.cluster_usage.shape[0])
    book.cluster_usage.lerp_(usage, 1 - config.codebook_decay)
    book.embedding_sum.lerp_(total, 1 - config.codebook_decay)
    if restart_dead:
        mean = len(vectors) / len(usage)
        dead = book.cluster_usage < config.restart_below * mean
        fresh = vectors[torch.randint(len(vectors), (len(usage),), device=vectors.device)]
        revived_usage = 0.5 * mean  # enough to live until it is chosen, not enough to look popular
        book.cluster_usage.masked_fill_(dead, revived_usage)
        book.embedding_sum.copy_(torch.where(dead[:, None], fresh * revived_usage, book.embedding_sum))


def _gather(vectors: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Number [K] and sum [K, D] of the vectors of each code."""
    usage = torch.zeros(size, device=vectors.device).index_add_(0, index, torch.ones_like(vectors[:, 0]))
    total = torch.zeros(size, vectors.shape[1], device=vectors.device).index_add_(0, index, vectors)
    return usage, total


@torch.no_grad()
def initialise_codebooks(quantizer: SplitResidualVectorQuantizer, latents: Tensor, config: RecipeConfig) -> None:
    """Residual k-means on latents [N, codebook_dim], level by level: every codebook starts where vectors are."""
    for split in _splits(quantizer):
        residual = latents @ split.input_proj.weight[:, :, 0].T
        for book in split.codebooks:
            size = book.cluster_usage.shape[0]
            order = torch.randperm(len(residual), device=residual.device)
            table = residual[order[torch.arange(size, device=residual.device) % len(residual)]].clone()
            usage = torch.ones(size, device=residual.device)
            for _ in range(config.kmeans_iterations):
                usage, total = _gather(residual, nearest_codes(residual, table), size)
                elsewhere = residual[torch.randint(len(residual), (size,), device=residual.device)]
                table = torch.where(usage[:, None] > 0, total / usage.clamp(min=1)[:, None], elsewhere)
            weight = (usage / usage.mean()).clamp(min=0.2) * 9  # of the running average, about the usage of one batch
            book.cluster_usage.copy_(weight)
            book.embedding_sum.copy_(table * weight[:, None])
            residual = residual - table[nearest_codes(residual, table)]
