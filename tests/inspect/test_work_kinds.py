"""Kinds of work by name. Truth: names as libraries and captured graphs have them, each read by a person."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vgraph_lab
from vgraph_lab.inspect.work_kinds import OWN_KERNELS, WORK_KINDS, kind_of_work

CUDA = {
    "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true, (cudnnKernelDataType_t)2>": "layout conversion",
    "void cudnn::ops::nhwcToNchwKernel<__nv_bfloat16, __nv_bfloat16, float, true, false, (cudnnKernelDataType_t)0>": "layout conversion",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1": "convolution",
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x64_32x6_nhwc_align8>(...)": "convolution",
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(...)": "convolution",
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<7, c10::BFloat16, int>(...)": "convolution",
    "nvjet_tst_128x64_64x8_2x1_v_bz_NNT": "matrix product",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(...)": "matrix product",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>(...)": "matrix product",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, true>(...)": "matrix product",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)": "softmax/attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(...)": "softmax/attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64": "softmax/attention",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>(...)": "softmax/attention",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(...)": "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3, 64, 64>(...)": "copy",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(...)": "copy",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "void at::native::vectorized_elementwise_kernel<8, at::native::sin_kernel_cuda(at::TensorIteratorBase&)>(...)": "elementwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>>>": "elementwise",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(...)": "elementwise",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_": "elementwise",
    "triton_poi_fused_add_convolution_mul_sin_12": "elementwise",
    "triton_red_fused_mean_pow_3": "elementwise",
    "triton_tem_fused_convolution_5": "convolution",
    "triton_tem_fused_mm_5": "matrix product",
    "convolve": "own kernels",
    "attend": "own kernels",
    "resident_unit": "own kernels",
    "somebody_elses_kernel": "other",
}
ATEN = {
    "aten.convolution.default": "convolution",
    "aten::mkldnn_convolution": "convolution",
    "aten::_slow_conv2d_forward": "convolution",
    "aten.addmm.default": "matrix product",
    "aten::mm": "matrix product",
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "softmax/attention",
    "aten._softmax.default": "softmax/attention",
    "aten.mul.Tensor": "elementwise",
    "aten.native_layer_norm.default": "elementwise",
    "aten.silu.default": "elementwise",
    "aten.cat.default": "copy",
    "aten::copy_": "copy",
    "aten.index_copy_.default": "copy",
    "aten.embedding.default": "copy",
    "aten.constant_pad_nd.default": "copy",
    "aten::to_mkldnn": "layout conversion",
    "aten::transpose": "other",
    "aten::empty_strided": "other",
}


@pytest.mark.parametrize("name", CUDA | ATEN)
def test_names(name: str) -> None:
    kind = (CUDA | ATEN)[name]
    assert kind in WORK_KINDS
    assert kind_of_work(name) == kind


def test_memory_nodes_have_no_name() -> None:
    assert kind_of_work("", "memcpy") == kind_of_work("", "memset") == "copy"
    assert kind_of_work("", "event") == "other"


def test_own_kernels_are_the_ones_that_there_are() -> None:
    """Every Triton kernel that the package launches, read from its source: Triton need not be there."""
    written, launched = set(), set()
    for path in (Path(vgraph_lab.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                written |= {node.name} if any(mark.startswith(("triton.jit", "gluon.jit")) for mark in marks) else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
                launched.add(ast.unparse(node.args[0]).rpartition(".")[2])
    assert launched == OWN_KERNELS
    assert launched <= written
