"""Losses of the policy: functions of tokens and the settings, which return one loss a token."""
