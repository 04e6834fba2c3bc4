"""Reading streams: what the driver plans, and what a task does with its range."""
