"""The settings of `quire plan` and `quire simulate`; the command line makes its flags from them.

This module imports almost nothing, because `quire --help` imports it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeploymentSettings:
    """The settings of `quire plan`, which become its flags.

    device                  name of the device: h100, h200, a100
    device_memory           memory of one device, such as 80GB or 79.2GiB; absent: from the data sheet
    tensor_parallel         number of devices that share the model
    dtype                   dtype of weights and KV; absent: that of the checkpoint
    block_size              tokens per KV block
    max_model_len           maximum number of tokens of one sequence; absent: what the checkpoint was made for
    gpu_memory_utilization  share of a device's memory for weights and KV; the rest is for activations
    num_blocks              number of blocks in the pool, which must fit; absent: as many as fit
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
    """The settings of `quire simulate`, which become its flags.

    device                  name of the device: h100, h200, a100
    device_memory           memory of one device, such as 80GB or 79.2GiB; absent: from the data sheet
    tensor_parallel         number of devices that share the model
    dtype                   dtype of weights and KV; absent: that of the checkpoint
    block_size              tokens per KV block
    max_model_len           maximum number of tokens of one sequence; absent: what the checkpoint was made for, at most
                            8192
    gpu_memory_utilization  share of a device's memory for weights and KV; the rest is for activations
    num_blocks              number of blocks in the pool, which must fit, except with `fit`; absent: as many as fit.
                            Fewer simulate memory pressure
    fit                     files of measured steps (quire bench serve --chrome-trace), separated by commas, to fit the
                            cost model to; absent: a roofline model of the device
    max_num_seqs            maximum number of sequences that run at once
    max_num_batched_tokens  maximum number of tokens of one step
    target_inter_token_latency_ms  time that a step with decodes should take at most; it bounds their prompt tokens
    max_in_flight           maximum number of plans that are sent and not yet answered
    policy                  order of the requests of a tenant: fcfs, priority
    batching                continuous; for measurement: dynamic, static
    memory                  paged; for measurement: contiguous, contiguous-power-of-two, contiguous-exact
    clients                 number of clients of a closed loop, each with one open request
    turnaround_s            time of these clients from the end of one request to the arrival of the next
    rate                    requests per second of an open loop, instead of `clients`
    burstiness              squared coefficient of variation of the open loop's gaps; 1 is Poisson
    daily_swing             amplitude of a daily sine of the open loop's rate, as a share of the rate, 0 to 1
    lengths                 alpaca, sharegpt, fixed, or a file with one JSON object per line: prompt_tokens,
                            output_tokens and optionally arrival_s and priority. Without arrival_s, the requests arrive
                            at the given rate, or all at once
    prompt_tokens           prompt tokens of every request, for lengths fixed
    output_tokens           output tokens of every request, for lengths fixed
    system_tokens           number of tokens of a system prompt
    system_share            share of the requests that begin with a system prompt
    system_prompts          number of different system prompts
    system_skew             how unequally they are used: the k-th has a weight of k ** -s (Zipf), s being this number;
                            0: equally
    tenants                 JSON file with several such workloads, instead of `clients` to `system_skew`. Each is of
                            one tenant, with a weight and a priority
    replicas                number of replicas behind routers; absent: one server without a router
    routing                 choice of the replica: round-robin, least-loaded, ring, cost; for comparison: oracle, which
                            knows the true state of all replicas
    routers                 number of routers, each with its own knowledge of the replicas; requests come to them at
                            random
    event_delay_ms          time from a change in a replica until routers know it
    event_loss              share of a replica's reports that do not arrive at a router, 0 to 1
    failures                replicas that die: REPLICA@SECONDS, separated by commas; replicas are counted from 0
    mean_failure_s          mean time until a replica dies; absent: only those of `failures` die
    repair_s                time from the death of a replica until it is back, with an empty cache
    num_requests            stop after this number of requests; absent: 1000, if no duration is given
    duration_s              stop after arrivals for this number of virtual seconds
    seed                    seed of all random draws
    """

    fit: str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    target_inter_token_latency_ms: float = 25.0
    max_in_flight: int = 2
    policy: str = "fcfs"
    batching: str = "continuous"
    memory: str = "paged"
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
    system_prompts: int = 1
    system_skew: float = 0.9
    tenants: str | None = None
    replicas: int | None = None
    routing: str = "cost"
    routers: int = 1
    event_delay_ms: float = 0.0
    event_loss: float = 0.0
    failures: str | None = None
    mean_failure_s: float | None = None
    repair_s: float = 10.0
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 7
