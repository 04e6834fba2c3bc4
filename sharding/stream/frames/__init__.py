"""The stream protocol without a socket: bytes to events, requests to bytes."""
