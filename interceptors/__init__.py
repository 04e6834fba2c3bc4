"""Drop-in wrappers for pika and aio-pika channels. Nothing here yet: see CHANGELOG.md."""
