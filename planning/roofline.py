"""A cost model for a device of which only the data sheet is known.

    linear layers   max( weights ÷ bandwidth , 2 FLOPs x weights x tokens ÷ compute )    for the head: sampled tokens
    attention       KV of all decode pairs ÷ bandwidth   +   FLOPs of prefill pairs ÷ compute
    all-reduce      under tensor parallelism 2 per layer: 2 (n - 1) / n x activations ÷ link bandwidth + latency
    overhead        a constant per step: launches, the sampler, and scheduling that does not overlap with the device

Data sheets give limits; `Efficiencies` are the shares of them that kernels reach. The defaults and their sources:

    bandwidth   0.90   3.0 of 3.35 TB/s, which large copies and reads reach on an H100
    attention   0.65   decode attention at contexts around 1k: 2.0 to 2.7 TB/s of published paged kernels
    compute     0.60   large matrix products in 16 bits: about 600 of 989 TFLOP/s
    prefill     0.40   paged causal attention: 300 to 400 of 989 TFLOP/s
    link        0.70   of one direction of NVLink
    overhead    0.5 ms per step; 10 µs latency per all-reduce

These are assumptions, not measurements. If there are measured steps, fit a model to them instead.
"""

from dataclasses import dataclass

from planning.devices import Device
from planning.model_shape import ModelShape
from scheduler.core.inspect.step_load import StepLoad


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """The shares of the data sheet's rates that kernels reach, and the constant times of a step."""

    bandwidth: float = 0.90
    attention: float = 0.65
    compute: float = 0.60
    prefill: float = 0.40
    link: float = 0.70
    overhead_s: float = 0.5e-3
    all_reduce_latency_s: float = 10e-6


class Roofline:
    """A CostModel from a data sheet. Weights, activations and KV have `dtype_bytes` bytes per number."""

    def __init__(
        self,
        model: ModelShape,
        device: Device,
        *,
        tensor_parallel: int = 1,
        dtype_bytes: int = 2,
        efficiencies: Efficiencies | None = None,
    ) -> None:
        model.check_tensor_parallel(tensor_parallel)
        reached = efficiencies or Efficiencies()
        bandwidth = device.bandwidth * reached.bandwidth
        flops = device.flops(dtype_bytes)
        matrices = model.num_layer_matrix_parameters(tensor_parallel)
        head = model.num_head_parameters(tensor_parallel)
        self.layers_read_s = (model.num_read_parameters(tensor_parallel) - head) * dtype_bytes / bandwidth
        self.layers_token_s = 2 * matrices / (flops * reached.compute)
        self.head_read_s = head * dtype_bytes / bandwidth
        self.head_token_s = 2 * head / (flops * reached.compute)
        kv_bytes = model.num_device_kv_values(tensor_parallel) * dtype_bytes
        self.decode_pair_s = kv_bytes / (device.bandwidth * reached.attention)
        self.prefill_pair_s = model.attention_flops(1, tensor_parallel) / (flops * reached.prefill)
        self.overhead_s = reached.overhead_s
        self.reduce_token_s = 0.0
        if tensor_parallel > 1:
            num_reduces = 2 * model.num_layers
            moved = 2 * (tensor_parallel - 1) / tensor_parallel * model.hidden_size * dtype_bytes
            self.reduce_token_s = num_reduces * moved / (device.link_bandwidth * reached.link)
            self.overhead_s += num_reduces * reached.all_reduce_latency_s

    def step_s(self, load: StepLoad) -> float:
        num_tokens = load.num_decodes + load.num_prefill_tokens
        return (
            self.overhead_s
            + max(self.layers_read_s, self.layers_token_s * num_tokens)
            + max(self.head_read_s, self.head_token_s * load.num_sampled)
            + self.decode_pair_s * load.num_decode_pairs
            + self.prefill_pair_s * load.num_prefill_pairs
            + self.reduce_token_s * num_tokens
        )
