"""Hints: rank functions that say which ready task runs first, and orders to rank by."""

from rrfp_jax.hints.hint import Hint, HintError, Rank, StageView, ask_rank
from rrfp_jax.hints.load import load_hint
from rrfp_jax.hints.order import OrderHint, check_order, checked_order
from rrfp_jax.hints.shipped import SHIPPED

__all__ = [
    "SHIPPED",
    "Hint",
    "HintError",
    "OrderHint",
    "Rank",
    "StageView",
    "ask_rank",
    "check_order",
    "checked_order",
    "load_hint",
]
