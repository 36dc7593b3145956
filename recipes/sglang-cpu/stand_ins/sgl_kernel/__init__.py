"""Import-only stand-in for `sgl_kernel` on a CPU.

SGLang 0.5.23 imports these names at module scope where its platform is the CPU; the published wheels are for CUDA.
All of them belong to speculative decoding, which needs the real kernels: whoever calls one is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0+hybridasync.standin"

_IMPORTED_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _absent(name: str) -> Callable[..., Any]:
    def kernel(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"sgl_kernel.{name} isn't available: this is a stand-in without kernels, for SGLang on a CPU"
        )

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


globals().update({name: _absent(name) for name in _IMPORTED_NAMES})
