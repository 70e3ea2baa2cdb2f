from postroad.kernel.reference import (
    concatenate,
    decode_attributes,
    encode_attributes,
    gather,
    intact,
    packed_ids,
    sealed,
    unpack_rows,
    with_ticks,
)

__all__ = [
    "concatenate",
    "decode_attributes",
    "encode_attributes",
    "gather",
    "intact",
    "packed_ids",
    "sealed",
    "unpack_rows",
    "with_ticks",
]
