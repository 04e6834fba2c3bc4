"""Where each stream lives now: the route cache.

`values` and `rules` are pure, the time is passed in; `cache` is the thread around them, `pressure`
says how busy the machine is.
"""
