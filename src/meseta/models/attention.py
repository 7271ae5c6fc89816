"""Self-attention over the fields of a sample."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meseta.models.layers import SkipInitLinear
from meseta.ops.product import batched_product
from meseta.ops.sums import softmax
from meseta.sparse.shapes import Float


class InteractingLayer(nn.Module):
    """Multi-head self-attention over fields, without a scale (arXiv 1810.11921, section 4.4, equations 5 to 8)."""

    def __init__(self, num_inputs: int, num_heads: int, head_width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        width = num_heads * head_width
        self.query, self.key, self.value, self.residual = (
            SkipInitLinear(num_inputs, width, bias=False) for _ in range(4)
        )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def forward(self, fields: Float[Tensor, "B M N"]) -> Float[Tensor, "B M width"]:
        num_samples, num_fields, _ = fields.shape
        flat = fields.flatten(0, 1)
        shape = num_samples, num_fields, self.num_heads, self.query.out_features // self.num_heads
        query, key, value = (
            layer(flat).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )  # [B, heads, M, head_width]
        # In each head: a_mk = softmax over k of <W_Q e_m, W_K e_k>.
        attention = softmax(_batched_matmul(query, key.transpose(2, 3)))
        mixed = _batched_matmul(attention, value).transpose(1, 2).flatten(2)
        # e'_m = ReLU(concat over heads of sum_k a_mk W_V e_k + W_R e_m).
        return functional.relu(mixed + self.residual(flat).view_as(mixed))


def _batched_matmul(a: Float[Tensor, "B heads M K"], b: Float[Tensor, "B heads K N"]) -> Float[Tensor, "B heads M N"]:
    return batched_product(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
