"""What crosses between nodes: control messages, their channels, discovery, and who is let in."""
