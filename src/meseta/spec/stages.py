"""Stages of a training step, and the components of its predicted time."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

StageName = Literal[
    "data", "copy", "input_dist", "lookup", "output_dist", "dense_forward", "agree", "backward", "gradient_dist",
    "table_update", "dense_update",
]  # fmt: skip
# overlap      transfer                               runs concurrently with
# ---------    -----------------------------------    --------------------------------------------------------------
# ids          id counts and ids of batch i + 1       computation of batch i
# embeddings   pooled embeddings and rows             `ScoringModel.encode_dense`, or the previous micro-batch
# gradients    gradients of embeddings                the remaining backward pass, or the next micro-batch
# dense        all-reduce of dense gradients          the remaining backward pass, table updates and the next lookup
# agree        all-reduce of the loss                 the backward pass until the first row update
#
# Overlap never changes results. With staleness 0, a batch is looked up after the update of the previous batch.
Overlap = Literal["ids", "embeddings", "gradients", "dense", "agree"]
OVERLAPS: tuple[Overlap, ...] = ("ids", "embeddings", "gradients", "dense", "agree")
"""Transfers that can overlap with computation, in the order in which a batch needs them."""
FORMER_OVERLAPS = {"answers": "embeddings"}
"""Current name of each former name in `OVERLAPS`."""
StepComponent = Literal["input_dist", "lookup", "output_dist", "dense", "gradient_dist", "table_update"]
"""Component of a predicted step."""


class Stage(NamedTuple):
    """Timed stage of a training step."""

    name: StageName
    component: StepComponent | None
    """Component whose prediction includes this stage, or `None` if the stage is not predicted."""
    description: str


STAGES = (
    Stage("data", None, "wait for a batch from the reader"),
    Stage("copy", None, "copy the batch to the device"),
    Stage("input_dist", "input_dist", "send ids to the owners of their rows"),
    Stage("lookup", "lookup", "read and pool owned rows"),
    Stage("output_dist", "output_dist", "wait for the embeddings of this rank's samples"),
    Stage("dense_forward", "dense", "compute logits"),
    Stage("agree", "dense", "sum losses and weights over ranks"),
    Stage("backward", "dense", "compute gradients, and sum the dense ones over ranks"),
    Stage("gradient_dist", "gradient_dist", "send gradients to the owners of the rows"),
    Stage("table_update", "table_update", "update owned rows"),
    Stage("dense_update", "dense", "update dense parameters"),
)
"""All stages, in the order in which a batch passes through them."""
FORMER_STAGES = {"update": "dense_update"}
"""Current name of each former stage."""
STAGE_NAMES = tuple(stage.name for stage in STAGES)
STEP_COMPONENTS: tuple[StepComponent, ...] = get_args(StepComponent)
"""All components, in the order of a step."""
FORMER_COMPONENTS = {"backward": "gradient_dist", "update": "table_update"}
"""Current name of each former component."""


def component_stages(component: StepComponent) -> tuple[StageName, ...]:
    """Return the timed stages that a component of a predicted step includes."""
    return tuple(stage.name for stage in STAGES if stage.component == component)
