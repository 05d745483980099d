"""Cases computed by the published vLLM 0.25.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vgraph_lab.vllm_v1 import BatchDescriptor, CudagraphDispatcher, CUDAGraphMode

CASES: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parents[1] / "data/vllm_v1/dispatch_cases.json").read_text())


def descriptor(fields: dict[str, Any]) -> BatchDescriptor:
    return BatchDescriptor(**fields)


def dispatcher(case: dict[str, Any]) -> CudagraphDispatcher:
    return CudagraphDispatcher(
        CUDAGraphMode[case["cudagraph_mode"]],
        case["cudagraph_capture_sizes"],
        max_num_seqs=case["max_num_seqs"],
        uniform_decode_query_len=case["uniform_decode_query_len"],
        max_loras=case["max_loras"],
        specialize_active_lora=case["specialize_active_lora"],
        cudagraph_specialize_lora=case["cudagraph_specialize_lora"],
    )
