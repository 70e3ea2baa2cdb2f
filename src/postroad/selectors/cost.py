"""What a condition costs to evaluate, in steps of about 10 ns in the kernel.

The figure bounds the event that is worst for the condition: everything that is indexed about it fits, every
item of an AND or OR is asked, and a text that is searched is as long as a text can be. It grows with what the
kernel does, so it also says which of several conditions to ask first.
"""

from __future__ import annotations

from typing import Final

from postroad.selectors import tree
from postroad.selectors.predicate import like_parts
from postroad.selectors.tree import Condition, ValueNode

LONGEST_TEXT: Final = 65_535  # bytes of an attribute
_CHARACTERS_PER_STEP: Final = 4  # of a text that is searched, for each word of 64 signs
_BYTES_PER_STEP: Final = 256  # of two texts that are compared
_WORD: Final = 64


def evaluation_steps(node: Condition | ValueNode) -> int:
    match node:
        case tree.Constant() | tree.Attribute() | tree.IsNull():
            return 1
        case tree.Negate():
            return 1 + evaluation_steps(node.operand)
        case tree.Arithmetic():
            return 1 + evaluation_steps(node.left) + evaluation_steps(node.right)
        case tree.Compare():
            return 1 + evaluation_steps(node.left) + evaluation_steps(node.right) + _text_steps(node)
        case tree.In():
            return 1 + evaluation_steps(node.operand) + len(node.values).bit_length()
        case tree.Like():
            return 1 + evaluation_steps(node.operand) + _like_steps(node)
        case tree.Not():
            return 1 + evaluation_steps(node.item)
        case tree.And() | tree.Or():
            return 1 + sum([1 + evaluation_steps(item) for item in node.items])


def _text_steps(node: tree.Compare) -> int:
    """Two attributes share the bytes that an event has for attributes; a literal is short."""
    if isinstance(node.left, tree.Attribute) and isinstance(node.right, tree.Attribute):
        return LONGEST_TEXT // 2 // _BYTES_PER_STEP
    return 0


def _like_steps(node: tree.Like) -> int:
    """What stands before the first % and behind the last is compared once; between them the text is searched,
    which takes each of its characters as many words as the longest piece has."""
    lengths = [0]
    for part in like_parts(node.pattern, node.escape):
        if part == "":
            lengths.append(0)
        else:
            lengths[-1] += 1
    steps = lengths[0] + lengths[-1]
    if any(lengths[1:-1]):
        steps += (1 + max(lengths[1:-1]) // _WORD) * LONGEST_TEXT // _CHARACTERS_PER_STEP
    return steps
