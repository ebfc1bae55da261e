"""Subscriptions: events and announcements of a run, as an asynchronous iterator."""

from .context import SubscriptionTimeouts
from .delivered import Delivered
from .group_member import CLAIM_AFTER, MAX_DELIVERIES
from .subscription import OpenLog, Subscription, subscribe, subscription_on

__all__ = [
    "CLAIM_AFTER",
    "MAX_DELIVERIES",
    "Delivered",
    "OpenLog",
    "Subscription",
    "SubscriptionTimeouts",
    "subscribe",
    "subscription_on",
]
