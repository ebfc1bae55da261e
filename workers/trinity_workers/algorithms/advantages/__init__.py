"""Advantages: functions of a batch with token rewards, the settings, and a sum over ranks."""
