from postroad.kernel.reference import (
    concatenate,
    decode_attributes,
    encode_attributes,
    gather,
    packed_ids,
    unpack_rows,
    with_ticks,
)

__all__ = [
    "concatenate",
    "decode_attributes",
    "encode_attributes",
    "gather",
    "packed_ids",
    "unpack_rows",
    "with_ticks",
]
