from postroad.kernel.reference import bloom_add, bloom_contains

__all__ = ["bloom_add", "bloom_contains"]
