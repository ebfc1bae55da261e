"""Subscriptions: events and announcements of a run, as an asynchronous iterator."""

from .context import BLOCK
from .delivered import Delivered
from .group_member import CLAIM_AFTER, MAX_DELIVERIES
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
