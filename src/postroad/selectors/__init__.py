"""What people ask for: conditions, the matching index, covering and what conditions cost."""

from postroad.selectors.budget import ConditionBudget
from postroad.selectors.covering import covers
from postroad.selectors.index import Group, MatchIndex
from postroad.selectors.selector import Selector

__all__ = ["ConditionBudget", "Group", "MatchIndex", "Selector", "covers"]
