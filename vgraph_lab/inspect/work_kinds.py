"""What kind of work a kernel does, told by its name: a CUDA function's or an aten overload's."""

from __future__ import annotations

import re

from .anatomy import readable_name

__all__ = ["OWN_KERNELS", "WORK_KINDS", "kind_of_work"]

WORK_KINDS = {
    "matrix product": "matrix products, and the sums of their parts",
    "convolution": "convolutions, transposed ones too",
    "layout conversion": "the same numbers in another order of axes (NCHW to NHWC and back), or padded for a kernel",
    "softmax/attention": "attention, fused or in parts",
    "own kernels": "Triton kernels of this package, each several of the others in one",
    "elementwise": "arithmetic number by number, fills, sums and norms",
    "copy": "copies, concatenations, padding, and rows picked or placed by index",
    "other": "what no other kind claims",
}
"""Kinds of work in the order in which they are shown, with their meaning."""

OWN_KERNELS = frozenset({"attend", "convolve", "depthwise_norm", "embed", "move_histories", "residual_unit", "resident_unit", "sum_taps"})
"""Names of this package's Triton kernels. A Triton kernel's name is the bare name of its Python function."""

# The first that matches decides. Names of libraries change; what none of them matches is "other" and shows up as such.
_CUDA = (
    ("layout conversion", r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw|converttensor|tensortransform|transpose_readwrite|nhwcaddpadding"),
    ("convolution", r"triton_tem_\w*conv"),
    ("matrix product", r"triton_tem_"),
    ("elementwise", r"^triton_(poi|red|per|for)_"),
    ("softmax/attention", r"softmax|attention|fmha|flash|sdpa"),
    ("convolution", r"conv(?!ert)|implicit_gemm|fprop|dgrad|wgrad|col2im|im2col"),
    ("matrix product", r"gemm|gemv|nvjet|splitk|cublas|cutlass|^dot_kernel"),
    ("copy", r"memcpy|memset|copy|catarray|index|gather|scatter|embedding|constant_pad|fillreverse"),
    ("elementwise", r"elementwise|reduce|norm|fillfunctor|arange|triu|tril|cunn_|sum|mean"),
)
_ATEN = (
    ("layout conversion", r"^_?to_mkldnn$|^mkldnn_reorder"),
    ("softmax/attention", r"softmax|attention"),
    ("convolution", r"conv"),
    ("matrix product", r"^(mm|addmm|bmm|baddbmm|addbmm|addmv|mv|dot|matmul|linear|einsum|_addmm_activation)$|mkldnn_linear"),
    (
        "copy",
        r"^(copy_?|clone|contiguous|_to_copy|to|cat|stack|_cat|pad|constant_pad_nd|embedding|index\w*|_index\w*|gather|scatter\w*|slice_scatter"
        r"|select_scatter|repeat|roll|flip)$",
    ),
    (
        "other",
        r"^(view|_unsafe_view|_reshape_alias|reshape|as_strided|t|transpose|permute|expand|slice|select|split\w*|chunk|unbind|squeeze"
        r"|unsqueeze|narrow|alias|detach|flatten|unflatten|empty\w*|new_empty\w*|resize_|result_type|lift_fresh)$",
    ),
    ("elementwise", r"^\w+$"),
)


def kind_of_work(name: str, node_kind: str = "kernel") -> str:
    """One of :data:`WORK_KINDS`.

    Args:
        name: a CUDA kernel's name, mangled or not; or an aten operation as ``aten.mul.Tensor`` or ``aten::mul``.
        node_kind: what the graph says of the node. Memory operations are copies whatever their name is.
    """
    if node_kind in ("memcpy", "memset"):
        return "copy"
    operation = re.match(r"aten(?:\.|::)(\w+)", name)
    if operation:
        return _first(_ATEN, operation[1])
    if name in OWN_KERNELS:
        return "own kernels"
    return _first(_CUDA, readable_name(name).lower())


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str:
    return next((kind for kind, pattern in rules if re.search(pattern, name)), "other")
