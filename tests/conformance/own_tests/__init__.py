"""pika's and aio-pika's own tests, run through our wrappers."""
