"""What people ask for: conditions, the matching index and covering."""

from postroad.selectors.covering import covers
from postroad.selectors.index import Group, MatchIndex
from postroad.selectors.selector import Selector

__all__ = ["Group", "MatchIndex", "Selector", "covers"]
