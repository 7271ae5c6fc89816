"""Make tests/models/published_vectors.npz: outputs and gradients of published models on weights that are stored too.

    PEER_PYTHON tests/models/published_vectors.py tests/models/published_vectors.npz

PEER_PYTHON is an interpreter that has torch, torchrec 1.8 with fbgemm-gpu-cpu, fuxictr 2.3 and deepctr-torch 0.3; the
tests themselves need none of them. A case is `NAME/input.X` and `NAME/weight.X` under the published names, and for both
types `NAME/DTYPE/output` and `NAME/DTYPE/gradient.X`: of the sum of all outputs, each times its place in `cotangent`.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DCN, DCNMix
from fuxictr.pytorch.layers import CrossNetMix, CrossNetV2
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

WIDTH, BATCH, ROWS, DIM = 6, 4, 5, 3
CROSSES: dict[str, Callable[[], nn.Module]] = {
    "torchrec full": lambda: CrossNet(WIDTH, 3),
    "torchrec low_rank": lambda: LowRankCrossNet(WIDTH, 2, 3),
    "torchrec mixture": lambda: LowRankMixtureCrossNet(WIDTH, 2, 3, 2),
    "torchrec mixture of one": lambda: LowRankMixtureCrossNet(WIDTH, 2, 1, 2, activation=torch.tanh),
    "fuxictr full": lambda: CrossNetV2(WIDTH, 3),
    "fuxictr mixture": lambda: CrossNetMix(WIDTH, 2, 2, 3),
}


def drawn(*shape: int) -> Tensor:
    """Return numbers of few digits, which are exact in float32."""
    return (torch.randn(shape) * 256).round() / 512


def record(case: str, model: nn.Module, inputs: dict[str, Tensor], call: Callable[[], Tensor]) -> dict[str, Any]:
    """Record inputs, outputs and gradients of a case. `inputs` have gradients, and `call` runs the model on them."""
    stored = {}
    for parameter in model.parameters():
        parameter.data.copy_(drawn(*parameter.shape))
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        for tensor in inputs.values():
            tensor.data, tensor.grad = tensor.data.to(dtype), None
        model.zero_grad()
        output = call()
        cotangent = torch.arange(1.0, output.numel() + 1, dtype=dtype).view(output.shape) / 32
        output.backward(cotangent)
        place = f"{case}/{str(dtype).removeprefix('torch.')}"
        stored |= {f"{place}/output": output, f"{case}/cotangent": cotangent}
        for kind, tensors in (("input", inputs.items()), ("weight", model.named_parameters())):
            for name, tensor in tensors:
                stored[f"{case}/{kind}.{name}"] = tensor
                stored[f"{place}/gradient.{name}"] = tensor.grad.clone()  # `to` casts gradients in place
    return {name: value.detach().numpy().copy() for name, value in stored.items()}


def dlrm_dcn() -> dict[str, Any]:
    tables = [EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f{i}"])
              for i in range(2)]  # fmt: skip
    model = DLRM_DCN(EmbeddingBagCollection(tables=tables), 4, [5, DIM], [4, 1], dcn_num_layers=2, dcn_low_rank_dim=2)
    ids = torch.tensor([0, 1, 4, 2, 3, 3, 0, 1, 2])
    lengths = torch.tensor([1, 2, 0, 1, 1, 1, 2, 1])
    sparse = KeyedJaggedTensor(keys=["f0", "f1"], values=ids, lengths=lengths)
    dense = drawn(BATCH, 4).requires_grad_()
    stored = record("torchrec DLRM_DCN", model, {"dense": dense}, lambda: model(dense, sparse))
    return {**stored, "torchrec DLRM_DCN/ids": ids.numpy(), "torchrec DLRM_DCN/lengths": lengths.numpy()}


def deepctr(case: str, make: Callable[..., nn.Module], **options: Any) -> dict[str, Any]:
    """Return the logits of a DeepCTR model. Its linear part reads no column."""
    columns = [*(SparseFeat(f"f{i}", ROWS, DIM) for i in range(2)), DenseFeat("x", 2)]
    model = make([], columns, cross_num=2, dnn_hidden_units=(5, 4), **options)
    ids = torch.randint(0, ROWS, (BATCH, 2))
    dense = drawn(BATCH, 2).requires_grad_()
    seen = {}
    model.out.register_forward_pre_hook(lambda module, args: seen.update(logit=args[0].clone()))

    def call() -> Tensor:
        model(torch.cat([ids.to(dense.dtype), dense], dim=1))
        return seen["logit"] + model.out.bias

    return {**record(case, model, {"dense": dense}, call), f"{case}/ids": ids.numpy()}


def main(out: str) -> None:
    torch.manual_seed(0)
    stored: dict[str, Any] = {}
    for case, make in CROSSES.items():
        model, x = make(), drawn(BATCH, WIDTH).requires_grad_()
        stored |= record(case, model, {"x": x}, lambda model=model, x=x: model(x))
    stored |= dlrm_dcn()
    stored |= deepctr("deepctr DCN", DCN, cross_parameterization="matrix")
    stored |= deepctr("deepctr DCNMix", DCNMix, low_rank=2, num_experts=3)
    np.savez_compressed(out, **stored)


if __name__ == "__main__":
    main(sys.argv[1])
