"""The plugin host: finds plugins, loads what they declare, and resolves it when it is used."""
