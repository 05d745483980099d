"""Which token counts get graphs: vLLM's defaults, the sizes that a user asks for, and their rounding for speculation."""

from __future__ import annotations

from collections.abc import Iterable

from vgraph_lab.errors import ConfigError

__all__ = ["adjust_cudagraph_sizes_for_spec_decode", "checked_capture_sizes", "default_capture_sizes", "get_captured_lora_counts"]

_LARGEST_DEFAULT = 512


def default_capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, *, uniform_decode_query_len: int = 1, max_cudagraph_capture_size: int | None = None
) -> list[int]:
    """The sizes that vLLM captures if none are configured (``VllmConfig._set_cudagraph_sizes``, 0.25.1).

    1, 2, 4, then multiples of 8 below 256, then multiples of 16, up to twice the tokens of a full decode batch, 512
    at most and never beyond the token limit of a batch.

    Args:
        max_num_seqs: requests that may run together.
        max_num_batched_tokens: tokens that one batch may have.
        uniform_decode_query_len: tokens of each request in a decode batch (1 + speculative tokens).
        max_cudagraph_capture_size: replaces the limit of twice the decode batch and 512.

    Returns:
        Ascending sizes. With speculation they are still to be rounded, see
        :func:`adjust_cudagraph_sizes_for_spec_decode`.

    Raises:
        ConfigError: a limit is below 1.
    """
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("uniform_decode_query_len", uniform_decode_query_len),
        ("max_cudagraph_capture_size", 1 if max_cudagraph_capture_size is None else max_cudagraph_capture_size),
    ):
        positive(name, value)
    derived = min(max_num_seqs * uniform_decode_query_len * 2, _LARGEST_DEFAULT)
    largest = min(derived if max_cudagraph_capture_size is None else max_cudagraph_capture_size, max_num_batched_tokens)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if size <= largest]


def checked_capture_sizes(sizes: Iterable[int], *, max_num_batched_tokens: int | None = None) -> list[int]:
    """Configured sizes in ascending order; their order says nothing, anything else wrong with them is refused.

    vLLM drops repetitions and sizes above the token limit with a warning. Here both are errors: either is a
    misunderstanding that would otherwise show as a graph that is missing.

    Args:
        sizes: tokens of each graph, padding included.
        max_num_batched_tokens: tokens that one batch may have, or None for no limit.

    Raises:
        ConfigError: these are no sizes; or one is no whole number from 1, comes twice, or can never be reached.
    """
    several: object = sizes  # whatever it is annotated with
    if not isinstance(several, Iterable):
        raise ConfigError(f"cudagraph_capture_sizes: must be several token counts, such as [1, 2, 4], got {several!r}.")
    given = list(sizes)
    wrong = [size for size in given if not isinstance(size, int) or isinstance(size, bool) or size < 1]
    if wrong:
        raise ConfigError(f"cudagraph_capture_sizes: {_listed(wrong)} cannot be captured. Sizes are token counts: whole numbers from 1.")
    repeated = sorted({size for size in given if given.count(size) > 1})
    if repeated:
        raise ConfigError(f"cudagraph_capture_sizes: repeats {_listed(repeated)}. Name each size once: {sorted(set(given))}.")
    if max_num_batched_tokens is not None:
        beyond = sorted(size for size in given if size > max_num_batched_tokens)
        if beyond:
            raise ConfigError(
                f"cudagraph_capture_sizes: no batch reaches {_listed(beyond)}, max_num_batched_tokens is {max_num_batched_tokens}. "
                "Leave them out or raise the limit."
            )
    return sorted(given)


def adjust_cudagraph_sizes_for_spec_decode(
    capture_sizes: Iterable[int], uniform_decode_query_len: int, *, max_cudagraph_capture_size: int | None = None
) -> list[int]:
    """Sizes rounded up to multiples of a decode request's tokens (``CompilationConfig``, 0.25.1).

    A uniform decode graph holds whole requests, so with speculation only such multiples can serve it.

    Args:
        capture_sizes: see :func:`checked_capture_sizes`.
        uniform_decode_query_len: tokens of each request in a decode batch.
        max_cudagraph_capture_size: what rounding may not exceed; the largest of the sizes if None.

    Returns:
        Ascending multiples; what several sizes round to comes once.

    Raises:
        ConfigError: no multiple fits.
    """
    sizes = checked_capture_sizes(capture_sizes)
    step = positive("uniform_decode_query_len", uniform_decode_query_len)
    if not sizes or step == 1:
        return sizes
    largest = sizes[-1] if max_cudagraph_capture_size is None else max_cudagraph_capture_size
    rounded = sorted({up for size in sizes if (up := -(-size // step) * step) <= largest})
    if not rounded and step <= largest:
        return [step]
    if not rounded:
        raise ConfigError(
            f"no multiple of uniform_decode_query_len={step} is within max_cudagraph_capture_size={largest} "
            f"(cudagraph_capture_sizes {sizes}). Speculate fewer tokens or capture larger sizes."
        )
    return rounded


def get_captured_lora_counts(max_loras: int, specialize: bool) -> list[int]:
    """For which numbers of active adapters graphs are made (``vllm.lora.utils``, 0.25.1).

    One slot more than ``max_loras`` stands for requests without an adapter. With ``specialize`` the counts are the
    powers of two up to that, and that itself; otherwise that alone.
    """
    most = positive("max_loras", max_loras) + 1
    return [count for count in range(1, most + 1) if count == most or count.bit_count() == 1] if specialize else [most]


def positive(name: str, value: int) -> int:
    """``value`` if it is a whole number from 1.

    Raises:
        ConfigError: it is not; names it.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: must be a whole number from 1, got {value!r}.")
    return value


def _listed(sizes: Iterable[object]) -> str:
    return ", ".join(map(repr, sizes))
