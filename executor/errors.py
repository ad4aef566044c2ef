"""Errors of the executor, by blame."""


class ExecutorError(Exception):
    """Base of all of them."""


class ConfigError(ExecutorError):
    """The person who started it: an unknown key, a value out of range, settings that contradict each other."""


class CheckpointError(ExecutorError):
    """The model: no such directory, a broken file, an architecture we do not know, tensors missing or misshapen."""


class OutOfMemory(ExecutorError):
    """The device has too little free memory for a KV pool."""


class PlanRejected(ExecutorError):
    """The scheduler: a plan is malformed or breaks a rule of the plan stream. Nothing of it was run."""


class EpochRefused(ExecutorError):
    """The scheduler: an old epoch, or a gap in the step ids."""
