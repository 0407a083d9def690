"""The plugin host: finds plugins, loads declarations, resolves implementations."""
