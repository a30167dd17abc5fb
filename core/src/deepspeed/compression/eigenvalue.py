"""`Eigenvalue` estimates the curvature of the loss for each layer: the largest eigenvalue of the layer's Hessian block.

Mixture of Quantization reduces the bits of layers with larger eigenvalues later. Source: Shen et al., "Q-BERT" (arXiv
1909.05840), section 3.1: the power iteration v <- Hv / |Hv| converges to the eigenvector of the largest |eigenvalue|. A
second backward computes Hv (Pearlmutter, "Fast Exact Multiplication by the Hessian", 1994, section 3).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from deepspeed import log
from deepspeed._absent import complete
from deepspeed.errors import ConfigError

__all__ = ["Eigenvalue"]


class Eigenvalue:
    """Estimates the largest eigenvalue of each layer's block of the Hessian.

    Args:
        verbose: log each estimate.
        max_iter: maximum number of iterations.
        tol: relative change at which the iteration stops.
        stability: added to the norm in the normalization of a vector.
        gas_boundary_resolution: number of steps between estimates; used by the caller.
        layer_name: the name of the list of layers in the module.
        layer_num: number of layers; 0: all.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 0.01,
        stability: float = 0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        self.verbose = verbose
        self.max_iter = max_iter
        self.tol = tol
        self.stability = stability
        self.gas_boundary_resolution = gas_boundary_resolution
        self.layer_name = layer_name
        self.layer_num = layer_num

    def get_layers(self, module: nn.Module) -> list[nn.Module]:
        """Return the layers. Raises ConfigError if the name is unknown, or there are fewer layers than `layer_num`."""
        inner = getattr(module, "module", module)
        try:
            found = inner.get_submodule(self.layer_name)
        except AttributeError:
            raise ConfigError(
                f"eigenvalue.layer_name: found {self.layer_name!r}, which the model does not have; see "
                "model.named_modules() for names"
            ) from None
        layers = list(found.children())
        if len(layers) < max(self.layer_num, 1):
            raise ConfigError(
                f"eigenvalue.layer_num: found {self.layer_num} for {len(layers)} layers in {self.layer_name!r}; name "
                "the list that has them"
            )
        return layers[: self.layer_num] if self.layer_num else layers

    def compute_eigenvalue(
        self, module: nn.Module, device: torch.device | str | None = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]]:
        """Estimate every layer, after `loss.backward(create_graph=True)` has given its parameters their gradients.

        Args:
            module: the model, or an engine around it.
            device: the device of the random vectors; default: the device of the parameters.
            scale: the loss scale.

        Returns:
            id of each weight (2-D and more) of a layer -> (eigenvalue of the layer after `post_process`, number of the
            layer). Empty, with a warning, if no gradient has a graph.
        """
        layers = self.get_layers(module)
        grads: dict[Tensor, Tensor] = {
            param: param.grad for layer in layers for param in layer.parameters() if param.grad is not None
        }
        if not any(grad.grad_fn is not None for grad in grads.values()):
            log.logger.warning("eigenvalue: found no gradient with a graph; call backward(create_graph=True) first")
            return {}
        return self.by_weight(layers, self.estimates(layers, grads, device, scale))

    def estimates(
        self,
        layers: Sequence[nn.Module],
        grads: Mapping[Tensor, Tensor],
        device: torch.device | str | None = None,
        scale: float = 1.0,
    ) -> list[float]:
        """Estimate every layer; the estimate is 0 for a layer without gradients with a graph.

        Args:
            grads: parameter -> gradient with its graph.
            device, scale: see `compute_eigenvalue`.
        """
        values = []
        for number, layer in enumerate(layers):
            params = [param for param in layer.parameters() if param in grads and grads[param].grad_fn is not None]
            values.append(self.largest([grads[param] for param in params], params, device) / scale if params else 0.0)
            if self.verbose:
                log.report(f"eigenvalue of layer {number}: {values[-1]:.6g}")
        return values

    def by_weight(self, layers: Sequence[nn.Module], values: Sequence[float]) -> dict[int, tuple[float, int]]:
        """Convert estimates to the result of `compute_eigenvalue`."""
        processed = self.post_process(values)
        return {
            id(param): (processed[number], number)
            for number, layer in enumerate(layers)
            for param in layer.parameters()
            if param.dim() > 1
        }

    def largest(
        self, grads: Sequence[Tensor], params: Sequence[Tensor], device: torch.device | str | None = None
    ) -> float:
        """Estimate the eigenvalue with the largest absolute value of the Hessian of `params`.

        Args:
            grads: the gradients of the loss with respect to `params`, with their graph.
        """
        chance = torch.Generator().manual_seed(0)  # own generator: estimates must not change dropout in the run
        vector = self.normalize(
            [torch.randn(param.shape, generator=chance).to(device or param.device, param.dtype) for param in params]
        )
        previous = 0.0
        for _ in range(self.max_iter):
            product = torch.autograd.grad(grads, params, grad_outputs=vector, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(p) if hv is None else hv for hv, p in zip(product, params, strict=True)]
            value = float(self.inner_product(filled, vector))
            vector = self.normalize(self.nan_to_num(filled))
            if abs(value - previous) < self.tol * abs(value) or value == 0.0:
                return value
            previous = value
        return previous

    def nan_to_num(self, x: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors with inf and nan replaced by 0."""
        return [torch.nan_to_num(each, nan=0.0, posinf=0.0, neginf=0.0) for each in x]

    def normalize(self, v: Sequence[Tensor]) -> list[Tensor]:
        """Return the vector with length 1. A zero vector does not change."""
        norm = self.inner_product(v, v).sqrt() + self.stability
        return [torch.where(norm > 0, each / norm, each).detach() for each in v]

    def inner_product(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """Return the sum of the products of all elements, computed at least in fp32."""
        wide = torch.promote_types(xs[0].dtype, torch.float32)
        return torch.stack([(x.to(wide) * y.to(wide)).sum() for x, y in zip(xs, ys, strict=True)]).sum()

    def post_process(self, value_list: Sequence[float]) -> list[float]:
        """Return |values| / the largest finite |value|; 1 where not finite, and 1 for all if none is above 0."""
        sizes = torch.tensor(value_list, dtype=torch.float64).abs()
        highest = sizes[sizes.isfinite()].max().item() if sizes.isfinite().any() else 0.0
        if highest == 0.0:
            return [1.0] * len(value_list)
        return [size / highest if size < float("inf") else 1.0 for size in sizes.tolist()]


complete(__name__)
