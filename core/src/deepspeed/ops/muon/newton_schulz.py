"""Newton-Schulz orthogonalisation: the nearest semi-orthogonal matrix, by matrix products alone."""

import torch
from torch import Tensor

from deepspeed.errors import ConfigError

NS_METHODS = ("gram", "standard")
# The quintic's coefficients (K. Jordan et al., "Muon", 2024): steep at 0, so that five steps bring every singular
# value of a matrix of spectral norm <= 1 into about [0.7, 1.2]; it does not converge to 1, and need not.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrix: Tensor, steps: int = 5, method: str = "gram", eps: float = 1e-7) -> Tensor:
    """U V^T of `matrix` = U S V^T, approximately: singular values end in about [0.7, 1.2].

        X <- G / (|G|_F + eps);   steps times:  X <- a X + b (X X^T) X + c (X X^T)^2 X

    "gram" multiplies the same polynomial up on the small square matrix R = X X^T and applies it once; equal up to
    rounding, cheaper for rectangular matrices. On the host and for "gram" the arithmetic is fp32; "standard" on a
    device runs in bf16, as in the reference implementation. Called by `muon_update`.

    Args:
        matrix: (..., M, N), floating; leading dimensions are a batch.
        steps: how often the polynomial is applied.
        method: "gram" or "standard".
        eps: added to the Frobenius norm.

    Returns:
        Of the matrix's shape and dtype.

    Raises:
        ConfigError: another method.

    >>> singular_values = torch.linalg.svdvals(orthogonalize(torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 5.0]])))
    >>> bool((singular_values > 0.6).all() and (singular_values < 1.3).all())
    True
    """
    if method not in NS_METHODS:
        raise ConfigError(f"ns_method: found {method!r}, but it must be one of {', '.join(NS_METHODS)}")
    if matrix.numel() == 0:
        return matrix.clone()
    tall = matrix.size(-2) > matrix.size(-1)
    use_gram = method == "gram" and matrix.size(-2) != matrix.size(-1)
    on_host = matrix.device.type == "cpu"
    wide = matrix.to(torch.float32 if use_gram or on_host else torch.bfloat16)
    wide = wide.mT if tall else wide
    wide = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + eps)
    result = _by_gram(wide, steps) if use_gram else _by_products(wide, steps)
    return (result.mT if tall else result).to(matrix.dtype)


def _by_products(wide: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = _A * wide + (_B * gram + _C * gram @ gram) @ wide
    return wide


def _by_gram(wide: Tensor, steps: int) -> Tensor:
    # p = aI + bR + cR^2 commutes with R, so X_{k+1} = p X_k gives R_{k+1} = p R_k p, and all p's multiply up in Q
    gram = wide @ wide.mT
    product = identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    for _ in range(steps):
        polynomial = _A * identity + _B * gram + _C * gram @ gram
        product = polynomial @ product
        gram = polynomial @ gram @ polynomial
    return product @ wide
