"""The interaction models in torch modules, with our default sizes.

They read dense inputs [B, num_dense] and vectors [B, F, D]. Parameters have the order of ours, so that weights can be
copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from peers.e2e_peers import PairProducts, mlp

NUM_DENSE, NUM_FEATURES, DIM = 13, 26, 16
INPUTS = NUM_DENSE + NUM_FEATURES * DIM
FIELDS = NUM_DENSE + NUM_FEATURES


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = mlp([NUM_DENSE, 512, 256, 64, DIM], relu_last=True)
        self.products = PairProducts(NUM_FEATURES + 1)
        self.top = mlp([DIM + NUM_FEATURES * (NUM_FEATURES + 1) // 2, 512, 256, 1])

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = self.bottom(dense)
        products = self.products(torch.cat([x[:, None], vectors], dim=1))
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


class DCNv2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(3))
        self.deep = mlp([INPUTS, 512, 256, 1])

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = x0 = torch.cat([dense, vectors.flatten(1)], dim=1)
        for layer in self.cross:
            x = x0 * layer(x) + x
        return self.deep(x).squeeze(1)


class GDCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(INPUTS, INPUTS, bias=False) for _ in range(3))
        self.deep = mlp([INPUTS, 400, 400, 400], relu_last=True)
        self.head = nn.Linear(INPUTS + 400, 1)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = x0 = torch.cat([dense, vectors.flatten(1)], dim=1)
        for layer, gate in zip(self.cross, self.gates, strict=True):
            x = x0 * layer(x) * torch.sigmoid(gate(x)) + x
        return self.head(torch.cat([x, self.deep(x0)], dim=1)).squeeze(1)


class Fields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(NUM_DENSE, DIM))

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return torch.cat([dense[..., None] * self.weights, vectors], dim=1)


class FieldNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FIELDS, DIM))
        self.bias = nn.Parameter(torch.zeros(FIELDS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (DIM,)) * self.weight + self.bias


class MaskBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = FIELDS * DIM
        self.mask = mlp([width, 2 * width, width])
        self.hidden = nn.Linear(width, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, v: Tensor, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.hidden(self.mask(v) * x)))


class MaskNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fields, self.norm = Fields(), FieldNorm()
        self.blocks = nn.ModuleList(MaskBlock() for _ in range(3))
        self.deep = mlp([3 * 64, 400, 400, 400, 1])

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        fields = self.fields(dense, vectors)
        v, x = fields.flatten(1), self.norm(fields).flatten(1)
        return self.deep(torch.cat([block(v, x) for block in self.blocks], dim=1)).squeeze(1)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(1, DIM))
        self.layers = mlp([DIM, 64, INPUTS])

    def forward(self, e: Tensor) -> Tensor:
        return 2.0 * torch.sigmoid(self.layers(self.vector)) * e


class FinalMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(2))
        self.streams = nn.ModuleList(mlp([INPUTS, 400, 400, 400], relu_last=True) for _ in range(2))
        self.heads = nn.ParameterList([torch.empty(1, 400, 400)])
        self.first, self.second = nn.Linear(400, 1), nn.Linear(400, 1, bias=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        e = torch.cat([dense, vectors.flatten(1)], dim=1)
        one, two = (stream(gate(e)) for stream, gate in zip(self.streams, self.gates, strict=True))
        bilinear = ((one @ self.heads[0][0].t()) * two).sum(dim=1)
        return (self.first(one) + self.second(two)).squeeze(1) + bilinear


class FinalBlock(nn.Module):
    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(num_inputs, 400), nn.Linear(400, 400)])
        self.head = nn.Linear(400, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            a, g = layer(x).chunk(2, dim=1)
            x = functional.relu(torch.cat([a, a * g], dim=1))
        return self.head(x)


class FinalNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fields = Fields()
        self.gate = nn.Linear(FIELDS, FIELDS)
        self.blocks = nn.ModuleList([FinalBlock(2 * FIELDS * DIM), FinalBlock(FIELDS * DIM)])

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        fields = self.fields(dense, vectors)
        gated = fields * self.gate(fields.transpose(1, 2)).transpose(1, 2)
        first = self.blocks[0](torch.cat([fields, gated], dim=1).flatten(1))
        return (0.5 * (first + self.blocks[1](fields.flatten(1)))).squeeze(1)


class Mix(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


class WukongLayer(nn.Module):
    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.projection = nn.Linear(num_inputs, 24, bias=False)
        self.fm_norm = nn.LayerNorm(24 * num_inputs)
        self.fm_mlp = mlp([24 * num_inputs, 256, 16 * DIM])
        self.linear = Mix(num_inputs, 16)
        self.residual = Mix(num_inputs, 32) if num_inputs != 32 else nn.Identity()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        products = torch.bmm(x, self.projection(x.transpose(1, 2)))
        made = self.fm_mlp(self.fm_norm(products.flatten(1))).unflatten(1, (16, DIM))
        return self.norm(torch.cat([made, self.linear(x)], dim=1) + self.residual(x))


class OfVectors(nn.Module):
    """Layers between a bottom MLP, whose output is the first vector, and a top MLP."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.bottom = mlp([NUM_DENSE, 256, DIM], relu_last=True)
        self.layers = nn.Sequential(*layers)
        self.top = mlp([32 * DIM, 256, 128, 1])

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        x = torch.cat([self.bottom(dense)[:, None], vectors], dim=1)
        return self.top(self.layers(x).flatten(1)).squeeze(1)


class Wukong(OfVectors):
    def __init__(self) -> None:
        super().__init__([WukongLayer(NUM_FEATURES + 1), WukongLayer(32), WukongLayer(32)])


class DHENLayer(nn.Module):
    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.products = PairProducts(num_inputs)
        self.dot = nn.Linear(DIM + num_inputs * (num_inputs - 1) // 2, 16 * DIM)
        self.linear = Mix(num_inputs, 16)
        self.shortcut = Mix(num_inputs, 32) if num_inputs != 32 else nn.Identity()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        dots = self.dot(torch.cat([x[:, 0], self.products(x)], dim=1)).unflatten(1, (16, DIM))
        return self.norm(torch.cat([dots, self.linear(x)], dim=1) + self.shortcut(x))


class DHEN(OfVectors):
    def __init__(self) -> None:
        super().__init__([DHENLayer(NUM_FEATURES + 1), DHENLayer(32)])


PLAIN: dict[str, type[nn.Module]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "finalmlp": FinalMLP,
    "final": FinalNet,
    "masknet": MaskNet,
    "gdcn": GDCN,
    "wukong": Wukong,
    "dhen": DHEN,
}
