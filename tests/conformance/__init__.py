"""One script, two worlds: the broker's plugin with a raw client, and no plugin with our wrapper."""
