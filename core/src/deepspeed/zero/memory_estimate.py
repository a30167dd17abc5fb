"""How much memory stage 2 needs for parameters, gradients and optimizer states, before a model is trained.

The formulas are DeepSpeed's, for Adam in mixed precision: a 16-bit weight and gradient take 2 bytes each, the fp32
gradient, master weight and two states 16 bytes that are sharded over all ranks. Activations and buffers of the
allocator come on top. Called by users, in a script of one line.
"""

from torch.nn import Module

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
        device_bytes = 4 * total_params + int(16 * total_params / total_gpus)
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
        f"HW: Setup with {_count(num_nodes, 'node')}, {_count(num_gpus_per_node, 'GPU')} per node.",
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
