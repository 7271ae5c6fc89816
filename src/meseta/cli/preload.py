"""Imports everything that training commands need, including torch, so that forked processes share it."""

import numpy.ma  # noqa: F401 (numpy.unique imports it at its first use)
import sympy  # noqa: F401 (torch imports it at its first use)

import meseta.data.read.reader
import meseta.train.predictions
import meseta.train.trained_model
import meseta.train.trainer
import meseta.train.verify  # noqa: F401
