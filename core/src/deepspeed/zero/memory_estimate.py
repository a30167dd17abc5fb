"""How much memory stages 2 and 3 need for parameters, gradients and optimizer states, before a model is trained.

For Adam in mixed precision: a 16-bit weight and its gradient take 2 bytes each, the fp32 master weight and two states
12 bytes. Stage 2 shards all but the weight, stage 3 the weight too; there the largest layer is whole while it is used,
with its gradient. In host memory the gradient takes 4 bytes. Activations and the buffers of the allocator and of the
collectives come on top. Called by users, in a script of one line.
"""

from torch.nn import Module

from deepspeed.errors import counted
from deepspeed.zero.param_unit import shape_of

_GIB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Memory of stage 2, in bytes: (host memory of a node, memory of one device).

    Args:
        total_params: elements of all parameters.
        num_gpus_per_node: devices of a node.
        num_nodes: nodes.
        cpu_offload: whether optimizer states are offloaded to host memory.
        additional_buffer_factor: factor on host memory, for what is allocated beside.
    """
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        device_bytes = 2 * total_params
        host_bytes = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        device_bytes = 2 * total_params + int(14 * total_params / total_gpus)
        host_bytes = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host_bytes), int(device_bytes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of `estimate_zero2_model_states_mem_needs` for a model that exists."""
    total_params = sum(param.numel() for param in model.parameters())  # a shared parameter is listed once
    estimate_zero2_model_states_mem_needs_all_cold(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of `estimate_zero2_model_states_mem_needs` for a number of parameters."""
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {counted(num_nodes, 'node')}, {counted(num_gpus_per_node, 'GPU')} per node.",
        f"SW: Model with {int(total_params / 1e6)}M total params.",
        "  per CPU  |  per GPU |   Options",
    ]
    for cpu_offload in (True, False):
        host_bytes, device_bytes = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        device = "cpu" if cpu_offload else "none"
        lines.append(f" {host_bytes / _GIB:7.2f}GB | {device_bytes / _GIB:6.2f}GB | offload_optimizer={device}")
    print("\n".join(lines))  # noqa: T201 - what the user asked for


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Memory of stage 3, in bytes: (host memory of a node, memory of one device, of which for the largest layer).

    Args:
        total_params: elements of all parameters.
        largest_layer_params: elements of the layer that has most.
        num_gpus_per_node: devices of a node.
        num_nodes: nodes.
        cpu_offload: whether optimizer states are offloaded to host memory.
        cpu_offload_params: whether parameter shards are offloaded too; only with `cpu_offload`.
        zero_init: whether the model is built under `zero.Init`; else every rank builds it whole, in host memory.
        additional_buffer_factor: factor on host memory, for what is allocated beside.
    """
    layer_bytes = 4 * largest_layer_params
    sharded_bytes = (0 if cpu_offload_params else 2) if cpu_offload else 16
    device_bytes = layer_bytes + int(sharded_bytes * total_params / (num_nodes * num_gpus_per_node))
    offloaded_bytes = total_params * ((18 if cpu_offload_params else 16) / num_nodes if cpu_offload else 0)
    built_bytes = 4 * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    return int(max(offloaded_bytes, built_bytes) * additional_buffer_factor), device_bytes, layer_bytes


def estimate_zero3_model_states_mem_needs_all_live(
    model: Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of `estimate_zero3_model_states_mem_needs` for a model that exists, sharded or not."""
    total_params = sum(shape_of(param).numel() for param in model.parameters())
    largest_layer_params = max(
        sum(shape_of(param).numel() for param in module.parameters(recurse=False)) for module in model.modules()
    )
    estimate_zero3_model_states_mem_needs_all_cold(
        total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of `estimate_zero3_model_states_mem_needs` for numbers of parameters."""
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {counted(num_nodes, 'node')}, {counted(num_gpus_per_node, 'GPU')} per node.",
        f"SW: Model with {int(total_params / 1e6)}M total params, "
        f"{int(largest_layer_params / 1e6)}M largest layer params.",
        "  per CPU  |  per GPU |   Options",
    ]
    for cpu_offload, cpu_offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host_bytes, device_bytes, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload,
                cpu_offload_params,
                zero_init,
                additional_buffer_factor,
            )
            lines.append(
                f" {host_bytes / _GIB:7.2f}GB | {device_bytes / _GIB:6.2f}GB | "
                f"offload_param={_home(cpu_offload_params)}, offload_optimizer={_home(cpu_offload)}, "
                f"zero_init={int(zero_init)}"
            )
    print("\n".join(lines))  # noqa: T201 - what the user asked for


def _home(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"
