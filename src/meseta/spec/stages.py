"""The stages of a training step, in the order in which a batch meets them, and what a plan predicts of each.

stage            a rank                                              predicted as
-------------    ------------------------------------------------    -----------------
data             takes a batch from its reader                       -
copy             moves it to its device                              -
input_dist       sends ids to the ranks that own their rows          input_dist
lookup           reads and pools the rows that it owns               lookup
output_dist      waits for those of its samples                      output_dist
dense_forward    scores                                              dense
agree            adds up losses and weights with the others          dense
backward         computes gradients, and adds up the dense ones      dense
gradient_dist    sends gradients to the owners of the rows           backward
table_update     steps the rows that it owns                         update
update           steps the dense part                                dense

On several ranks what travels may be hidden behind what is computed:

overlap      travels                            while
---------    -------------------------------    ----------------------------------------------------------------
ids          counts and ids of batch i + 1      batch i is computed
answers      rows and bags                      `Model.forward_dense(dense)`; with micro-batches, the one before
gradients    gradients of rows and bags         the rest of the backward pass; with micro-batches, the one after
dense        sums of dense gradients            the rest of the backward pass, the update of tables, the next lookup
agree        the sum of the loss                the backward pass, until the first row moves

No row is looked up before the update of the batch before, so that no bit depends on what is hidden.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

StageName = Literal[
    "data", "copy", "input_dist", "lookup", "output_dist", "dense_forward", "agree", "backward", "gradient_dist",
    "table_update", "update",
]  # fmt: skip
Overlap = Literal["ids", "answers", "gradients", "dense", "agree"]
OVERLAPS: tuple[Overlap, ...] = ("ids", "answers", "gradients", "dense", "agree")
"""What may be hidden, in the order in which a batch meets it."""
StepComponent = Literal["input_dist", "lookup", "output_dist", "dense", "backward", "update"]
"""Parts of a predicted step, as files name them; see LABELS for people."""


class Stage(NamedTuple):
    """One stage."""

    name: StageName
    """As it is timed."""
    component: StepComponent | None
    """The predicted part of a step that it belongs to; None where no plan predicts it."""


STAGES = (
    Stage("data", None),
    Stage("copy", None),
    Stage("input_dist", "input_dist"),
    Stage("lookup", "lookup"),
    Stage("output_dist", "output_dist"),
    Stage("dense_forward", "dense"),
    Stage("agree", "dense"),
    Stage("backward", "dense"),
    Stage("gradient_dist", "backward"),
    Stage("table_update", "update"),
    Stage("update", "dense"),
)
"""All of them, in their order."""
STAGE_NAMES = tuple(stage.name for stage in STAGES)
STEP_COMPONENT_LABELS: dict[StepComponent, str] = {
    "input_dist": "input_dist",
    "lookup": "lookup",
    "output_dist": "output_dist",
    "dense": "dense",
    "backward": "gradient_exchange",
    "update": "row_update",
}
"""What people are told of the parts of a predicted step, in their order: none has the name of another stage."""
STEP_COMPONENTS: tuple[StepComponent, ...] = tuple(STEP_COMPONENT_LABELS)


def component_stages(component: StepComponent) -> tuple[StageName, ...]:
    """The timed stages that make up a predicted part of a step."""
    return tuple(stage.name for stage in STAGES if stage.component == component)
