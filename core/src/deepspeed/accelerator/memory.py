"""MemoryMixin: memory statistics in bytes, and page-locked (pinned) host memory."""

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.accelerator.device import TorchModule


class MemoryMixin(TorchModule):
    """Memory statistics and pinned memory. Every size is in bytes; a `device_index` of None is the current device."""

    # ----- figures ---------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Return the allocator's cached memory to the device. Slow: call it between phases, not in every step."""
        self._ask("empty_cache")

    def return_freed_memory(self, min_bytes: int | None = 2**20) -> None:
        """From now on, return freed blocks of `min_bytes` or more to the device at once. None restores the default.

        `zero.Init` calls this while it builds a model. It frees every full parameter, and longer-lived allocations
        would fill the gaps and fragment the heap. Training does not need it: each step reuses blocks of the same
        sizes. The setting applies to the whole process. The default implementation does nothing.

        Args:
            min_bytes: the smallest block size that is returned; smaller blocks may stay cached for reuse.
        """

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes held by live tensors."""
        return int(self._ask("memory_allocated", device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The highest `memory_allocated` since the start or the last reset."""
        return int(self._ask("max_memory_allocated", device_index))

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Reset `max_memory_allocated` to the present value."""
        self.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        """The former name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """The former name of `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Reset `max_memory_reserved` to the present value."""
        self.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return the allocator's counters under torch's keys: `"allocated_bytes.all.current"`, `"...peak"`, ..."""
        return dict(self._ask("memory_stats", device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset all peak figures to the present values."""
        self._ask("reset_peak_memory_stats", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes the allocator took from the device: live tensors and cached blocks."""
        return int(self._ask("memory_reserved", device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The highest `memory_reserved` since the start or the last reset."""
        return int(self._ask("max_memory_reserved", device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the total bytes of memory on the device."""
        index = self._ask("current_device") if device_index is None else device_index
        return int(self._ask("get_device_properties", index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that can still be allocated on the device.

        This is the driver's free memory if torch can query it, otherwise the total minus this process's tensors.
        """
        if self._has("mem_get_info"):
            free, _total = self._ask("mem_get_info", device_index)
            return int(free)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    # ----- pinned memory ---------------------------------------------------------------------------------------------

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, *, align_bytes: int = 1
    ) -> torch.Tensor:
        """Return a copy of `tensor` in page-locked memory, from which the device copies without the host.

        Args:
            tensor: a CPU tensor; returned itself if it is already pinned and aligned.
            make_copy: False leaves the contents of the new memory undefined.
            match_shape: False returns a 1-D tensor.
            align_bytes: the address is a multiple of this number, as direct file I/O requires.
        """
        if is_aligned(tensor, align_bytes) and self.is_pinned(tensor):
            return tensor if match_shape else tensor.view(-1)
        source = tensor if match_shape else tensor.reshape(-1)
        if align_bytes > 1:
            return aligned_copy(source, align_bytes, lambda numel: self.pin_empty(numel, dtype=torch.uint8))
        return self._torch_pin_memory(source) if make_copy else self._torch_empty_pinned(source, source.shape)

    def pin_empty(
        self, *size: int | Sequence[int], dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """Return an uninitialized tensor of this shape in page-locked memory."""
        shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]
        return self._torch_empty_pinned(torch.empty(0, dtype=dtype, device=device), shape)

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Call `pin_empty` with the shape of `tensor`, and with its dtype unless `dtype` is given."""
        return self.pin_empty(*tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Release page-locked memory. Default: nothing, because the memory is freed with its last tensor."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True when `tensor` is in page-locked memory."""
        return self._torch_is_pinned(tensor)

    def pin_memory_alignment(self) -> int:
        """Return the address alignment, in bytes, that `register_host_memory` requires. 1 means any address."""
        return 1

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Page-lock existing memory and return True. Default: return False, and copies are staged."""
        return False

    def unregister_host_memory(self, address: int) -> bool:
        """Undo `register_host_memory`. Return whether the memory was registered."""
        return False

    # Hooks for classes written for DeepSpeed 0.19.6, which override only these. The methods above call them.

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return self._torch_pin_memory(torch.empty(shape, dtype=tensor.dtype))

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return True when `tensor` is on this device."""
        return tensor.device.type == self._name


def is_aligned(tensor: torch.Tensor, align_bytes: int) -> bool:
    """Return True when the address of `tensor` is a multiple of `align_bytes`.

    Raises:
        ValueError: `align_bytes` is not a multiple of the element size, so no view can start at such an address.
    """
    if align_bytes > 1 and align_bytes % tensor.element_size():
        raise ValueError(
            f"align_bytes={align_bytes} is no multiple of the {tensor.element_size()} bytes of {tensor.dtype}; "
            "use a power of two such as 512"
        )
    return align_bytes <= 1 or tensor.data_ptr() % align_bytes == 0


def aligned_copy(tensor: torch.Tensor, align_bytes: int, allocate: Any) -> torch.Tensor:
    """Return a contiguous copy of `tensor` at an address that is a multiple of `align_bytes`.

    `allocate(numel)` returns a 1-D uint8 buffer. The requested size includes `align_bytes` spare bytes. The copy is a
    view of the buffer and keeps it alive.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    buffer = allocate(num_bytes + align_bytes)
    start = -buffer.data_ptr() % align_bytes
    copy = buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
