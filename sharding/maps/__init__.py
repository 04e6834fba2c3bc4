"""Shard maps, and all that is decided about them: pure values and functions.

Which shard a key belongs to, which shards there should be, and which record of the map log counts.
Nothing here does I/O, reads a clock or imports another part of Warren but `sharding.errors`.
"""
