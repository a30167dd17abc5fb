"""Whether torch can form the ranks of a job again."""


def is_torch_elastic_compatible() -> bool:
    """Whether torch has its elastic agent; every torch that ds-core takes does."""
    return True
