"""A model and an engine that cost microseconds and are exact: a row that is lost, old or another's changes the text."""
