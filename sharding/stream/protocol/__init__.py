"""The stream protocol without a socket: bytes to events, requests to bytes.

It knows no socket, no thread and no clock, and imports nothing else of the stream client but
`errors`.
"""
