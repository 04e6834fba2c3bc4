"""The command `warren`: one module for each family of sub-commands.

It may import every other part of `sharding`, and nothing imports it.
"""
