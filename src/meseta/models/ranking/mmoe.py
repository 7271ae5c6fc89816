"""MMoE: several tasks share experts, and each has a gate that mixes them.

Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts", KDD 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meseta.config.models.classic import MMoEConfig
from meseta.models.columns import ColumnAxes, InputColumns, reading
from meseta.models.layers import (
    MLP,
    MLPOptions,
    ModelBuildArgs,
    ScoringModel,
    SkipInitLinear,
    check_widths,
    fill_glorot,
    fill_normal,
)
from meseta.ops.common import softmax
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


class MMoE(ScoringModel):
    """Multi-gate mixture of experts (Ma et al., KDD 2018, section 4.2, equations 6 to 8).

        x = concat(dense, e_1, ..., e_F)
        f_i(x)                                     experts, each an MLP with ReLU after every layer
        g_k(x) = softmax(W_k x)                    one gate per task
        logit_k = tower_k(sum_i g_k(x)_i f_i(x))   one MLP per task

    Logits have the shape [B, T], or [B] for one task.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        num_dense: int,
        num_tasks: int,
        experts: Sequence[Sequence[int]],
        tower_mlp: Sequence[int],
        options: MLPOptions | None = None,
        seed: int = 0,
    ) -> None:
        """Create the model on `embeddings`, see `ScoringModel`. Tables may have different widths.

        `experts` has the layer widths of each expert, whose output widths must be equal, and `tower_mlp` the hidden
        widths of the tower of each of `num_tasks` labels.

        Raises MesetaError if there is no task or no expert, an expert has no layers, or a width is invalid.
        """
        super().__init__(embeddings, num_dense)
        check_widths("MMoE", "num_tasks, number of experts and tower_mlp", [num_tasks, len(experts), *tower_mlp])
        for widths in experts:
            check_widths("MMoE", "experts", widths)
            if not widths or widths[-1] != experts[0][-1]:
                raise MesetaError(
                    "MMoE: each expert must have at least one layer, and all must have the same output width, got "
                    f"layer widths {[list(w) for w in experts]}"
                )
        num_inputs = num_dense + self.pooled_width
        self.experts = nn.ModuleList(
            MLP([num_inputs, *widths], relu_last=True, options=options, name=f"experts.{index}")
            for index, widths in enumerate(experts)
        )
        self.gates = nn.ModuleList(SkipInitLinear(num_inputs, len(experts), bias=False) for _ in range(num_tasks))
        widths = [experts[0][-1], *tower_mlp, 1]
        self.towers = nn.ModuleList(
            MLP(widths, relu_last=False, options=options, name=f"towers.{task}") for task in range(num_tasks)
        )
        self._set_initial_weights(seed)

    def logits(self, x: Tensor, pooled: Float[Tensor, "B sum_of_D"]) -> Float[Tensor, " B *T"]:
        x = torch.cat([x, pooled], dim=1)
        seen = torch.stack([expert(x, self.batch_slice) for expert in self.experts], dim=1)  # [B, experts, outputs]
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            # Gates compute in the type of the embeddings, MLPs in that of `options`.
            share = softmax(gate(x)).to(seen.dtype)
            logits.append(tower((share[..., None] * seen).sum(dim=1), self.batch_slice))
        return torch.cat(logits, dim=1) if len(logits) > 1 else logits[0].squeeze(1)

    def column_axes(self, columns: InputColumns) -> ColumnAxes:
        """Return axes indexed by inputs."""
        inputs = None, reading([*columns.dense_labels(), *columns.sparse_labels()])
        experts = {f"experts.{index}.0.weight": inputs for index in range(len(self.experts))}
        return ColumnAxes({**experts, **{f"gates.{task}.weight": inputs for task in range(len(self.gates))}})

    def _set_initial_weights(self, seed: int) -> None:
        # Matrices from N(0, 2 / (inputs + outputs)), biases with zeros.
        for part in self.modules():
            if isinstance(part, MLP):
                fill_glorot(part, seed)
        for index, gate in enumerate(self.gates):
            weight = gate.get_parameter("weight")
            fill_normal(weight, (2.0 / sum(weight.shape)) ** 0.5, seed, f"gates.{index}.weight")


def make_mmoe(config: MMoEConfig, request: ModelBuildArgs) -> MMoE:
    """Build MMoE from its config."""
    return request.build(
        MMoE,
        num_tasks=request.num_tasks,
        experts=(config.expert_mlp,) * config.num_experts,
        tower_mlp=config.tower_mlp,
    )
