"""Keys of ``vocoder_cudagraph`` that Qwen3-TTS accepts.

Its Targets share the batch sizes and the decode windows; ``qwen3_tts.stateless`` has buckets of its own, ``qwen3_tts.incremental``
widths. The published streaming Targets have no keys: their shapes follow from the connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from vgraph_lab.config import DistinctSizes, LegacyKey, ModelExtensions, Settings, declare_extensions

__all__ = ["EXTENSIONS", "STREAMING_TARGET_IDS", "TARGET_IDS", "IncrementalTargetKeys", "Qwen3TTSGraphKeys", "StatelessTargetKeys"]

TARGET_IDS = ("qwen3_tts.icl_prefix", "qwen3_tts.xvec_prefix", "qwen3_tts.suffix", "qwen3_tts.stateless", "qwen3_tts.incremental")
STREAMING_TARGET_IDS = TARGET_IDS[:3]
_STATELESS, _INCREMENTAL = TARGET_IDS[3:]
_BATCH_SIZES = (1, 2, 4)


def _default_batch_sizes(data: Mapping[str, Any]) -> tuple[int, ...]:
    limit = data.get("decode_batch_max_size")
    return _BATCH_SIZES if limit is None else tuple(size for size in _BATCH_SIZES if size <= limit)


class Qwen3TTSGraphKeys(Settings):
    """Keys that the Targets of Qwen3-TTS share.

    Attributes:
        streaming_algorithm: how streamed chunks are decoded. ``published``: with the segments of the published design, which decodes
            context again for every chunk (``qwen3_tts.icl_prefix``, ``xvec_prefix``, ``suffix``). ``incremental``: each chunk by
            itself, with all that its layers carry over (``qwen3_tts.incremental``). Of no effect without ``async_chunk``.
        decode_batch_max_size: the most rows of one call; larger groups of requests are split. None: the largest of
            ``capture_batch_sizes``.
        capture_batch_sizes: row counts to capture each shape for; by default 1, 2 and 4, as far as ``decode_batch_max_size``
            allows. One that it does not allow is an error: its graphs would take memory and never run.
        decode_chunk_frames: new frames of one stateless window.
        decode_left_context_frames: frames before them that a window sees too; their samples are cut.
    """

    streaming_algorithm: Literal["published", "incremental"] = "published"
    decode_batch_max_size: PositiveInt | None = None
    capture_batch_sizes: Annotated[DistinctSizes, MinLen(1)] = Field(default_factory=_default_batch_sizes)
    decode_chunk_frames: PositiveInt = 300
    decode_left_context_frames: NonNegativeInt = 25

    @property
    def batch_limit(self) -> int:
        """The most rows of one eager call."""
        return self.decode_batch_max_size or max(self.capture_batch_sizes)

    @model_validator(mode="after")
    def _graphs_are_of_use(self) -> Self:
        too_large = [size for size in self.capture_batch_sizes if size > self.batch_limit]
        if too_large:
            raise ValueError(
                f"capture_batch_sizes {too_large} are above decode_batch_max_size, {self.batch_limit}: such graphs would never run. "
                "Raise the limit or leave them out"
            )
        return self


class StatelessTargetKeys(Settings):
    """Keys of ``qwen3_tts.stateless``.

    Attributes:
        capture_bucket_sizes: frame counts to capture, beside 150 and a whole window with its left context.
    """

    capture_bucket_sizes: DistinctSizes = ()


class IncrementalTargetKeys(Settings):
    """Keys of ``qwen3_tts.incremental``.

    Attributes:
        capture_widths: frames per call to capture, beside the connector's chunk sizes. Chunks of other sizes are made up of
            captured widths where few of them do.
        form: of the captured step. ``plain``: the decoder's own layers. ``fast``: channels-last with prepared weights and Triton
            kernels; it needs a CUDA device and a second copy of the weights. ``compiled``: the plain step through ``torch.compile``.
            A form that cannot run here, or is less exact than the plain one, is replaced by that one, and the report says why.
            Eager calls and first chunks behind a reference always take the plain form; the state is the same.
        autotune: let the fast form try out how to cut its matrix products, before the capture, for shapes of which no table for this
            card is there; what it finds is kept. Otherwise they are cut by rule.
    """

    capture_widths: DistinctSizes = ()
    form: Literal["plain", "fast", "compiled"] = "plain"
    autotune: bool = True


class _NoKeys(Settings):
    """A Target without keys of its own."""


def _sizes(value: object) -> object:
    """Sizes as a connector's ``extra`` block may give them: one number, a list, or "97, 325"; repeated ones count once."""
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",") if word.strip()]
        value = [int(word) if word.isdecimal() else word for word in words]
    if isinstance(value, int):
        value = [value]
    return list(dict.fromkeys(value)) if isinstance(value, list) and all(type(size) is int for size in value) else value


def _limit(value: object) -> object:
    """There, 0 stands for no limit."""
    return None if type(value) is int and value == 0 else value


EXTENSIONS = ModelExtensions(
    family="qwen3_tts",
    stage=Qwen3TTSGraphKeys,
    targets={**dict.fromkeys(TARGET_IDS, _NoKeys), _STATELESS: StatelessTargetKeys, _INCREMENTAL: IncrementalTargetKeys},
    legacy={
        "decode_cudagraph_batch_sizes": LegacyKey(("capture_batch_sizes",), _sizes),
        "decode_cudagraph_capture_sizes": LegacyKey(("targets", _STATELESS, "capture_bucket_sizes"), _sizes),
        "decode_batch_max_size": LegacyKey(("decode_batch_max_size",), _limit),
        "decode_chunk_frames": LegacyKey(("decode_chunk_frames",)),
        "decode_left_context_frames": LegacyKey(("decode_left_context_frames",)),
    },
)
declare_extensions(EXTENSIONS)
