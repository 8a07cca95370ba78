"""The hook implementations of this plugin."""
