"""Operating system: folders, locks, signals, shared memory, and the text of its errors."""
