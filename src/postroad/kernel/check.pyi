from postroad.kernel.reference import check_batch, fnv1a64

__all__ = ["check_batch", "fnv1a64"]
