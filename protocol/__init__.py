"""Everything that crosses a socket: control messages, channels, discovery and HTTP schemas."""
