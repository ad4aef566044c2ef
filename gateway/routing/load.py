"""The load of a replica, as the replica reports it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica when it made its last report.

    num_running          sequences in its batch
    num_waiting          requests in its queue
    queued_tokens        prompt tokens that wait or are being computed, without those that its prefix cache has
    prefill_s_per_token  seconds that it takes for one prompt token; 0: it has not measured that yet
    decode_step_s        seconds by which one more running sequence prolongs each step
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    prefill_s_per_token: float = 0.0
    decode_step_s: float = 0.0
