"""The live page: its parts, its document, and the stream that keeps it current."""
