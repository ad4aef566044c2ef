"""A model on devices: the memory of the weights on each device, and the memory left for the pool."""

from dataclasses import dataclass, replace

from planning.devices import Device, find_device, parse_bytes
from planning.errors import PlanningError
from planning.known_models import find_model
from planning.model_shape import DTYPE_BYTES, ModelShape
from planning.settings import DeploymentSettings


@dataclass(frozen=True, slots=True)
class Deployment:
    """The memory of one device. Under tensor parallelism it is the one with the most; each holds a part of every block.

    weight_bytes         all parameters on the device
    read_bytes           parameters that a step reads: without the embedding table, unless it is also the head
    kv_bytes_per_token   keys and values of one token in all layers
    pool_bytes           memory_share of the device's memory, minus the weights
    num_blocks           blocks of the pool, including the null block
    """

    model: ModelShape
    device: Device
    tensor_parallel: int
    dtype: str
    block_size: int
    max_model_len: int
    memory_share: float
    weight_bytes: int
    read_bytes: int
    kv_bytes_per_token: int
    pool_bytes: int
    num_blocks: int

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def num_usable_blocks(self) -> int:
        """The number of blocks without the null block, which padding is written to."""
        return max(0, self.num_blocks - 1)

    @property
    def num_kv_copies(self) -> int:
        """The number of devices that hold the same kv head; above 1 if there are more devices than kv heads."""
        return -(-self.tensor_parallel // self.model.num_kv_heads)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def deploy(model: str, settings: DeploymentSettings) -> Deployment:
    """Returns the deployment of a model, given by name or path, on the device of the settings. Raises PlanningError."""
    shape = find_model(model)
    device = find_device(settings.device)
    if settings.device_memory is not None:
        device = replace(device, memory_bytes=parse_bytes(settings.device_memory))
    return place(shape, device, settings)


def check_fits(deployment: Deployment) -> None:
    """Raises PlanningError if the blocks, whose number can be given, need more memory than is left for the pool."""
    needed_bytes = deployment.num_blocks * deployment.block_bytes
    if needed_bytes > deployment.pool_bytes:
        raise PlanningError(
            f"num_blocks: {deployment.num_blocks:,} blocks need {needed_bytes / 1e9:.1f} GB on each of "
            f"{deployment.tensor_parallel} device(s), but {max(0, deployment.pool_bytes) / 1e9:.1f} GB are left beside "
            f"{deployment.weight_bytes / 1e9:.1f} GB of weights"
        )


def place(shape: ModelShape, device: Device, settings: DeploymentSettings) -> Deployment:
    """Returns the deployment of a shape on a device. Raises PlanningError for invalid settings or too little memory."""
    _check(settings)
    shape.check_tensor_parallel(settings.tensor_parallel)
    dtype = settings.dtype or shape.dtype or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise PlanningError(f"dtype: {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    size, parallel = DTYPE_BYTES[dtype], settings.tensor_parallel
    weight_bytes = shape.num_device_parameters(parallel) * size
    kv_bytes = shape.num_device_kv_values(parallel) * size
    pool_bytes = int(device.memory_bytes * settings.gpu_memory_utilization) - weight_bytes
    block_bytes = settings.block_size * kv_bytes
    num_blocks = settings.num_blocks or max(0, pool_bytes) // block_bytes
    if num_blocks < 2:
        raise PlanningError(
            f"{shape.name} in {dtype} has {weight_bytes / 1e9:.1f} GB of weights on each of {parallel} device(s), "
            f"but only {device.memory_bytes * settings.gpu_memory_utilization / 1e9:.1f} GB for weights and KV, which "
            f"needs at least two blocks of {block_bytes / 1e9:,.3f} GB"
        )
    return Deployment(
        model=shape,
        device=device,
        tensor_parallel=parallel,
        dtype=dtype,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len or shape.max_position_embeddings,
        memory_share=settings.gpu_memory_utilization,
        weight_bytes=weight_bytes,
        read_bytes=shape.num_read_parameters(parallel) * size,
        kv_bytes_per_token=kv_bytes,
        pool_bytes=pool_bytes,
        num_blocks=num_blocks,
    )


def _check(settings: DeploymentSettings) -> None:
    for name, least in (("tensor_parallel", 1), ("block_size", 1), ("max_model_len", 1), ("num_blocks", 2)):
        value = getattr(settings, name)
        if value is not None and value < least:
            raise PlanningError(f"{name}: must be at least {least}, not {value}")
    if not 0 < settings.gpu_memory_utilization <= 1:
        raise PlanningError(
            f"gpu_memory_utilization: must be above 0 and at most 1, not {settings.gpu_memory_utilization}"
        )
