"""What processes of a pool do in tests."""

import os
import threading


def double(index, factor, orders):
    """Answers an order with its number, times a factor."""
    orders.send(None)
    while True:
        orders.send((index, factor * orders.recv()))


def fail(index, orders):
    """The second process has its own mind about orders."""
    orders.send(None)
    order = orders.recv()
    if index == 1:
        raise ValueError(f"no {order} today")
    orders.recv()


def end(index, orders):
    """The first process ends without a word."""
    orders.send(None)
    orders.recv()
    if index == 0:
        os._exit(3)
    orders.recv()


def never_ready(index, orders):
    """Waits for what does not come."""
    threading.Event().wait(60)
