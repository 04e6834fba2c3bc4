"""Chunks as Arrow record batches, without a Python object for each message. Pure."""
