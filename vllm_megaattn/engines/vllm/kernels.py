"""The kernel objects that keep MXFP8 bytes in vLLM's linear layers, and the product that they and we compute.

vLLM gives every quantised linear layer a kernel object of its own: after loading it may rewrite the parameters, at every
call it multiplies. Ours leaves the checkpoint's bytes in place and re-blocks the scales once, where vLLM's kernels for
Hopper expand wo_a to BF16 and repack wo_b into a private layout. Parameters keep their names, objects, loaders and, for
equal shapes, their storage, so that vLLM's weight reloading and captured graphs go on working.

This module imports vLLM; it is loaded when the first layer is attached.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

from vllm_megaattn import ops
from vllm_megaattn.engines import common, projection
from vllm_megaattn.engines.projection import Pending
from vllm_megaattn.engines.vllm.state import LayerState
from vllm_megaattn.engines.weights import KeptWeight


def multiply(x: Pending | QuantizedActivation | torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """x times wo_b [N, K], BF16 [.., N], for each of the three things wo_b can be handed.

    Pending: the whole projection. QuantizedActivation: e4m3 [T, K] with F8_128x4 scales. A tensor: BF16 [.., K], quantised
    here.
    """
    if isinstance(x, Pending):
        return projection.project(x, w, w_scale)
    if isinstance(x, QuantizedActivation):
        if x.quant_key != kMxfp8Dynamic:
            raise ValueError(f"wo_b takes MXFP8 activations, got {x.quant_key}")
        return ops.mxfp8_gemm_wo_b(x.data, x.scale, w, w_scale)
    return projection.multiply(x, w, w_scale)


class _KeptBytes:
    """Loading and multiplying for both kernel classes below."""

    scale_name: str
    state: LayerState
    kept: KeptWeight
    engine_bytes_per_element: float

    def input_quant_key(self) -> object:
        """wo_b may be handed MXFP8 with F8_128x4 scales."""
        return kMxfp8Dynamic

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Brings the loaded weights into the kernels' form; runs after the first loading and after every later one."""
        weight, scale = layer.weight.data, getattr(layer, self.scale_name).data
        if self._is_converted(layer, scale):
            return
        common.prepare_device(weight.device)
        new_weight, new_scale = self.kept.convert(weight, scale, device=weight.device)
        # What vLLM would hold on top: it keeps the scales as loaded beside the weight in the form of its kernel.
        engine_bytes = int(self.engine_bytes_per_element * weight.numel()) + scale.nbytes
        set_parameter(layer, "weight", new_weight)
        set_parameter(layer, self.scale_name, new_scale)
        self.state.note_loaded(self.kept, engine_bytes - new_weight.nbytes - new_scale.nbytes, tuple(new_scale.shape))

    def _is_converted(self, layer: torch.nn.Module, scale: torch.Tensor) -> bool:
        """vLLM may run the step twice over the same weights. Then the scales have the form we gave them, which differs from
        every loaded form unless converting changes nothing."""
        return self.state.scale_shapes.get(self.kept.name) == tuple(scale.shape) != self.loaded_shape

    def apply_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: object
    ) -> torch.Tensor:
        y = multiply(x, layer.weight, getattr(layer, self.scale_name))
        return y if bias is None else y + bias


class MegaAttnMxfp8LinearKernel(_KeptBytes, Mxfp8LinearKernel):
    """For ModelOptLinearMethod (V4.1): `weight` e4m3 [N, K], `weight_scale` uint8 [N, K/32], rows repeated from blocks."""

    scale_name = "weight_scale"

    def __init__(
        self, config: object, state: LayerState, kept: KeptWeight, layer: torch.nn.Module, engine_bytes: float
    ) -> None:
        super().__init__(config)
        self.state, self.kept, self.engine_bytes_per_element = state, kept, engine_bytes
        self.loaded_shape = tuple(layer.weight_scale.shape)

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None  # the gates have decided before this object is made

    @classmethod
    def can_implement(cls, c: object) -> tuple[bool, str | None]:
        return True, None


class MegaAttnFp8BlockLinearKernel(_KeptBytes):
    """For Fp8LinearMethod (V4): `weight` e4m3 [N, K], `weight_scale_inv` e8m0 [N/128, K/128]."""

    scale_name = "weight_scale_inv"

    def __init__(
        self, config: object, state: LayerState, kept: KeptWeight, layer: torch.nn.Module, engine_bytes: float
    ) -> None:
        self.config = config
        self.state, self.kept, self.engine_bytes_per_element = state, kept, engine_bytes
        self.loaded_shape = tuple(layer.weight_scale_inv.shape)


def set_parameter(layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Give a parameter new contents. The object, its loader and its other attributes stay; so does the storage where shape,
    strides, dtype and device allow it."""
    parameter = getattr(layer, name)
    old = parameter.data
    if old.data_ptr() == tensor.data_ptr() and old.shape == tensor.shape and old.dtype == tensor.dtype:
        return
    same = (old.shape, old.stride(), old.dtype, old.device) == (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device,
    )  # fmt: skip
    if same:
        old.copy_(tensor)
    else:
        parameter.data = tensor
