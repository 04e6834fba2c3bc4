"""Connections: made, shared, brought to the right node, and made again."""
