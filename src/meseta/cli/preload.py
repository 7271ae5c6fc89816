"""Imports what commands that train need, torch among it: processes that are forked afterwards share it."""

import sympy  # noqa: F401 (by torch, at its first use)

import meseta.train.predictions
import meseta.train.trained_model
import meseta.train.trainer
import meseta.train.verify  # noqa: F401
