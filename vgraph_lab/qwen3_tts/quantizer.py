"""Codes to quantised features: a semantic codebook and a stack of acoustic ones, each with its own projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .geometry import DecoderGeometry
from .layers import rewritten

__all__ = ["Codebook", "ResidualVectorQuantizer", "SplitResidualVectorQuantizer"]

_EPSILON = 1e-5


class Codebook(nn.Module):
    """The stored form of one codebook: running sums and usage counts, whose quotient is the codebook.

    The names and the quotient are the published checkpoint's (an exponential-moving-average codebook).
    """

    cluster_usage: Tensor  # [K]
    embedding_sum: Tensor  # [K, D]

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("cluster_usage", torch.ones(size))
        self.register_buffer("embedding_sum", torch.randn(size, dim) * dim**-0.5)

    def vectors(self) -> Tensor:
        """The code vectors [K, D] in fp32."""
        return self.embedding_sum.float() / self.cluster_usage.float().clamp(min=_EPSILON)[:, None]


class _CodebookLayer(nn.Module):
    """Only a level of the published key names (``vq.layers.N._codebook``)."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, dim)


class _CodebookStack(nn.Module):
    def __init__(self, levels: int, size: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CodebookLayer(size, dim) for _ in range(levels))


class ResidualVectorQuantizer(nn.Module):
    """``levels`` codebooks whose vectors add up, then a projection to the feature width.

    Decoding reads a table of all levels that :meth:`refresh_table` rebuilds from the codebooks (after loading or
    training). The levels are added in order, one by one, as the published decoder does: with the same kernels the
    result is the same to the last bit.
    """

    table: Tensor  # [levels, K, D], in the module's dtype

    def __init__(self, levels: int, codebook_size: int, dim: int, feature_dim: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(feature_dim, dim, 1, bias=False)  # an encoder's half; the decoder only carries it
        self.output_proj = nn.Conv1d(dim, feature_dim, 1, bias=False)
        self.vq = _CodebookStack(levels, codebook_size, dim)
        self.register_buffer("table", torch.empty(levels, codebook_size, dim), persistent=False)
        self.refresh_table()

    @property
    def codebooks(self) -> list[Codebook]:
        """The codebooks, first level first."""
        return [layer._codebook for layer in self.vq.layers]  # type: ignore[misc]  # ModuleList is untyped

    @torch.no_grad()
    def refresh_table(self) -> None:
        """Rebuild the decoding table; the quotient is taken in fp32 and then rounded to the table's dtype."""
        table = torch.stack([book.vectors() for book in self.codebooks])
        self.table = rewritten(self.table, table.to(self.output_proj.weight.dtype))

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, levels, T] int64 → features [B, feature_dim, T]."""
        total = F.embedding(codes[:, 0], self.table[0]).transpose(1, 2)
        for level in range(1, self.table.shape[0]):
            total = total + F.embedding(codes[:, level], self.table[level]).transpose(1, 2)
        out: Tensor = self.output_proj(total)
        return out


class SplitResidualVectorQuantizer(nn.Module):
    """The first (semantic) codebooks and the rest (acoustic) are projected separately and added."""

    def __init__(self, geometry: DecoderGeometry) -> None:
        super().__init__()
        g = geometry
        self.num_semantic = g.num_semantic_quantizers
        self.rvq_first = ResidualVectorQuantizer(self.num_semantic, g.codebook_size, g.codebook_dim // 2, g.codebook_dim)
        self.rvq_rest = ResidualVectorQuantizer(g.num_quantizers - self.num_semantic, g.codebook_size, g.codebook_dim // 2, g.codebook_dim)

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, num_quantizers, T] int64 → quantised features [B, codebook_dim, T]."""
        return self.rvq_first.decode(codes[:, : self.num_semantic]) + self.rvq_rest.decode(codes[:, self.num_semantic :])

    def refresh_tables(self) -> None:
        """Rebuild both decoding tables from their codebooks."""
        self.rvq_first.refresh_table()
        self.rvq_rest.refresh_table()
