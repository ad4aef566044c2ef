"""Errors of the executor, one for each party that can be to blame."""

from quire import settings


class ExecutorError(Exception):
    """Base class of all errors of the executor."""


class ConfigError(ExecutorError, settings.ConfigError):
    """The configuration is wrong: an unknown key, a value out of range, or settings that contradict each other."""


class CheckpointError(ExecutorError):
    """The model cannot be used: no such directory, a broken file, an unknown architecture, wrong tensors."""


class OutOfMemory(ExecutorError):
    """The device has too little free memory for the weights, for a step or for a KV pool."""


class PlanRejected(ExecutorError):
    """The scheduler sent a plan that is malformed or breaks a rule of the plan stream. No part of it was run."""


class ModelBroken(ExecutorError):
    """The model computes nothing usable any more. Only a new process, which loads the weights again, can help."""


class RankLost(ModelBroken):
    """A rank of the group has ended or hangs, so no rank can compute a step any more."""


class EpochRefused(ExecutorError):
    """The scheduler sent the epoch of another lease, or left a gap in the step ids."""


class LeaseRefused(ExecutorError):
    """The scheduler gets no lease: its protocol differs, or another scheduler has the lease."""
