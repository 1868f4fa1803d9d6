"""What a user's module of hints may look like, sound and unsound."""

from rrfp_jax.hints import Hint, OrderHint
from rrfp_jax.hints.shipped import SHIPPED
from rrfp_jax.task import Kind, Task


class Newest(Hint):
    """Youngest microbatch first."""

    @property
    def name(self):
        return "newest"

    def rank(self, task, view):
        return (-task.microbatch, view.num_ready(task.kind))


class NeedsArguments(Newest):
    def __init__(self, weight):
        self.weight = weight


newest = Newest()
not_a_hint = object()


class Ranked(Hint):
    """Gives every task the same given rank, or raises it."""

    def __init__(self, rank):
        self._rank = rank

    @property
    def name(self):
        return "ranked"

    def rank(self, task, view):
        if isinstance(self._rank, Exception):
            raise self._rank
        return self._rank


class Edited(OrderHint):
    """The order of ``1f1b`` after an edit."""

    def __init__(self, edit):
        self._edit = edit

    @property
    def name(self):
        return "edited"

    def order(self, shape, num_microbatches):
        return self._edit(list(SHIPPED["1f1b"].order(shape, num_microbatches)), shape)


def swap(order, first, second):
    """The order with two tasks exchanged, where it has both."""
    places = [order.index(task) for task in map(Task.parse, (first, second)) if task in order]
    if len(places) == 2:
        order[places[0]], order[places[1]] = order[places[1]], order[places[0]]
    return order


def forwards_from_the_last_on(order, shape):
    """Stage 0 forwards from the last microbatch on; the others wait for the first."""
    if shape.stage:
        return order
    forwards = [task for task in order if task.kind is Kind.F]
    return [*reversed(forwards), *(task for task in order if task.kind is not Kind.F)]


def wait_in_a_ring(order, shape):
    """Stage 0 finishes each microbatch before the next, stage 1 wants them all at once."""
    if shape.stage == 0:
        return sorted(order, key=lambda task: task.microbatch)
    if shape.stage == 1:
        return sorted(order, key=lambda task: task.kind is not Kind.F)
    return order


def last_weight_first(order, shape):
    """The last but one W behind the last."""
    weights = [task for task in order if task.kind is Kind.W]
    order.remove(weights[-2])
    return [*order, weights[-2]]
