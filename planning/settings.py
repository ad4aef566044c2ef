"""What `quire plan` and `quire simulate` can be asked: a frozen value each, from which the command line has its flags.

Light on purpose: it is imported to print `quire --help`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeploymentSettings:
    """Field by field:

    device                  by name: h100, h200, a100
    device_memory           of one device, instead of its data sheet's: 80GB, 79.2GiB
    tensor_parallel         devices that hold the model together
    dtype                   of weights and KV; absent: as the checkpoint says
    block_size              tokens a KV block
    max_model_len           most tokens of one sequence; absent: what the checkpoint was made for
    gpu_memory_utilization  share of a device's memory for weights and KV; what is left is for activations
    num_blocks              blocks of the pool, instead of as many as fit
    """

    device: str = "h100"
    device_memory: str | None = None
    tensor_parallel: int = 1
    dtype: str | None = None
    block_size: int = 16
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class SimulateSettings(DeploymentSettings):
    """Field by field:

    device                  by name: h100, h200, a100
    device_memory           of one device, instead of its data sheet's: 80GB, 79.2GiB
    tensor_parallel         devices that hold the model together
    dtype                   of weights and KV; absent: as the checkpoint says
    block_size              tokens a KV block
    max_model_len           most tokens of one sequence; absent: what the checkpoint was made for, at most 8192
    gpu_memory_utilization  share of a device's memory for weights and KV; what is left is for activations
    num_blocks              blocks of the pool, instead of as many as fit: memory pressure
    fit                     cost model from files of measured steps (quire bench serve --chrome-trace), commas between
    max_num_seqs            sequences that run at once
    max_num_batched_tokens  tokens of one step
    max_in_flight           plans sent and not yet answered
    policy                  order of the queue: fcfs, priority
    batching                for measurement: continuous, dynamic, static; absent: as the core has it
    memory                  for measurement: paged, contiguous, contiguous-power-of-two, contiguous-exact; absent: as
                            the core has it
    clients                 closed loop of so many clients, each with one request out
    turnaround_s            of these clients, from the end of one request to the arrival of the next
    rate                    open loop instead: requests a second
    burstiness              of the open loop, squared coefficient of variation of the gaps; 1 is Poisson
    daily_swing             of the open loop, 0 to 1: the rate follows a sine of 24 hours, this far up and down
    lengths                 alpaca, sharegpt, fixed, or a file: a JSON object a line with prompt_tokens, output_tokens
                            and, if wanted, arrival_s
    prompt_tokens           of lengths fixed
    output_tokens           of lengths fixed
    system_tokens           tokens of a system prompt that requests begin with
    system_share            share of the requests that do
    tenants                 several such workloads at once: a JSON file, in the place of the flags from clients to here
    num_requests            ends after so many; absent: 1000, if no duration is given
    duration_s              ends after so many virtual seconds of arrivals
    seed                    of everything that is drawn
    """

    fit: str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_in_flight: int = 2
    policy: str = "fcfs"
    batching: str | None = None
    memory: str | None = None
    clients: int | None = None
    turnaround_s: float = 0.0
    rate: float | None = None
    burstiness: float = 1.0
    daily_swing: float = 0.0
    lengths: str = "sharegpt"
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    system_tokens: int = 0
    system_share: float = 1.0
    tenants: str | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 7
