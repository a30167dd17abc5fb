"""MemoryMixin: how much memory there is and who has it, in bytes; and memory that the device can copy from."""

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.accelerator.device import TorchModule


class MemoryMixin(TorchModule):
    """Memory figures and pinned memory. Every figure is an int in bytes; `None` means the current device."""

    # ----- figures ---------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Give memory that the allocator keeps for reuse back to the device. Slow; for use between phases."""
        self._ask("empty_cache")

    def return_freed_memory(self, min_bytes: int | None = 2**20) -> None:
        """From now on, give freed blocks of `min_bytes` or more back to the device at once; None ends that.

        `zero.Init` calls it while a model is built: it frees every whole parameter, which leaves gaps in a heap that
        what lives longer fills. Training reuses blocks of the same sizes in every step, which a heap does well. Counts
        for the whole process. Default: nothing, for an allocator that reuses such blocks well.

        Args:
            min_bytes: the size of the smallest blocks that are given back; smaller ones may be kept for reuse.
        """

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes held by live tensors."""
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
        """The allocator's counters, keyed as torch does: `"allocated_bytes.all.current"`, `"...peak"` and so on."""
        return dict(self._ask("memory_stats", device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset all peak figures to the present values."""
        self._ask("reset_peak_memory_stats", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes the allocator took from the device: live tensors and what it keeps for reuse."""
        return int(self._ask("memory_reserved", device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The highest `memory_reserved` since the start or the last reset."""
        return int(self._ask("max_memory_reserved", device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory on the device, whoever uses them."""
        index = self._ask("current_device") if device_index is None else device_index
        return int(self._ask("get_device_properties", index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can still be taken from the device.

        What the driver calls free, where torch can ask it; otherwise the total less this process's tensors.
        """
        if self._has("mem_get_info"):
            free, _total = self._ask("mem_get_info", device_index)
            return int(free)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    # ----- pinned memory ---------------------------------------------------------------------------------------------

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, *, align_bytes: int = 1
    ) -> torch.Tensor:
        """A CPU tensor of the same content in page-locked memory, which the device copies from without the host.

        Args:
            tensor: a CPU tensor; returned as it is when it is pinned and aligned already.
            make_copy: False leaves what is in the new memory undefined.
            match_shape: False gives one dimension.
            align_bytes: the address is made a multiple of this, as direct file reading and writing needs.
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
        """Page-locked memory of this shape, whose contents are undefined."""
        shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)  # type: ignore[arg-type]
        return self._torch_empty_pinned(torch.empty(0, dtype=dtype, device=device), shape)

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`pin_empty` of the shape, and unless it is given of the dtype, of `tensor`."""
        return self.pin_empty(*tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Let page-locked memory go. Default: nothing, since it goes with its last tensor."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True when `tensor` lies in memory as `pin_memory` gives it."""
        return self._torch_is_pinned(tensor)

    def pin_memory_alignment(self) -> int:
        """The multiple that addresses of memory for `register_host_memory` have, in bytes. 1: any."""
        return 1

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Page-lock memory that is there already; whether that was done. Default: it is not, and copies are staged."""
        return False

    def unregister_host_memory(self, address: int) -> bool:
        """Take `register_host_memory` back; whether there was something to take back."""
        return False

    # what a class of DeepSpeed 0.19.6 overrides alone: the methods above come here

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return self._torch_pin_memory(torch.empty(shape, dtype=tensor.dtype))

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True when `tensor` lies in this device's memory."""
        return tensor.device.type == self._name


def is_aligned(tensor: torch.Tensor, align_bytes: int) -> bool:
    """True when the first element of `tensor` stands at a multiple of `align_bytes`.

    Raises:
        ValueError: `align_bytes` is not a multiple of the element size, so no view can start there.
    """
    if align_bytes > 1 and align_bytes % tensor.element_size():
        raise ValueError(
            f"align_bytes={align_bytes} is no multiple of the {tensor.element_size()} bytes of {tensor.dtype}; "
            "use a power of two such as 512"
        )
    return align_bytes <= 1 or tensor.data_ptr() % align_bytes == 0


def aligned_copy(tensor: torch.Tensor, align_bytes: int, allocate: Any) -> torch.Tensor:
    """A contiguous copy of `tensor` at an address that is a multiple of `align_bytes`.

    `allocate(numel)` gives a 1-D uint8 buffer; `align_bytes` bytes more than needed are taken from it. The buffer lives
    as long as the copy, which is a view of it.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    buffer = allocate(num_bytes + align_bytes)
    start = -buffer.data_ptr() % align_bytes
    copy = buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
