"""Handlers: which message may run, in which order, and what follows a failure.

`delivery` and `scheduler` are pure; `threads` and `tasks` run handlers. Nothing here knows queues
or streams.
"""
