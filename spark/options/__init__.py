"""Every option of the source and the sinks, checked before a query is planned."""
