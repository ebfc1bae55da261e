"""Subscriptions: what became true in a run, as an asynchronous iterator."""

from .delivered import Delivered
from .member import CLAIM_AFTER, MAX_DELIVERIES
from .reading import BLOCK
from .subscription import OpenLog, Subscription, subscribe, subscription_on

__all__ = [
    "BLOCK",
    "CLAIM_AFTER",
    "MAX_DELIVERIES",
    "Delivered",
    "OpenLog",
    "Subscription",
    "subscribe",
    "subscription_on",
]
