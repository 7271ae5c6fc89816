"""Products and sums of a training step by shape, and those whose result depends on the number of threads.

As a program it reads the numbers of cases and prints those that differ, one per line, and their count. Instruction sets
are chosen before torch is loaded, so each needs a process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meseta.measure.threads import use_num_threads
from meseta.ops.common import column_sums, repeat, softmax, total
from meseta.ops.dot_interaction import dot_interaction
from meseta.ops.mlp import mlp
from meseta.ops.product import batched_product
from sampling import case_id, product

THREADS = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
BATCHES = (1, 2, 3, 7, 64, 700, 2048, 16384, 32768, 100_000)
WIDTHS = (1, 2, 3, 13, 70, 256, 1000)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One product forward and two backward: with a row for each sample, and with a term for each."""
    return mlp(x, [weight], [bias], relu_last=False)


def pairs(vectors: Tensor) -> Tensor:
    return batched_product(vectors, vectors.transpose(1, 2))


def interaction(x: Tensor, pooled: Tensor) -> Tensor:
    return dot_interaction(x, pooled.flatten(1))


def sums(x: Tensor) -> Tensor:
    """Return the total, the sums of columns, and the sums of rows by torch."""
    return torch.cat([total(x)[None], column_sums(x), x.sum(dim=1)])


def loss(logits: Tensor) -> Tensor:
    return total(functional.binary_cross_entropy_with_logits(logits, logits.detach().sigmoid(), reduction="none"))[None]


def vector_for_all(x: Tensor, vector: Tensor) -> Tensor:
    return x * repeat(vector, len(x))


CALLS: dict[str, Callable[..., Tensor]] = {
    call.__name__: call for call in (layer, pairs, interaction, sums, loss, softmax, vector_for_all)
}


def shapes(call: str, batch: int, inputs: int, outputs: int) -> list[tuple[int, ...]]:
    """Return the shapes of a call's arguments. Without a weight, `outputs` is another dimension of the samples, or
    unused."""
    if call == "layer":
        return [(batch, inputs), (outputs, inputs), (outputs,)]
    if call == "pairs":
        return [(batch, outputs, inputs)]
    if call == "interaction":
        return [(batch, inputs), (batch, outputs, inputs)]
    return [(batch, inputs), (inputs,)] if call == "vector_for_all" else [(batch, inputs)]


def _all() -> Iterator[dict[str, Any]]:
    layers = product(call=["layer"], batch=BATCHES, inputs=WIDTHS, outputs=WIDTHS, dtype=DTYPES)
    long = product(call=["layer"], batch=[1, 3, 64], inputs=[20_000, 100_000], outputs=[1, 3, 16], dtype=DTYPES)
    fields = product(
        call=["pairs", "interaction"], batch=BATCHES, inputs=[1, 3, 10, 64], outputs=[1, 2, 3, 27, 39], dtype=DTYPES
    )
    columns = product(
        call=["sums", "loss", "softmax", "vector_for_all"], batch=BATCHES, inputs=WIDTHS, outputs=[1], dtype=DTYPES
    )
    for case in (*layers, *long, *fields, *columns):
        wide = case["outputs"] if case["call"] in {"pairs", "interaction"} else 1
        work = case["batch"] * case["inputs"] * case["outputs"] * wide
        if work <= (3e8 if case["dtype"] == torch.float32 else 5e7) and case["batch"] * case["inputs"] * wide <= 2e7:
            yield {**case, "work": int(work)}


CASES = list(_all())
"""Cases with their call, shape, dtype and number of multiplications."""


def run(case: dict[str, Any]) -> list[Tensor]:
    """Return the result and the gradients of all arguments, concatenated, for each number of threads."""
    random = torch.Generator().manual_seed(case["work"])
    arguments = [
        torch.randn(shape, generator=random, dtype=torch.float64).to(case["dtype"]).requires_grad_()
        for shape in shapes(case["call"], case["batch"], case["inputs"], case["outputs"])
    ]
    results = []
    for count in THREADS:
        with use_num_threads(count):
            out = CALLS[case["call"]](*arguments)
            upper = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).to(out.dtype).view_as(out)
            gradients = torch.autograd.grad(out, arguments, upper)
        results.append(torch.cat([part.detach().flatten() for part in (out, *gradients)]))
    return results


def differing(cases: list[dict[str, Any]]) -> list[str]:
    """Return the cases whose bits on several threads differ from those on one thread."""
    names = []
    for case in cases:
        one, *others = run(case)
        if not all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for other in others):
            names.append(case_id(case))
    return names


if __name__ == "__main__":
    chosen = [CASES[int(number)] for number in sys.stdin.read().split()]
    print(*differing(chosen), f"{len(chosen)} cases", sep="\n")
