"""PySpark source and sink over Warren's routing. Nothing here yet: see CHANGELOG.md."""
