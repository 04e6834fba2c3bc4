"""AMQP 0-9-1 as Warren itself speaks it: sessions, addresses, and which node answers.

Thin I/O around pika. It may import `maps` and `errors`, nothing else of Warren.
"""
