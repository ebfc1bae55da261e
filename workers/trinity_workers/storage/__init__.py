"""Files and object storage."""
